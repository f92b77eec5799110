// Core: the arguments of calls. An error names the rule, the value and the fix. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/handle.hpp"
#include "symm/pointers.hpp"
#include "symm/strides.hpp"

namespace crossdock::ep {
namespace {

using symm::or_dense;

bool aligned(const void* p, u64 alignment) {
  return reinterpret_cast<std::uintptr_t>(p) % alignment == 0;
}
bool on_sixteen(const void* p, u64 stride) {
  return aligned(p, 16) && stride % 16 == 0;
}

}  // namespace

// Memory that the driver knows on another GPU, or not at all: a kernel that follows it would end
// the context. On the CPU the twin checks every access.
Result<> Core::check_memory(const Where& where, const void* p, const char* what) const {
  return symm::check_pointer(group_->rank(where.rank), {"ep", where.call, p, what});
}

// What does not depend on the number of tokens, nor on where they are.
Result<> Core::check_shape(const Tokens& t) const {
  const u32 delivered = t.cast ? t.row_bytes / 2 : t.row_bytes;
  if (t.row_bytes == 0 || t.row_bytes % 16 != 0)
    return invalid_argument(
        fmt::format("ep dispatch: row_bytes = {} must be a positive multiple of 16: pad the rows",
                    t.row_bytes));
  if (t.cast && (!options_.cast || t.row_bytes != options_.hidden * 2))
    return invalid_argument(
        fmt::format("ep dispatch: a cast takes rows of bf16, {} bytes for hidden = {}, and a group "
                    "made with cast = true; these have {} bytes",
                    options_.hidden * 2, options_.hidden, t.row_bytes));
  if (t.cast_ue8m0 && !t.cast && !t.like_cast)
    return invalid_argument(
        "ep dispatch: cast_ue8m0 is about the scales of a cast: set cast, or leave it false");
  if (t.cast && t.scale_bytes != 0)
    return invalid_argument("ep dispatch: a cast makes its own scales: leave scales empty");
  if (t.like_cast &&
      (t.cast || !options_.cast || t.row_bytes != options_.hidden ||
       t.scale_bytes > cast_scale_bytes(options_.hidden, t.cast_ue8m0) || !t.scales_by_column))
    return invalid_argument(fmt::format(
        "ep dispatch: like_cast is about rows that are given as a cast would make them, here of {} "
        "bytes with at most {} bytes of scales, by column, in a group made with cast = true; these "
        "have {} and {}",
        options_.hidden, cast_scale_bytes(options_.hidden, t.cast_ue8m0), t.row_bytes,
        t.scale_bytes));
  if (delivered > window_.row_bytes || t.scale_bytes > window_.scale_bytes)
    return invalid_argument(fmt::format(
        "ep dispatch: rows of {} and scales of {} bytes do not fit the slots, made for {} and {}",
        delivered, t.scale_bytes, window_.row_bytes, window_.scale_bytes));
  if (t.scale_bytes % 4 != 0)
    return invalid_argument(
        fmt::format("ep dispatch: scale_bytes = {} must be a multiple of 4", t.scale_bytes));
  return {};
}

Result<> Core::check_tokens(u32 rank, const Tokens& t, const DispatchOptions& how) const {
  CROSSDOCK_CHECK_OK(check_shape(t));
  if (t.count > options_.max_tokens)
    return invalid_argument(fmt::format(
        "ep dispatch: {} tokens are more than the max_tokens = {} that the group was made for",
        t.count, options_.max_tokens));
  if (t.count == 0) return {};
  const u64 stride = or_dense(t.row_stride, t.row_bytes);
  if (t.rows == nullptr || !aligned(t.rows, 16) || stride % 16 != 0 || stride < t.row_bytes)
    return invalid_argument(
        fmt::format("ep dispatch: rows at {} with a stride of {} bytes must lie on multiples of "
                    "16, one row of {} bytes apart or more",
                    t.rows, stride, t.row_bytes));
  const u64 scale_stride = or_dense(t.scale_stride, t.scale_bytes);
  if (t.scale_bytes != 0 &&
      (t.scales == nullptr || !aligned(t.scales, scale_stride % 16 == 0 ? 16 : 4) ||
       scale_stride % 4 != 0 || scale_stride < t.scale_bytes))
    return invalid_argument(
        fmt::format("ep dispatch: scales at {} with a stride of {} bytes must lie on multiples of "
                    "4 (of 16 when the stride is one), {} bytes apart or more",
                    t.scales, scale_stride, t.scale_bytes));
  const Where where{rank, "dispatch"};
  CROSSDOCK_CHECK_OK(check_memory(where, t.rows, "rows"));
  if (t.scale_bytes != 0) CROSSDOCK_CHECK_OK(check_memory(where, t.scales, "scales"));
  if (how.routing != nullptr) {
    if (t.ids == nullptr && t.weights == nullptr) return {};
    return invalid_argument(
        "ep dispatch: with the routing of an earlier dispatch its ids and weights are delivered "
        "again: leave ids and weights empty");
  }
  if (t.ids == nullptr || !aligned(t.ids, options_.wide_ids ? 8 : 4) || !aligned(t.weights, 4))
    return invalid_argument(fmt::format("ep dispatch: ids at {} must be [tokens][{}] of {} bits",
                                        t.ids, options_.top_k, options_.wide_ids ? 64 : 32));
  CROSSDOCK_CHECK_OK(check_memory(where, t.ids, "ids"));
  return check_memory(where, t.weights, "weights");
}

Result<> Core::check_combined(const Handle::State& h, const device::EpCombineOutput& to) const {
  if (h.input.rows == nullptr)
    return invalid_argument(
        "ep combine: the dispatch was given an output and no input: give it "
        "DispatchOptions::input, where the experts put theirs");
  const u64 dense = u64{options_.hidden} * 2;
  const auto good = [&](const void* rows, u64 stride) {
    return on_sixteen(rows, stride) && stride >= dense;
  };
  if ((h.tokens.tokens != 0 && to.rows == nullptr) || !good(to.rows, to.row_stride) ||
      !good(to.bias[0], to.bias_stride[0]) || !good(to.bias[1], to.bias_stride[1]))
    return invalid_argument(
        fmt::format("ep combine: output at {} and biases must be rows of {} bytes on multiples of "
                    "16, with strides of multiples of 16",
                    static_cast<const void*>(to.rows), dense));
  if (!aligned(to.weights, 4))
    return invalid_argument(
        fmt::format("ep combine: weights at {} must begin on a multiple of 4: they are f32",
                    static_cast<const void*>(to.weights)));
  if (h.tokens.tokens == 0) return {};
  const Where where{h.rank, "combine"};
  CROSSDOCK_CHECK_OK(check_memory(where, to.rows, "rows"));
  CROSSDOCK_CHECK_OK(check_memory(where, to.bias[0], "biases"));
  CROSSDOCK_CHECK_OK(check_memory(where, to.bias[1], "biases"));
  return check_memory(where, to.weights, "weights");
}

Result<> Core::check_experts(const Handle::State& h, const ExpertOutput& from) const {
  if (from.rows == nullptr && from.weights == nullptr) return {};
  if (h.placement.slot->kind == SlotKind::kSmall)
    return invalid_argument(
        "ep combine: after a dispatch of few tokens the experts put their rows into "
        "expert_input(): leave Combined::experts empty");
  if (!aligned(from.rows, 16) || !aligned(from.weights, 4))
    return invalid_argument(
        fmt::format("ep combine: the experts' rows at {} must begin on a multiple of 16 and their "
                    "weights at {} on one of 4",
                    from.rows, static_cast<const void*>(from.weights)));
  const Where where{h.rank, "combine"};
  CROSSDOCK_CHECK_OK(check_memory(where, from.rows, "the experts' rows"));
  return check_memory(where, from.weights, "the experts' weights");
}

// A plane is wanted when its pointer is set; what is wanted must have been delivered.
Result<> Core::check_expanded(const Copied& from, const Expanded& to) const {
  const u64 experts = device::EpExperts::make(options_.experts, window_.world).count(from.rank);
  if (u64{to.rows_per_expert} * experts > to.places)
    return invalid_argument(
        fmt::format("ep expand_rows: places = {} must be at least {} experts of the rank with "
                    "rows_per_expert = {}",
                    to.places, experts, to.rows_per_expert));
  if (to.rows != nullptr && (!on_sixteen(to.rows, to.row_stride) ||
                             (to.row_stride != 0 && to.row_stride < from.row_bytes)))
    return invalid_argument(
        fmt::format("ep expand_rows: rows at {} with a stride of {} bytes must lie on multiples of "
                    "16, one row of {} bytes apart or more",
                    to.rows, to.row_stride, from.row_bytes));
  if (to.scales != nullptr && from.scale_bytes == 0)
    return invalid_argument("ep expand_rows: the dispatch had no scales: leave scales empty");
  const u64 least = to.scales_by_column ? to.places : from.scale_bytes;
  if (to.scales != nullptr && (reinterpret_cast<std::uintptr_t>(to.scales) % 4 != 0 ||
                               (to.scale_stride != 0 && to.scale_stride < least) ||
                               (!to.scales_by_column && to.scale_stride % 4 != 0)))
    return invalid_argument(
        fmt::format("ep expand_rows: scales at {} with a stride of {} must lie on multiples of 4 "
                    "bytes, {} {} apart or more",
                    to.scales, to.scale_stride, least,
                    to.scales_by_column ? "words from column to column" : "bytes from row to row"));
  if (to.weights != nullptr && !from.weights)
    return invalid_argument("ep expand_rows: the dispatch had no weights: leave weights empty");
  if (reinterpret_cast<std::uintptr_t>(to.weights) % 4 != 0 ||
      reinterpret_cast<std::uintptr_t>(to.sources) % 4 != 0)
    return invalid_argument(
        fmt::format("ep expand_rows: weights at {} and sources at {} must lie on multiples of 4",
                    static_cast<const void*>(to.weights), static_cast<const void*>(to.sources)));
  const Where where{from.rank, "expand_rows"};
  CROSSDOCK_CHECK_OK(check_memory(where, to.rows, "rows"));
  CROSSDOCK_CHECK_OK(check_memory(where, to.scales, "scales"));
  CROSSDOCK_CHECK_OK(check_memory(where, to.weights, "weights"));
  return check_memory(where, to.sources, "sources");
}

Result<> Core::check_by_place(const Handle& handle, const ByPlace& outputs, u64 stride) const {
  const u32 row_bytes = options_.hidden * 2;
  if (outputs.rows == nullptr || !on_sixteen(outputs.rows, stride) || stride < row_bytes)
    return invalid_argument(
        fmt::format("ep reduce_rows: rows at {} with a stride of {} bytes must lie on multiples of "
                    "16, one row of {} bytes apart or more",
                    outputs.rows, stride, row_bytes));
  if (handle.expert_input().rows == nullptr)
    return invalid_argument(
        "ep reduce_rows: the dispatch was given an output and no input: give it "
        "DispatchOptions::input, where the sums go");
  if (outputs.weighted && !handle.state_->weights)
    return invalid_argument("ep reduce_rows: the dispatch had no weights: use weighted = false");
  if (outputs.ids != nullptr) {
    if (!aligned(outputs.ids, sizeof(std::int32_t)))
      return invalid_argument(
          fmt::format("ep reduce_rows: ids at {} must be i32, on a multiple of {}",
                      static_cast<const void*>(outputs.ids), sizeof(std::int32_t)));
    CROSSDOCK_CHECK_OK(check_memory({handle.rank(), "reduce_rows"}, outputs.ids, "ids"));
  }
  return check_memory({handle.rank(), "reduce_rows"}, outputs.rows, "rows");
}

}  // namespace crossdock::ep
