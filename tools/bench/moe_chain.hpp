// Layers of `crossdock bench moe --chain`: one layer on all ranks with random weights and tokens,
// whose values the host knows. See moe.hpp. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <crossdock/moe/layer.hpp>

#include "bench/moe.hpp"
#include "cuda/stream.hpp"
#include "moe/layer_core.hpp"

namespace crossdock::tools::bench {

struct ChainCase {
  MoeModel model = {};  // its experts: of all ranks that there are
  std::uint32_t ranks = 0;
  bool twin = false;
  moe::Format format = moe::Format::kE4m3;  // of the weights
  moe::ScaleType scale_type = moe::ScaleType::kF32;
  std::uint32_t tokens = 0;  // of each rank
  std::string routing = "even";
  std::uint32_t expand_sms = 0;  // that copy rows beside the dispatch
  bool shared = false;           // with the model's shared experts

  [[nodiscard]] bool fp8() const { return format != moe::Format::kBf16; }  // of the rows
  [[nodiscard]] bool fp4() const { return format == moe::Format::kE2m1; }
  [[nodiscard]] bool ue8m0() const { return fp8() && scale_type == moe::ScaleType::kUe8m0; }
  [[nodiscard]] std::string name() const;
  [[nodiscard]] std::uint64_t local_experts() const { return model.experts / ranks; }
  [[nodiscard]] std::uint32_t shared_experts() const { return shared ? model.shared : 0; }
  // Of a rank on average, in one forward; and in the second product, half of those of the first.
  [[nodiscard]] double operations() const {
    return 6.0 * tokens * (model.top_k + shared_experts()) * model.hidden * model.inner;
  }
  [[nodiscard]] double second_operations() const {
    return 2.0 * tokens * model.top_k * model.hidden * model.inner;
  }
  // Of a value of the weights; with the exponents of fp4, without other scales.
  [[nodiscard]] double weight_width() const { return fp4() ? 4.25 / 8 : fp8() ? 1 : 2; }
  [[nodiscard]] double weight_bytes() const {
    return 3.0 * static_cast<double>(local_experts() + shared_experts()) * model.hidden *
           model.inner * weight_width();
  }
};

// Of one rank's tokens.
struct ChainRouting {
  std::vector<std::int32_t> ids;     // [tokens][top_k]
  std::vector<float> weights;        // [tokens][top_k]
  std::vector<std::uint32_t> words;  // [tokens]: a token is this row of the pattern
};
// `embedding`: the pattern that tokens are rows of.
ChainRouting route(const ChainCase& c, std::uint32_t rank,
                   const std::vector<std::uint8_t>& embedding);

// Bytes that the stages of a forward move at least, the mean of the ranks, in the stages' order.
struct ChainBytes {
  std::array<double, 7> hbm = {};     // read and written
  std::array<double, 7> nvlink = {};  // sent, or fetched
  double places = 0;                  // choices a rank computes: the mean, and the most
  double most_places = 0;
};
ChainBytes bytes_moved(const ChainCase& c, const std::vector<ChainRouting>& of_ranks,
                       bool copies_rows);

class ChainRig {
 public:
  static Result<ChainRig> create(const ChainCase& c, Deadline deadline);
  [[nodiscard]] moe::Layer& layer() { return layer_; }
  [[nodiscard]] symm::Rank& rank(std::uint32_t r) { return layer_.core().rank(r); }
  // `stage_done`, if any, is called after the launch of each stage.
  Result<> forward(std::uint32_t r, std::function<Result<>(moe::LayerStage)> stage_done = {});
  // The halves of a forward.
  Result<moe::BegunForward> begin(std::uint32_t r);
  Result<> end(std::uint32_t r, moe::BegunForward& begun);
  // Of all ranks, as they are now.
  Result<std::vector<std::vector<std::uint8_t>>> outputs(Deadline deadline);
  [[nodiscard]] ChainBytes bytes() const;
  // One forward; some values of one token of each rank against fp64. Wrong is kInternal. The
  // relative error (root of the mean squares).
  Result<double> verify(Deadline deadline);

