// Shared experts: what every token goes through besides the experts it chose, on its own rank: a
// dense product, SwiGLU, a dense product, over the kernels of grouped products with one expert.
// Runs while the tokens travel, and leaves the dispatch its SMs. Its outputs are added by combine.
// Owns the buffers between its stages, one set for each local rank. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <crossdock/layout/moe_cast.cuh>
#include <crossdock/moe/layer.hpp>

#include "ep/core.hpp"
#include "moe/gemm_core.hpp"

namespace crossdock::moe {

class SharedExperts {
 public:
  // `group` and `gemm` outlive it.
  static Result<std::unique_ptr<SharedExperts>> create(ep::Core& group, GemmCore& gemm,
                                                       const LayerOptions& options,
                                                       Deadline deadline);
  // Of one rank, in bytes.
  static u64 buffer_bytes(const LayerOptions& options);

  // Puts all of it on `stream`; its products take `blocks` blocks (0: all).
  Result<> run(u32 rank, const WeightsView& weights, const LayerInput& input, StreamPtr stream,
               u32 blocks);
  // bf16 [count][hidden] of the last run; dense.
  [[nodiscard]] const void* outputs(u32 rank) const;

 private:
  struct Buffers {
    u32 rank = 0;
    symm::LocalMemory offsets;  // [max_tokens + 1][2]: {0, count} for each count
    symm::LocalMemory codes, scales;
    symm::LocalMemory activations, activation_scales;
    symm::LocalMemory outputs;
  };
  SharedExperts(ep::Core& group, GemmCore& gemm, const LayerOptions& options)
      : group_(&group), gemm_(&gemm), options_(options) {}
  Result<> prepare(Deadline deadline);
  Result<> allocate(u32 rank, Deadline deadline);
  [[nodiscard]] const Buffers& buffers(u32 rank) const;
  [[nodiscard]] bool fp8() const { return options_.format != Format::kBf16; }
  [[nodiscard]] u64 scale_columns() const { return device::round_up(options_.max_tokens, 4u); }
  Result<> cast(const Buffers& buffers, const LayerInput& input, StreamPtr stream);
  [[nodiscard]] static const u32* offsets_of(const Buffers& buffers, u32 count);
  [[nodiscard]] GemmCall first(const WeightsView& weights, const LayerInput& input,
                               const Buffers& buffers) const;
  [[nodiscard]] GemmCall second(const WeightsView& weights, const LayerInput& input,
                                const Buffers& buffers) const;

  ep::Core* group_;
  GemmCore* gemm_;
  LayerOptions options_;
  std::optional<symm::Prepared<device::MoeCastRowsParams>> cast_;
  std::vector<Buffers> buffers_;
};

symm::KernelRef<device::MoeCastRowsParams> cast_rows_kernel();

}  // namespace crossdock::moe
