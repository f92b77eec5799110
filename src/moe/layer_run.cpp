// LayerCore: one forward as a row of launches:
//
//   stream of the rank   dispatch ─ group_rows ─ product, SwiGLU ─ product ─ reduce_rows ─ combine
//   memory               slot       lists        activations       outputs   slot's inputs  output
//
// Where experts have many rows, expand_rows brings them in order before the first product, or the
// dispatch itself while others are on their way (LayerOptions::expand_sms).
//
// All that can be wrong with a call is found before the first launch, since peers wait for the rest
// once a dispatch runs. See layer_core.hpp. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "moe/layer_core.hpp"
#include "symm/pointers.hpp"

namespace crossdock::moe {
namespace {

bool aligned(const void* p, u64 alignment) {
  return reinterpret_cast<std::uintptr_t>(p) % alignment == 0;
}

Result<> check_rows(const char* what, const void* rows, u64 stride, u64 bytes) {
  const u64 step = stride == 0 ? bytes : stride;
  if (aligned(rows, 16) && step % 16 == 0 && step >= bytes) return {};
  return invalid_argument(
      fmt::format("moe layer: {} at {} with a stride of {} bytes must be rows of {} bytes on "
                  "multiples of 16, one row apart or more",
                  what, rows, step, bytes));
}

}  // namespace

Result<> check_loaded(const RankWeights& weights, const char* what) {
  if (weights.view.gate_up != nullptr) return {};
  const bool shared = std::strlen(what) > 7;
  return invalid_argument(
      fmt::format("moe layer: rank {} has no {} yet: load{}() or use{}() comes before forward()",
                  weights.rank, what, shared ? "_shared" : "", shared ? "_shared" : ""));
}

Result<> LayerCore::check_scales(const LayerInput& in) const {
  if (in.scales == nullptr || in.count == 0) return {};
  const u64 bytes = u64{scale_words(options_, options_.hidden)} * sizeof(u32);
  const u64 stride = in.scale_stride == 0 ? bytes : in.scale_stride;
  if (aligned(in.scales, 4) && stride % 4 == 0 && stride >= bytes) return {};
  const bool words = options_.scales == ScaleType::kUe8m0;
  return invalid_argument(fmt::format(
      "moe layer: scales at {} with a stride of {} bytes must be [count][{}] of {} on multiples of "
      "4, one row of {} bytes apart or more",
      in.scales, stride, bytes / 4, words ? "4 ue8m0 bytes" : "fp32", bytes));
}

Result<> LayerCore::check_input(const RankWeights& weights, const Call& call) const {
  const LayerInput& in = call.input;
  CROSSDOCK_CHECK_OK(check_loaded(weights, "weights"));
  if (shared_ != nullptr)
    CROSSDOCK_CHECK_OK(check_loaded(*call.shared, "weights of shared experts"));
  if (!aligned(in.shared_weights, 4) || (in.shared_weights != nullptr && shared_ == nullptr))
    return invalid_argument(fmt::format(
        "moe layer: shared_weights at {} must be [count] of fp32 for a layer with shared "
        "experts; this one has shared_inter = {}",
        static_cast<const void*>(in.shared_weights), options_.shared_inter));
  // The shared experts' product looks at it too, but behind the dispatch.
  if (in.count != 0)
    CROSSDOCK_CHECK_OK(symm::check_pointer(
        rank(weights.rank), {"moe", "forward", in.shared_weights, "shared_weights"}));
  if (in.count > options_.max_tokens)
    return invalid_argument(fmt::format(
        "moe layer: {} tokens are more than the max_tokens = {} that the layer was made for",
        in.count, options_.max_tokens));
  if (in.format != Format::kBf16 && in.format != Format::kE4m3)
    return invalid_argument(
        fmt::format("moe layer: rows of the unknown format {}: they are bf16, or e4m3 with scales",
                    static_cast<unsigned>(in.format)));
  if (in.format != Format::kBf16 && !scaled(options_))
    return invalid_argument(
        "moe layer: rows of e4m3 into a layer of bf16: give it rows of bf16, or make it of e4m3");
  if ((in.format == Format::kE4m3) != (in.scales != nullptr) && in.count != 0)
    return invalid_argument(fmt::format("moe layer: rows of {} scales, but they are at {}",
                                        in.format == Format::kE4m3 ? "e4m3 need" : "bf16 have no",
                                        in.scales));
  CROSSDOCK_CHECK_OK(check_scales(in));
  if (in.count == 0) return {};
  if (in.ids == nullptr || !aligned(in.ids, options_.wide_ids ? 8 : 4) || !aligned(in.weights, 4))
    return invalid_argument(fmt::format("moe layer: ids at {} must be [count][{}] of {} bits",
                                        in.ids, options_.top_k, options_.wide_ids ? 64 : 32));
  const u64 row = u64{options_.hidden} * (in.format == Format::kE4m3 ? 1 : 2);
  if (in.rows == nullptr)
    return invalid_argument(fmt::format("moe layer: input rows at {} must be given", in.rows));
  return check_rows("input", in.rows, in.row_stride, row);
}

Result<> LayerCore::check_output(u32 r, const LayerInput& in, const LayerOutput& out) const {
  if (in.count == 0) return {};
  if (out.rows == nullptr)
    return invalid_argument(fmt::format("moe layer: output rows at {} must be given", out.rows));
  CROSSDOCK_CHECK_OK(check_rows("output", out.rows, out.row_stride, u64{options_.hidden} * 2));
  CROSSDOCK_CHECK_OK(
      check_rows("residual", out.residual, out.residual_stride, u64{options_.hidden} * 2));
  const ep::Core::Where where{r, "combine"};
  CROSSDOCK_CHECK_OK(group_->check_memory(where, out.rows, "output rows"));
  return group_->check_memory(where, out.residual, "residual rows");
}

// Rounded up, and no more than kernels were prepared for.
u32 LayerCore::expected_rows(const LayerInput& input) const {
  const u64 per_token = u64{group_->group().world()} * options_.top_k;
  const u64 even = device::ceil_div(input.count * per_token, u64{options_.experts});
  const u64 most = device::ceil_div(options_.max_tokens * per_token, u64{options_.experts});
  const u64 rows = input.expected_rows != 0 ? input.expected_rows : even;
  return static_cast<u32>(std::clamp(rows, u64{1}, std::max(most, u64{1})));
}

// Weights are always delivered: a rank cannot know whether others give theirs, least of all one
// without tokens, and a factor of 1 changes no bit.
ep::Tokens LayerCore::tokens(u32 r, const LayerInput& in) const {
  ep::Tokens t{.count = in.count,
               .rows = in.rows,
               .row_bytes = options_.hidden * (in.format == Format::kE4m3 ? 1 : 2),
               .row_stride = in.row_stride,
               .ids = in.ids,
               .weights = in.weights != nullptr ? in.weights : buffers(r).ones.as<float>()};
  if (!scaled(options_)) return t;
  t.scales_by_column = true;
  t.cast = in.format == Format::kBf16;
  t.cast_ue8m0 = options_.scales == ScaleType::kUe8m0;
  if (t.cast) return t;
  t.like_cast = true;
  t.scales = in.scales;
  t.scale_bytes = scale_words(options_, options_.hidden) * sizeof(u32);
  t.scale_stride = in.scale_stride;
  return t;
}

GemmCall LayerCore::first(const WeightsView& w, const ep::Received& got, const ep::Grouped& grouped,
                          const Buffers& b) const {
  const bool with_scales = scaled(options_);
  return {.weights = {.format = options_.format,
                      .rows = w.gate_up,
                      .scales = w.gate_up_scales,
                      .experts = w.layout.experts,
                      .n = 2 * options_.inter,
                      .k = options_.hidden},
          .input = {.rows = got.rows,
                    .count = got.capacity,
                    .row_stride = got.row_bytes,
                    .scales = with_scales ? got.scales : nullptr,
                    .scale_columns = with_scales ? got.scale_columns : 0},
          .groups = {.offsets = grouped.offsets,
                     .counts = got.expert_counts,
                     .rows = grouped.rows,
                     .places = static_cast<u32>(sizes_.places)},
          .output = {.format = row_format(options_),
                     .rows = b.activations.address(),
                     .scales = b.activation_scales.address(),
                     .scale_columns = with_scales ? scale_columns() : 0},
          .swiglu = Swiglu{.clamp = options_.clamp, .fast = options_.fast},
          .scale_type = options_.scales,
          .tile = options_.tile};
}

RowOrder LayerCore::row_order(const LayerInput& input) const {
  return options_.row_order == RowOrder::kAuto ? choose_row_order(expected_rows(input))
                                               : options_.row_order;
}

ep::Expanded LayerCore::ordered(const Buffers& b) const {
  ep::Expanded to{.places = sizes_.places, .rows = b.outputs.address()};
  if (!scaled(options_)) return to;
  // Rows of e4m3 leave half of the memory free, and scales take a 32nd or less.
  to.scales = b.outputs.as<u8>() + sizes_.places * options_.hidden;
  to.scales_by_column = true;
  to.scale_stride = scale_columns();
  return to;
}

GemmCall LayerCore::over(GemmCall first, const ep::Expanded& ordered) const {
  first.input = {.rows = ordered.rows,
                 .count = static_cast<u32>(sizes_.places),
                 .scales = ordered.scales,
                 .scale_columns = ordered.scale_stride};
  first.groups.rows = nullptr;
  first.groups.places = 0;
  return first;
}

GemmCall LayerCore::second(const WeightsView& w, const ep::Received& got,
                           const ep::Grouped& grouped, const Buffers& b) const {
  return {.weights = {.format = options_.format,
                      .rows = w.down,
                      .scales = w.down_scales,
                      .experts = w.layout.experts,
                      .n = options_.hidden,
                      .k = options_.inter},
          .input = {.rows = b.activations.address(),
                    .count = static_cast<u32>(sizes_.places),
                    .scales = b.activation_scales.address(),
                    .scale_columns = scaled(options_) ? scale_columns() : 0},
          .groups = {.offsets = grouped.offsets, .counts = got.expert_counts},
          .output = {.rows = b.outputs.address()},
          .scale_type = options_.scales,
          .tile = options_.tile};
}

Result<> LayerCore::forward(const RankWeights& weights, const Call& call) {
  CROSSDOCK_CHECK_OK(check_input(weights, call));
  CROSSDOCK_CHECK_OK(check_output(weights.rank, call.input, call.output));
  if (shared_ != nullptr) {
    CROSSDOCK_TRY(begun, begin(weights, call));
    return end(weights, *begun, call);
  }
  CROSSDOCK_CHECK_OK(follow_begun(weights.rank, call.stream));
  const bool orders =
      group_->copies_beside(weights.rank) && row_order(call.input) == RowOrder::kCopy;
  const ep::Expanded to = ordered(buffers(weights.rank));
  CROSSDOCK_TRY(handle, group_->dispatch(weights.rank, tokens(weights.rank, call.input),
                                         {.expanded = orders ? &to : nullptr}, call.stream));
  if (call.stage_done) CROSSDOCK_CHECK_OK(call.stage_done(LayerStage::kDispatch));
  return finish(weights, call, handle, orders);
}

Result<> LayerCore::finish(const RankWeights& weights, const Call& call, const ep::Handle& handle,
                           bool ordered) {
  const u32 r = weights.rank;
  const Buffers& b = buffers(r);
  const ep::Received& got = handle.received();
  const auto done = [&](LayerStage stage) {
    return call.stage_done ? call.stage_done(stage) : Result<>();
  };
  CROSSDOCK_TRY(grouped,
                ordered ? group_->grouped(handle) : group_->group_rows(handle, call.stream));
  CROSSDOCK_CHECK_OK(done(LayerStage::kGroup));

  GemmCall one = first(weights.view, got, grouped, b);
  if (row_order(call.input) == RowOrder::kCopy) {
    const ep::Expanded rows = this->ordered(b);
    if (!ordered) CROSSDOCK_CHECK_OK(group_->expand_rows(handle, rows, call.stream));
    one = over(one, rows);
  }
  CROSSDOCK_CHECK_OK(done(LayerStage::kOrder));
  GemmCall two = second(weights.view, got, grouped, b);
  one.expected_rows = two.expected_rows = expected_rows(call.input);
  // The bias of the second product is weighted with the rest of a choice's output.
  const bool late = weights.down_bias.address() != nullptr;
  if (!late) one.swiglu->row_weights = grouped.weights;
  if (weights.gate_up_bias.address() != nullptr)
    one.bias = Bias{weights.gate_up_bias.address(), weights.bias_number};
  if (late) two.bias = Bias{weights.down_bias.address(), weights.bias_number};
  CROSSDOCK_CHECK_OK(gemm_->run(r, one, call.stream));
  CROSSDOCK_CHECK_OK(done(LayerStage::kFirst));
  CROSSDOCK_CHECK_OK(gemm_->run(r, two, call.stream));
  CROSSDOCK_CHECK_OK(done(LayerStage::kSecond));

  CROSSDOCK_CHECK_OK(
      group_->reduce_rows(handle, {.rows = b.outputs.address(), .weighted = late}, call.stream));
  CROSSDOCK_CHECK_OK(done(LayerStage::kReduce));
  const LayerOutput& out = call.output;
  const void* const shared =
      shared_ != nullptr && call.input.count != 0 ? shared_->outputs(r) : nullptr;
  CROSSDOCK_CHECK_OK(group_->combine(handle,
                                     {.rows = out.rows,
                                      .row_stride = out.row_stride,
                                      .bias = {out.residual, shared},
                                      .bias_stride = {out.residual_stride, 0}},
                                     {}, call.stream));
  // The handle goes: later dispatches of the rank come after this combine.
  return done(LayerStage::kCombine);
}

inline namespace v1 {

RowOrder choose_row_order(std::uint32_t expected_rows) {
  return expected_rows > 64 ? RowOrder::kCopy : RowOrder::kGather;
}

}  // namespace v1
}  // namespace crossdock::moe
