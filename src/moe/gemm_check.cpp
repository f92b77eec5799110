// What is wrong with a call of a grouped product. Each error has the rule, the value and the fix.
// Counts and offsets live on the GPU, and are checked there. See gemm_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "moe/gemm_core.hpp"
#include "symm/strides.hpp"

namespace crossdock::moe {
namespace {

using symm::or_dense;

constexpr u64 kMostRows = 0x7fffffff;  // rows are numbered by 32 bits in the GPU's copies

bool aligned(const void* p, u64 alignment) {
  return reinterpret_cast<std::uintptr_t>(p) % alignment == 0;
}
// Of the rows that weights of a format multiply.
Format input_format(const GemmCall& call) {
  return call.weights.format == Format::kBf16 ? Format::kBf16 : Format::kE4m3;
}
u32 width_of(Format format) {
  return format == Format::kBf16 ? 2 : 1;
}

Result<> check_multiple(const char* what, u32 value, u32 of) {
  if (value != 0 && value % of == 0) return {};
  return invalid_argument(
      fmt::format("moe gemm: {} = {} must be a positive multiple of {}: pad to {}", what, value, of,
                  device::round_up(std::max(value, 1u), of)));
}

Result<> check_weights(const GemmWeights& w, ScaleType type, bool swiglu) {
  if (w.format != Format::kBf16 && w.format != Format::kE4m3 && w.format != Format::kE2m1)
    return invalid_argument(
        fmt::format("moe gemm: weights of the unknown format {}", static_cast<unsigned>(w.format)));
  if (w.experts == 0 || w.experts > device::kGemmMaxExperts)
    return invalid_argument(fmt::format("moe gemm: experts = {} must be 1 to {} on one rank",
                                        w.experts, device::kGemmMaxExperts));
  CROSSDOCK_CHECK_OK(check_multiple("n", w.n, swiglu ? 256 : 128));
  CROSSDOCK_CHECK_OK(check_multiple("k", w.k, 128));
  if (u64{w.experts} * w.n > kMostRows)
    return invalid_argument(
        fmt::format("moe gemm: {} experts x n = {} are {} rows of weights; at "
                    "most {}: spread the experts over more ranks",
                    w.experts, w.n, u64{w.experts} * w.n, kMostRows));
  if (w.rows == nullptr || !aligned(w.rows, 16))
    return invalid_argument(
        fmt::format("moe gemm: weights at {} must lie on a multiple of 16", w.rows));
  const bool wanted = w.format != Format::kBf16;
  const bool bytes = type == ScaleType::kUe8m0;
  if (wanted != (w.scales != nullptr) || !aligned(w.scales, bytes ? 1 : 4))
    return invalid_argument(fmt::format(
        "moe gemm: {} weights {} scales, [experts][n / 128][k / 128] of {}, but they are at {}",
        format_name(w.format), wanted ? "need" : "have no", bytes ? "ue8m0 bytes" : "fp32",
        w.scales));
  return {};
}

Result<> check_rows(const char* what, const void* rows, u64 stride, u64 bytes) {
  if (rows != nullptr && aligned(rows, 16) && stride % 16 == 0 && stride >= bytes) return {};
  return invalid_argument(
      fmt::format("moe gemm: {} rows at {} with a stride of {} bytes must lie on multiples of 16, "
                  "one row of {} bytes apart or more",
                  what, rows, stride, bytes));
}

Result<> check_input(const GemmCall& call) {
  const GemmInput& in = call.input;
  const Format format = input_format(call);
  const u64 bytes = u64{call.weights.k} * width_of(format);
  if (in.count > kMostRows)
    return invalid_argument(
        fmt::format("moe gemm: {} input rows; at most {} in one call", in.count, kMostRows));
  CROSSDOCK_CHECK_OK(check_rows("input", in.rows, or_dense(in.row_stride, bytes), bytes));
  if (format == Format::kBf16) {
    if (in.scales == nullptr) return {};
    return invalid_argument("moe gemm: bf16 rows have no scales: leave input.scales empty");
  }
  const u64 columns = or_dense(in.scale_columns, in.count);
  const bool words = call.scale_type == ScaleType::kUe8m0;
  const u32 group = words ? 4 * device::kGemmScaleGroup : device::kGemmScaleGroup;
  // Lists find single scales; whole tiles of rows are copied, which wants multiples of 16 bytes.
  const u64 alignment = call.groups.rows != nullptr ? 4 : 16;
  if (in.scales == nullptr || !aligned(in.scales, alignment) || columns * 4 % alignment != 0 ||
      columns < in.count)
    return invalid_argument(fmt::format(
        "moe gemm: input scales at {} must be [k / {} = {}][scale_columns = {}] of {} on a "
        "multiple of {} bytes, with at least {} columns, a multiple of {}",
        in.scales, group, device::ceil_div(call.weights.k, group), columns,
        words ? "4 ue8m0 bytes" : "fp32", alignment, in.count, alignment / 4));
  return {};
}

Result<> check_groups(const GemmCall& call) {
  const GemmGroups& g = call.groups;
  if (!aligned(g.offsets, 4) || !aligned(g.counts, 4) || !aligned(g.rows, 4))
    return invalid_argument("moe gemm: offsets, counts and rows of groups are 4-byte aligned");
  if (g.rows == nullptr && g.places != 0)
    return invalid_argument(fmt::format(
        "moe gemm: places = {} belong to a list of rows, and groups.rows is null", g.places));
  if (g.rows != nullptr && (g.places == 0 || g.places > kMostRows))
    return invalid_argument(
        fmt::format("moe gemm: a list of rows needs places = {} to be its length, 1 to {}",
                    g.places, kMostRows));
  if (g.offsets != nullptr) return {};
  if (g.counts == nullptr)
    return invalid_argument(
        "moe gemm: groups need offsets [experts + 1] (contiguous) or counts [experts] (masked)");
  const bool scaled = input_format(call) == Format::kE4m3 && g.rows == nullptr;
  if (scaled && g.expert_rows % device::kGemmScaledBegin != 0)
    return invalid_argument(
        fmt::format("moe gemm: expert_rows = {} must be a multiple of {} with e4m3: the rows of an "
                    "expert begin "
                    "at 16 bytes of scales",
                    g.expert_rows, device::kGemmScaledBegin));
  const u64 all = u64{call.weights.experts} * g.expert_rows;
  const u64 room = g.rows != nullptr ? g.places : call.input.count;
  if (all > room)
    return invalid_argument(fmt::format(
        "moe gemm: {} experts x expert_rows = {} are {} places, more than the {} there are",
        call.weights.experts, g.expert_rows, all, room));
  return {};
}

Result<> check_output(const GemmCall& call) {
  const GemmOutput& out = call.output;
  const bool quantised = call.swiglu.has_value() && input_format(call) == Format::kE4m3;
  if (out.format != (quantised ? Format::kE4m3 : Format::kBf16))
    return invalid_argument(fmt::format("moe gemm: the output is {}: {} weights {} give {}",
                                        format_name(out.format), format_name(call.weights.format),
                                        call.swiglu ? "with SwiGLU" : "without SwiGLU",
                                        quantised ? "e4m3" : "bf16"));
  const u64 columns = call.swiglu ? call.weights.n / 2 : call.weights.n;
  const u64 bytes = columns * width_of(out.format);
  CROSSDOCK_CHECK_OK(check_rows("output", out.rows, or_dense(out.row_stride, bytes), bytes));
  // The store goes from row to row by 32 bits, four rows at a time.
  constexpr u64 kMostStride = kMostRows / 4;
  if (out.row_stride > kMostStride)
    return invalid_argument(fmt::format("moe gemm: output rows {} bytes apart; at most {}",
                                        out.row_stride, kMostStride));
  if (!quantised && out.scales != nullptr)
    return invalid_argument("moe gemm: bf16 output has no scales: leave output.scales empty");
  const u64 places = call.groups.rows != nullptr ? call.groups.places : call.input.count;
  const bool words = call.scale_type == ScaleType::kUe8m0;
  if (quantised && (out.scales == nullptr || !aligned(out.scales, 4) ||
                    or_dense(out.scale_columns, places) < places))
    return invalid_argument(fmt::format(
        "moe gemm: output scales at {} must be [{}][scale_columns = {}] of {}, with at least {} "
        "columns",
        out.scales, device::ceil_div(columns, words ? u64{512} : u64{128}), out.scale_columns,
        words ? "4 ue8m0 bytes" : "fp32", places));
  return {};
}

Result<> check_bias(const Bias& bias) {
  if (bias.number != Number::kF32 && bias.number != Number::kBf16)
    return invalid_argument(
        fmt::format("moe gemm: a bias of the number type {} must be f32 ({}) or bf16 ({})",
                    static_cast<unsigned>(bias.number), static_cast<unsigned>(Number::kF32),
                    static_cast<unsigned>(Number::kBf16)));
  if (bias.values != nullptr && aligned(bias.values, 16)) return {};
  return invalid_argument(
      fmt::format("moe gemm: the bias at {} must be [experts][n] on a multiple of 16; leave "
                  "GemmCall::bias empty for none",
                  bias.values));
}

}  // namespace

Result<> check_gemm(const GemmCall& call) {
  if (call.scale_type != ScaleType::kF32 && call.scale_type != ScaleType::kUe8m0)
    return invalid_argument(fmt::format("moe gemm: scales of the unknown type {}",
                                        static_cast<unsigned>(call.scale_type)));
  if (call.scale_type != ScaleType::kF32 && call.weights.format == Format::kBf16)
    return invalid_argument(
        "moe gemm: scale_type = ue8m0 with bf16 weights, which have no scales: leave it f32");
  CROSSDOCK_CHECK_OK(check_weights(call.weights, call.scale_type, call.swiglu.has_value()));
  CROSSDOCK_CHECK_OK(check_groups(call));
  if (call.swiglu && !(call.swiglu->clamp >= 0))
    return invalid_argument(
        fmt::format("moe gemm: clamp = {} must be 0 or more; infinity: none", call.swiglu->clamp));
  if (call.swiglu && !aligned(call.swiglu->row_weights, 4))
    return invalid_argument("moe gemm: row_weights are 4-byte aligned");
  if (call.bias) CROSSDOCK_CHECK_OK(check_bias(*call.bias));
  // Of an empty input no memory is looked at. Its places may be many, with a list that names none
  // of its rows.
  if (call.input.count != 0) CROSSDOCK_CHECK_OK(check_input(call));
  if (call.input.count == 0 && call.groups.rows == nullptr) return {};
  return check_output(call);
}

}  // namespace crossdock::moe
