// LayerCore: what layers of one shape share: the expert-parallel group, the grouped products over
// its launcher, and the buffers between the stages, one set for each local rank, since forwards of
// a rank run one after the other. Weights are a Layer's own. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <crossdock/moe/layer.hpp>

#include "ep/core.hpp"
#include "moe/gemm_core.hpp"
#include "moe/shared_experts.hpp"

namespace crossdock::moe {

// Weights of one layer on one rank: its own copy, or memory of the caller.
struct RankWeights {
  u32 rank = 0;
  WeightsView view = {};  // gate_up null: none yet
  symm::LocalMemory gate_up = {}, gate_up_scales = {}, down = {}, down_scales = {};
  Number bias_number = Number::kF32;
  symm::LocalMemory gate_up_bias = {}, down_bias = {};  // without memory: none
};

// Whose weights: of the experts that tokens choose, or of those that they all go through.
enum class Experts : bool { kChosen, kShared };

// Whether rows are e4m3 with scales; else bf16.
constexpr bool scaled(const LayerOptions& options) {
  return options.format != Format::kBf16;
}
constexpr Format row_format(const LayerOptions& options) {
  return scaled(options) ? Format::kE4m3 : Format::kBf16;
}
constexpr u32 row_width(const LayerOptions& options) {
  return scaled(options) ? 1 : 2;
}
// Of the scales of a row of `values`, in words of 4 bytes; by column as many rows of them.
constexpr u32 scale_words(const LayerOptions& options, u32 values) {
  if (!scaled(options)) return 0;
  return options.scales == ScaleType::kUe8m0 ? device::ceil_div(values, 512u) : values / 128;
}

// A forward between its halves: where its rows are, and when they are there.
struct Begun {
  std::shared_ptr<LayerCore> core;
  u32 rank = 0;
  LayerInput input;
  std::optional<ep::Handle> handle;
  StreamPtr stream = nullptr;            // begin()'s
  std::uint64_t capture = 0;             // that begin() was part of; 0: none
  const cuda::Event* arrived = nullptr;  // GPU: reached when the rows are there
  bool joined = false;                   // a stream of the caller's waits for `arrived`

  Begun(std::shared_ptr<LayerCore> of, u32 r, const LayerInput& in)
      : core(std::move(of)), rank(r), input(in) {}
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;
  ~Begun();
};

// The stages of a forward, in order.
enum class LayerStage : device::u8 {
  kDispatch,
  kGroup,
  kOrder,  // of no launch where the product gathers its rows
  kFirst,
  kSecond,
  kReduce,
  kCombine
};

class LayerCore : public std::enable_shared_from_this<LayerCore> {
 public:
  // One forward; `stage_done` is called after each stage's launch, for tools that time them.
  struct Call {
    LayerInput input = {};
    LayerOutput output = {};
    StreamPtr stream = nullptr;
    // Where the layer has shared experts, which then count as part of the dispatch.
    const RankWeights* shared = nullptr;
    std::function<Result<>(LayerStage)> stage_done = {};
  };
  static Result<std::shared_ptr<LayerCore>> create(std::shared_ptr<ep::Core> group,
                                                   const LayerOptions& options, Deadline deadline);

  Result<> forward(const RankWeights& weights, const Call& call);
  // The same in two calls (layer_split.cpp): the dispatch, on a stream of the library, and the
  // rest.
  // `call.output` belongs to the end, `call.input` to the begin.
  Result<std::unique_ptr<Begun>> begin(const RankWeights& weights, const Call& call);
  Result<> end(const RankWeights& weights, Begun& begun, const Call& call);
  void forget(const Begun& begun) noexcept;

  [[nodiscard]] ep::Core& group() const { return *group_; }
  [[nodiscard]] GemmCore& gemm() const { return *gemm_; }
  [[nodiscard]] symm::Rank& rank(u32 r) const { return group_->group().rank(r); }
  [[nodiscard]] const LayerOptions& options() const { return options_; }
  [[nodiscard]] const LayerSizes& memory() const { return sizes_; }
  [[nodiscard]] WeightLayout weight_layout(u32 rank, Experts of = Experts::kChosen) const;
  // kGather or kCopy.
  [[nodiscard]] RowOrder row_order(const LayerInput& input) const;
  // kIncompatible, naming both layouts, and what is wrong with the addresses.
  Result<> check_weights(u32 rank, const WeightsView& weights, Experts of = Experts::kChosen) const;
  // As check_weights(), and they are memory of the rank's GPU.
  Result<> check_there(u32 rank, const WeightsView& weights, Experts of = Experts::kChosen) const;
  Result<RankWeights> copy_weights(u32 rank, const WeightsView& from, Deadline deadline,
                                   Experts of = Experts::kChosen) const;

