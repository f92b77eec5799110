// What `crossdock bench moe` is told, shared by its parts: moe.cpp (command line, models and
// order), moe_rig.cpp (data, and whether the result is right), moe_run.cpp (times); with --chain:
// moe_chain.cpp, moe_chain_rig.cpp and moe_routing.cpp; with --vs moe_versus.cpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <crossdock/moe/grouped_gemm.hpp>

#include "bench/figures.hpp"
#include "moe/gemm_core.hpp"

namespace crossdock::tools::bench {

struct MoeBench {
  std::string backend = "gpu";
  std::vector<std::string> models = {"v3", "qwen3-235b", "qwen3-30b", "glm-4.5", "gpt-oss-120b"};
  std::vector<std::uint32_t> rows = {1024, 16};  // of each expert
  std::vector<std::string> formats = {"fp8", "bf16"};
  std::string scales = "f32";  // or ue8m0
  std::vector<std::string> epilogues = {"store"};
  std::vector<std::string> layouts = {"contiguous"};
  std::string tile = "auto";
  bool no_hand_over = false;  // never kernels with GroupedGemmConfig::hand_over
  std::uint32_t world = 4;    // ranks that share the experts
  std::uint32_t repeat = 15;
  std::chrono::nanoseconds idle = std::chrono::milliseconds(20);  // before each launch of a burst
  std::chrono::nanoseconds warm_up = std::chrono::milliseconds(250);  // before sustained launches
  std::chrono::nanoseconds timeout = std::chrono::seconds(280);
  FigureOutput output = {};
  bool chain = false;    // whole layers, on all GPUs
  bool overlap = false;  // and forwards in halves
  bool shared = false;   // with the model's shared experts, if it has any
  std::vector<std::uint32_t> tokens = {8192, 2048, 128, 8};  // of each rank
  std::vector<std::string> routings = {"even"};              // see moe_routing.cpp
  std::vector<std::uint32_t> expand_sms = {0};               // LayerOptions::expand_sms
  std::string versus = {};  // "torch": the same products by it, beside ours
  std::chrono::nanoseconds versus_timeout = std::chrono::seconds(60);  // of one of them
};

// A model's expert layers.
struct MoeModel {
  const char* name;
  std::uint32_t hidden, inner, experts, top_k;
  std::uint32_t shared = 0;  // shared experts, of `inner` values each
};

// One matrix product of a model's expert layer, as one rank has it.
struct MoeProduct {
  std::string model;
  std::string layer;  // "l1", "l2"
  std::uint32_t experts = 0;
  std::uint32_t n = 0;
  std::uint32_t k = 0;
};
// What is measured: a product with so many rows an expert.
struct MoeCase {
  MoeProduct product = {};
  moe::Format format = moe::Format::kE4m3;  // of the weights
  moe::ScaleType scale_type = moe::ScaleType::kF32;
  std::uint32_t rows = 0;
  bool swiglu = false;
  std::string layout = "contiguous";
  moe::GemmTile tile = moe::GemmTile::kAuto;

  [[nodiscard]] bool fp8() const { return format != moe::Format::kBf16; }  // of the input
  [[nodiscard]] bool fp4() const { return format == moe::Format::kE2m1; }
  [[nodiscard]] bool ue8m0() const { return fp8() && scale_type == moe::ScaleType::kUe8m0; }
  [[nodiscard]] std::string name() const;
  [[nodiscard]] double operations() const {
    return 2.0 * product.experts * rows * product.n * product.k;
  }
  // With the exponents of fp4, without other scales.
  [[nodiscard]] double weight_bytes() const {
    const double bits = fp4() ? 4.25 : fp8() ? 8 : 16;
    return product.experts * bits / 8 * product.n * product.k;
  }
};

// Random data of one case in the memory of the rank, the same bytes as a pattern on the host.
class MoeRig {
 public:
  static Result<MoeRig> create(moe::Gemm& gemm, const MoeCase& c, Deadline deadline);
  [[nodiscard]] const moe::GemmCall& call() const { return call_; }
  [[nodiscard]] symm::Rank& rank() const { return gemm_->core().group().rank(0); }
  // Runs once and compares samples of the result with the product in fp64; wrong is kInternal. The
  // relative error (root of the mean squares) of the samples.
  Result<double> verify(Deadline deadline);