 private:
  struct Memory {
    std::uint32_t rank = 0;
    symm::LocalMemory rows, ids, weights, output;
    moe::LayerInput input;
    moe::RankWeights chosen, shared;  // the latter without memory: none
  };
  // The same on the host.
  struct KnownWeights {
    std::vector<std::uint8_t> pattern;
    std::vector<float> gate_up_scales, down_scales;
  };
  struct Known {
    std::vector<std::uint8_t> row_pattern;
    KnownWeights chosen, shared;
  };
  ChainRig(const ChainCase& c, moe::Layer layer) : case_(c), layer_(std::move(layer)) {}
  Result<> load(std::uint32_t r, Deadline deadline);
  Result<moe::RankWeights> load_weights(std::uint32_t r, const moe::WeightLayout& layout,
                                        KnownWeights& known, Deadline deadline);
  Result<symm::LocalMemory> put_scales(std::uint32_t r, std::vector<float>& scales,
                                       Deadline deadline);
  Result<> load_tokens(Memory& memory, Known& known, Deadline deadline);
  // The layer's output for one value of a token, in fp64 without the roundings between.
  [[nodiscard]] std::vector<double> exact(std::uint32_t r, std::uint32_t token,
                                          const std::vector<std::uint32_t>& values) const;
  // Row `row` of all experts' matrices of `columns` values a row.
  [[nodiscard]] std::vector<float> weight_row(const KnownWeights& of, symm::u64 row,
                                              std::uint32_t columns) const;
  [[nodiscard]] std::vector<double> activations(const KnownWeights& of, std::uint32_t expert,
                                                const std::vector<float>& row) const;
  // What an expert makes of a row, times `factor`, added to the values of `out`.
  struct Choice {
    const KnownWeights& of;
    std::uint32_t expert;
    double factor;
  };
  void add_expert(const Choice& choice, const std::vector<float>& row,
                  const std::vector<std::uint32_t>& values, std::vector<double>& out) const;

  ChainCase case_;
  moe::Layer layer_;
  std::vector<Memory> memory_;  // by rank: all ranks are in this process
  std::vector<Known> known_;
  std::vector<ChainRouting> routings_;  // by rank
};

// Forwards in a row on one rank: whole, or in halves, where the next begins before one ends.
using ChainRun = Result<> (*)(ChainRig&, std::uint32_t rank, std::uint32_t count);
Result<> run_wholes(ChainRig& rig, std::uint32_t r, std::uint32_t count);
Result<> run_halves(ChainRig& rig, std::uint32_t r, std::uint32_t count);

// Times on GPUs, moe_chain_times.cpp; what they are: moe_chain.cpp.
class ChainTimer {
 public:
  ChainTimer(ChainRig& rig, const MoeBench& options, std::uint32_t tokens, Deadline deadline)
      : rig_(rig), options_(options), per_graph_(tokens > 1000 ? 5 : 20), deadline_(deadline) {}

  Result<double> period_us(ChainRun run);
  Result<double> burst_us();
  Result<double> sustained_us(double guess_us);  // guess: period_us()
  using Stages = std::array<double, 7>;
  Result<Stages> stages_us();
  // Cycles of the slowest block of each product, on the first rank of this process.
  struct Cycles {
    double first = 0, second = 0;
    std::uint32_t sms = 0;
  };
  Result<Cycles> product_cycles();

 private:
  struct OfRank;
  using StageEvents = std::vector<cuda::Event>;
  Result<std::vector<OfRank>> capture(ChainRun run);
  Result<double> time_graphs(std::vector<OfRank>& ranks, std::uint32_t before, std::uint32_t timed);
  Result<StageEvents> record_stages(std::uint32_t r);

  ChainRig& rig_;
  const MoeBench& options_;
  std::uint32_t per_graph_;
  Deadline deadline_;
};

}  // namespace crossdock::tools::bench