  // layer_bias.cpp
  Result<> copy_bias(RankWeights& weights, const ExpertBias& bias, Deadline deadline) const;

 private:
  // Of one rank, from one stage to the next.
  struct Buffers {
    u32 rank = 0;
    symm::LocalMemory activations;        // [places][inter]
    symm::LocalMemory activation_scales;  // e4m3: [inter / 128][places]
    symm::LocalMemory outputs;            // bf16 [places][hidden]; before that: ordered rows
    symm::LocalMemory ones;               // [max_tokens][top_k]: for choices without weights
  };
  LayerCore(std::shared_ptr<ep::Core> group, const LayerOptions& options)
      : options_(options), group_(std::move(group)) {}
  Result<> allocate(u32 rank, Deadline deadline);
  // The biases of the products: whether there are any counts.
  Result<> prepare(Deadline deadline, std::optional<Bias> of_first = {},
                   std::optional<Bias> of_second = {}) const;
  [[nodiscard]] const Buffers& buffers(u32 rank) const;
  [[nodiscard]] ep::Side& side(u32 rank);
  Result<> make_side(u32 rank);
  // Which capture the caller's stream is part of; 0: none, and on the CPU.
  [[nodiscard]] Result<std::uint64_t> capture_of(u32 rank, StreamPtr stream) const;
  Result<std::uint64_t> check_begun(u32 rank, StreamPtr stream);
  Result<> follow_begun(u32 rank, StreamPtr stream);
  Result<> free_input(const Begun& begun, StreamPtr stream);
  Result<> follow_dropped(u32 rank, StreamPtr stream, std::uint64_t now);
  Result<> follow_ended(u32 rank, const cuda::Stream* beside, StreamPtr stream, std::uint64_t now);
  Result<> note_ended(const Begun& begun, StreamPtr stream);
  Result<> check_input(const RankWeights& weights, const Call& call) const;
  Result<> check_scales(const LayerInput& input) const;
  Result<> check_output(u32 rank, const LayerInput& input, const LayerOutput& output) const;
  // All that comes after the dispatch, which has `ordered` the rows or not.
  Result<> finish(const RankWeights& weights, const Call& call, const ep::Handle& handle,
                  bool ordered);
  // Blocks of a product that leave the dispatch beside it its SMs.
  [[nodiscard]] u32 blocks_beside(u32 rank) const;
  [[nodiscard]] u32 expected_rows(const LayerInput& input) const;
  [[nodiscard]] ep::Tokens tokens(u32 rank, const LayerInput& input) const;
  // Received rows in the order of their places, with their scales, in the memory of the outputs,
  // which the second product writes when the first has read them.
  [[nodiscard]] ep::Expanded ordered(const Buffers& buffers) const;
  // `first` with such rows.
  [[nodiscard]] GemmCall over(GemmCall first, const ep::Expanded& ordered) const;
  // The two products; `got` and `grouped` may be empty where only their kernels are wanted.
  [[nodiscard]] GemmCall first(const WeightsView& weights, const ep::Received& got,
                               const ep::Grouped& grouped, const Buffers& buffers) const;
  [[nodiscard]] GemmCall second(const WeightsView& weights, const ep::Received& got,
                                const ep::Grouped& grouped, const Buffers& buffers) const;
  [[nodiscard]] u64 scale_columns() const { return device::round_up(u64{sizes_.places}, u64{4}); }

  LayerOptions options_;
  LayerSizes sizes_;
  std::shared_ptr<ep::Core> group_;
  std::shared_ptr<GemmCore> gemm_;
  std::unique_ptr<SharedExperts> shared_;  // null: none
  std::vector<Buffers> buffers_;
};

// What is wrong with the options; see layer_check.cpp.
Result<> check_layer(const LayerOptions& options, u32 world);
Result<> check_group(const ep::Options& group, const LayerOptions& layer);
// Whether the rank has weights; `what`: "weights".
Result<> check_loaded(const RankWeights& weights, const char* what);

}  // namespace crossdock::moe