 private:
  MoeRig(moe::Gemm& gemm, MoeCase c) : gemm_(&gemm), case_(std::move(c)) {}
  Result<> load(Deadline deadline);
  void describe(std::uint32_t scale_columns);
  [[nodiscard]] double exact(std::uint32_t expert, std::uint32_t place, std::uint32_t column) const;
  [[nodiscard]] std::uint32_t input_row(std::uint32_t place) const;
  // A column's, along K.
  [[nodiscard]] std::vector<float> weights(std::uint32_t expert, std::uint32_t column) const;
  // Scales in the memory of the rank, as the call takes them.
  Result<symm::LocalMemory> put_scales(const std::vector<float>& scales, symm::u64 columns,
                                       Deadline deadline);
  Result<float> output_scale(std::uint32_t place, std::uint32_t group, Deadline deadline);

  moe::Gemm* gemm_;
  MoeCase case_;
  std::vector<std::uint8_t> pattern_;      // of codes: input and weights repeat it
  std::vector<std::uint8_t> fp4_pattern_;  // of blocks of weights
  std::vector<float> input_scales_, weight_scales_;
  std::uint32_t places_ = 0;
  symm::LocalMemory input_, weights_, input_scale_memory_, weight_scale_memory_;
  symm::LocalMemory offsets_, counts_, list_, output_, output_scales_;
  moe::GemmCall call_;
};

// "fp8", "fp4", "bf16": of the weights.
moe::Format moe_format(const std::string& name);

// Random codes of odd length, which fill e4m3 or are normal in bf16; the number at an index where
// memory repeats them, and such memory.
std::vector<std::uint8_t> make_pattern(bool fp8, std::uint32_t seed);
float pattern_value(const std::vector<std::uint8_t>& pattern, symm::u64 index, bool fp8);
Result<symm::LocalMemory> repeat_pattern(symm::Rank& rank, const std::vector<std::uint8_t>& pattern,
                                         symm::u64 bytes, Deadline deadline);
std::vector<float> make_scales(symm::u64 count, float low, float high, std::uint32_t seed);
// Blocks of weights in e2m1 with random codes and every shift; and `count` values along K of row
// `row` of the blocks from `first_block` on, where memory repeats them.
std::vector<std::uint8_t> make_fp4_pattern(std::uint32_t seed);
std::vector<float> fp4_row(const std::vector<std::uint8_t>& pattern, symm::u64 first_block,
                           std::uint32_t row, std::uint32_t count);
// The next power of two, as ue8m0 and as a number.
std::uint32_t ue8m0_code(float scale);
void round_to_powers(std::vector<float>& scales);

// Operations of one multiprocessor's tensor cores in a cycle.
inline constexpr double kE4m3PerCycle = 8192;
inline constexpr double kBf16PerCycle = 4096;

// Bytes a second, read and written, of a large copy on the rank's GPU.
Result<double> measure_copy(symm::Rank& rank, Deadline deadline);
Result<> measure_moe(moe::Gemm& gemm, MoeRig& rig, const MoeCase& c, const MoeBench& options,
                     double copy_rate, std::vector<Figure>& figures, Deadline deadline);

// The same product by torch; what it takes becomes a reference of the case's figures. What torch
// refuses, that it did not answer in time, and that there is none, are facts of the report; where
// there is none it is asked once. What is waited for, and how long at most, is said on stderr.
Result<> compare_with_torch(const MoeCase& c, const MoeBench& options, Deadline deadline,
                            FigureReport& report);

// Whole layers of a model: right for some tokens, then timed; in the twin (`gpus` 0) only right.
Result<> measure_chain(const MoeBench& options, const MoeModel& model, std::uint32_t gpus,
                       std::vector<Figure>& figures, Deadline deadline);

}  // namespace crossdock::tools::bench
