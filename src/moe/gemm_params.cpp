// The parameters of grouped_gemm for one call: tensor maps and strides. See gemm_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "moe/gemm_core.hpp"
#include "symm/tensor_map.hpp"

namespace crossdock::moe {
namespace {

using symm::TensorElement;
using symm::TensorMapOptions;

Result<device::TensorMap> encode(const symm::Rank& rank, const TensorMapOptions& options) {
  const cuda::Context* gpu = rank.device().context();
  return gpu == nullptr ? twin::encode_tensor_map(options) : symm::encode_for_gpu(*gpu, options);
}

// K-major rows in boxes of 128 bytes of K.
Result<device::TensorMap> matrix_map(const symm::Rank& rank, bool fp8, const void* base, u64 rows,
                                     u64 k, u64 stride, u32 box_rows) {
  const u32 width = fp8 ? 1 : 2;
  TensorMapOptions options;
  options.base = const_cast<void*>(base);
  options.element = fp8 ? TensorElement::kU8 : TensorElement::kBf16;
  options.dims = {k, rows};
  options.strides = {stride};
  options.box = {device::kGemmStageBytes / width, box_rows};
  options.swizzle_bytes = 128;
  options.l2_promotion_bytes = 256;
  return encode(rank, options);
}

// Rows of the output in boxes of 64 by 128 bytes.
Result<device::TensorMap> output_map(const symm::Rank& rank, const GemmOutput& output, u64 rows,
                                     u64 columns, u64 stride) {
  return matrix_map(rank, output.format == Format::kE4m3, output.rows, rows, columns, stride, 64);
}

Result<device::TensorMap> scale_map(const symm::Rank& rank, const GemmInput& input, u64 groups,
                                    u64 columns, u32 box_rows) {
  TensorMapOptions options;
  options.base = const_cast<void*>(input.scales);
  options.element = TensorElement::kF32;
  options.dims = {input.count, groups};
  options.strides = {columns * sizeof(float)};
  options.box = {box_rows, 1};
  return encode(rank, options);
}

// An empty input has no memory, and no row of it is read: the kernel finds that no expert has rows,
// or that its list names none. The maps are of some memory nevertheless: the weights.
GemmCall with_some_input(GemmCall call) {
  call.input = {.rows = call.weights.rows, .count = 1, .scales = call.weights.rows};
  call.input.scale_columns = 4;
  return call;
}

}  // namespace

Result<device::GroupedGemmParams> gemm_params(const symm::Rank& rank, const GemmCall& given,
                                              const device::GroupedGemmConfig& config,
                                              std::chrono::nanoseconds wait) {
  const bool empty = given.input.count == 0;
  const GemmCall call = empty ? with_some_input(given) : given;
  const GemmWeights& w = call.weights;
  const bool gather = call.groups.rows != nullptr;
  const u64 row_bytes = u64{w.k} * (config.fp8 ? 1 : 2);
  const u64 stride = call.input.row_stride == 0 ? row_bytes : call.input.row_stride;
  const u64 groups = w.k / device::kGemmScaleGroup;
  const u64 scale_rows = config.ue8m0 ? device::ceil_div(groups, u64{4}) : groups;
  const u64 columns = call.input.scale_columns == 0 ? call.input.count : call.input.scale_columns;
  const u32 places = gather ? call.groups.places : given.input.count;
  const u64 result = call.swiglu ? w.n / 2 : w.n;

  device::GroupedGemmParams p{};
  p.common = rank.common(device::KernelId::kGroupedGemm, wait);
  if (config.fp4) {
    p.weight_blocks = static_cast<const u8*>(w.rows);
  } else {
    CROSSDOCK_TRY(weights, matrix_map(rank, config.fp8, w.rows, u64{w.experts} * w.n, w.k,
                                      row_bytes, device::kGemmColumns));
    p.weight_map = weights;
  }
  if (!gather) {
    CROSSDOCK_TRY(input, matrix_map(rank, config.fp8, call.input.rows, call.input.count, w.k,
                                    stride, config.tile_rows));
    p.input_map = input;
  }
  if (config.fp8 && !gather) {
    CROSSDOCK_TRY(scales, scale_map(rank, call.input, scale_rows, columns, config.tile_rows));
    p.input_scale_map = scales;
  }
  p.input_rows = static_cast<const u8*>(call.input.rows);
  p.input_row_stride = stride;
  p.input_count = given.input.count;
  p.input_scales = static_cast<const float*>(call.input.scales);
  p.input_scale_columns = columns;
  p.weight_scales = w.scales;
  p.rows = {.offsets = call.groups.offsets,
            .counts = call.groups.counts,
            .expert_rows = call.groups.expert_rows,
            .places = places,
            .list = call.groups.rows};
  p.shape = {.experts = w.experts,
             .columns = w.n,
             .k_stages = static_cast<u32>(row_bytes / device::kGemmStageBytes),
             .scale_groups = static_cast<u32>(groups)};
  const u64 dense = result * (call.output.format == Format::kE4m3 ? 1 : 2);
  p.output = {
      .rows = static_cast<u8*>(call.output.rows),
      .row_stride = static_cast<u32>(call.output.row_stride == 0 ? dense : call.output.row_stride),
      .scales = static_cast<float*>(call.output.scales),
      .scale_columns = call.output.scale_columns == 0 ? places : call.output.scale_columns};
  p.hands_over = config.hand_over && !gather && !empty && !call.bias &&
                 device::gemm_long_enough(config, p.shape.k_stages);
  p.skipped = p.hands_over && device::gemm_lends(config) ? config.stages - 1 : ~0u;
  if (p.hands_over) {
    CROSSDOCK_TRY(output, output_map(rank, call.output, places, result, p.output.row_stride));
    p.output_map = output;
  }
  const Swiglu swiglu = call.swiglu.value_or(Swiglu{});
  p.swiglu = {.row_weights = swiglu.row_weights, .clamp = swiglu.clamp, .fast = swiglu.fast};
  const Bias bias = call.bias.value_or(Bias{});
  p.bias = {.values = static_cast<const u8*>(bias.values), .bf16 = bias.number == Number::kBf16};
  return p;
}

}  // namespace crossdock::moe
