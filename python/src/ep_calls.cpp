// Group: dispatch, combine and rows by expert. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <crossdock/layout/ep.cuh>

#include "ep/core.hpp"
#include "ep_group.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

constexpr const char* kDispatch = "ep dispatch";
constexpr const char* kCombine = "ep combine";
constexpr const char* kReduce = "ep reduce_rows";
constexpr uint32_t kScaleGroup = 128;  // values with one scale

[[noreturn]] void refuse(std::string text) {
  raise(invalid_argument(std::move(text)));
}

// How the bytes of a tensor are shown again: floats that every library knows as what they are.
ArrayType shown_as(const Tensor& t) {
  if (t.kind == dlpack::kFloat || t.kind == dlpack::kBfloat) return {t.kind, t.item_bytes};
  return carrier(t.item_bytes);
}

void need_aligned(const char* call, const Tensor& t) {
  if (t.shape[0] == 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (address % 16 != 0 || t.row_stride() % 16 != 0)
    refuse(
        fmt::format("{}: {} begins at {} with a row every {} bytes, but rows must lie on multiples "
                    "of 16 bytes: copy them to an array of their own, padded if need be",
                    call, t.name, t.data, t.row_stride()));
}

void need_bf16_rows(const char* call, const Tensor& t, int64_t count, uint32_t hidden) {
  need_rows(call, t);
  if (!t.is_bf16())
    refuse(fmt::format("{}: {} is {}: it must be bfloat16 (with NumPy also its codes as uint16)",
                       call, t.name, t.describe()));
  if (t.shape[1] != hidden || (count >= 0 && t.shape[0] != count))
    refuse(fmt::format("{}: {} is {}: it must be [{}, {}]", call, t.name, t.describe(),
                       count >= 0 ? std::to_string(count) : "places", hidden));
  need_aligned(call, t);
}

}  // namespace

Tensor Group::argument(const char* call, const char* name, nb::handle object, uint32_t rank) const {
  const Tensor t = tensor_of(object, call, name);
  need_device(call, t, rank, device_of(rank));
  return t;
}

ep::Tokens Group::add_scales(ep::Tokens tokens, uint32_t rank, const DispatchArguments& a,
                             Payload& payload) {
  if (a.cast) {
    payload.rows = carrier(1);
    payload.scales = kFloat32;
    payload.scale_values = options_.hidden / kScaleGroup;
  }
  if (a.scales.is_none()) return tokens;
  if (a.cast) refuse("ep dispatch: a cast makes its own scales: leave scales out, or cast = False");
  Tensor t = argument(kDispatch, "scales", a.scales, rank);
  need_rows(kDispatch, t);
  if (t.shape[0] != tokens.count)
    refuse(fmt::format("{}: scales is {}: it must have a row for each of the {} tokens", kDispatch,
                       t.describe(), tokens.count));
  if (a.scales_by_column && t.item_bytes != 4)
    refuse(
        fmt::format("{}: scales_by_column delivers words of 4 bytes, but scales is {}: view it as "
                    "int32 first",
                    kDispatch, t.describe()));
  payload.scales = shown_as(t);
  payload.scale_values = t.shape[1];
  tokens.scales = readable(t, rank);
  tokens.scale_bytes = static_cast<uint32_t>(t.row_bytes());
  tokens.scale_stride = t.row_stride();
  return tokens;
}

ep::Tokens Group::tokens_of(uint32_t rank, const DispatchArguments& a, Payload& payload,
                            Framework& framework) {
  Tensor rows = argument(kDispatch, "rows", a.rows, rank);
  need_rows(kDispatch, rows);
  if (a.cast && !rows.is_bf16())
    refuse(
        fmt::format("{}: rows is {}, but a cast takes bfloat16 (with NumPy also its codes as "
                    "uint16): convert it, or call with cast = False",
                    kDispatch, rows.describe()));
  need_aligned(kDispatch, rows);
  Tensor ids = argument(kDispatch, "ids", a.ids, rank);
  if (!ids.is(dlpack::kInt, options_.wide_ids ? 8 : 4))
    refuse(
        fmt::format("{}: ids is {}, but the group was made with wide_ids = {}: convert to {}, or "
                    "make the group with wide_ids = {}",
                    kDispatch, ids.describe(), options_.wide_ids ? "True" : "False",
                    options_.wide_ids ? "int64" : "int32", options_.wide_ids ? "False" : "True"));
  need_matrix(kDispatch, ids, rows.shape[0], options_.top_k);
  ep::Tokens tokens{.count = static_cast<uint32_t>(rows.shape[0]),
                    .rows = readable(rows, rank),
                    .row_bytes = static_cast<uint32_t>(rows.row_bytes()),
                    .row_stride = rows.row_stride(),
                    .cast = a.cast,
                    .scales_by_column = a.scales_by_column,
                    .ids = readable(ids, rank)};
  if (!a.weights.is_none()) {
    Tensor weights = argument(kDispatch, "weights", a.weights, rank);
    if (!weights.is(dlpack::kFloat, 4))
      refuse(fmt::format("{}: weights is {}: it must be float32", kDispatch, weights.describe()));
    need_matrix(kDispatch, weights, rows.shape[0], options_.top_k);
    tokens.weights = static_cast<const float*>(readable(weights, rank));
    payload.weights = true;
  }
  payload.rows = shown_as(rows);
  payload.row_values = rows.shape[1];
  framework = rows.framework;
  return add_scales(tokens, rank, a, payload);
}

Handle Group::dispatch(uint32_t rank, const DispatchArguments& arguments, nb::handle stream) {
  const auto [box, lock] = enter(rank);
  Handle out;
  out.rank = rank;
  out.device = device_of(rank);
  const ep::Tokens tokens = tokens_of(rank, arguments, out.payload, out.framework);
  framework_ = out.framework;
  const ep::StreamPtr on = stream_of(stream, out.framework, out.device);
  ep::Handle made = value_or_raise(launch([&] { return box->group().dispatch(rank, tokens, on); }));
  out.handle = keep(box, rank, std::move(made));
  out.tokens = tokens.count;
  out.top_k = options_.top_k;
  out.hidden = options_.hidden;
  out.world = world_;
  out.experts = device::EpExperts::make(options_.experts, world_).count(rank);
  return out;
}

void Group::combine(const Handle& handle, const CombineArguments& a, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const uint32_t rank = handle.rank;
  const Tensor out = argument(kCombine, "out", a.out, rank);
  need_bf16_rows(kCombine, out, handle.tokens, options_.hidden);
  if (a.bias.size() > 2)
    refuse(fmt::format("{}: {} biases: there can be two at most", kCombine, a.bias.size()));
  ep::Combined combined{.rows = writable(out, rank), .row_stride = twin_ ? 0 : out.row_stride()};
  for (std::size_t i = 0; i < a.bias.size(); ++i) {
    Tensor bias = argument(kCombine, "bias", a.bias[i], rank);
    need_bf16_rows(kCombine, bias, handle.tokens, options_.hidden);
    combined.bias[i] = readable(bias, rank);
    combined.bias_stride[i] = bias.row_stride();
  }
  if (!a.weights.is_none()) {
    const Tensor weights = argument(kCombine, "weights", a.weights, rank);
    if (!weights.is(dlpack::kFloat, 4))
      refuse(fmt::format("{}: weights is {}: it must be float32", kCombine, weights.describe()));
    need_matrix(kCombine, weights, handle.tokens, options_.top_k);
    combined.weights = static_cast<float*>(writable(weights, rank));
  }
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] { return box->group().combine(*from, combined, on); }));
}

std::vector<Array> Group::group_rows(const Handle& handle, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  const ep::Grouped grouped =
      value_or_raise(launch([&] { return box->group().group_rows(*from, on); }));
  const auto capacity = static_cast<int64_t>(from->received().capacity);
  const std::shared_ptr<const void> owner = from;
  const auto writable = [](const void* address) { return const_cast<void*>(address); };
  std::vector<Array> out = {
      vector(owner, writable(grouped.offsets), kInt32, handle.experts + 1),
      vector(owner, writable(grouped.rows), kInt32, static_cast<int64_t>(grouped.places)),
      matrix(owner, writable(grouped.positions), kInt32, capacity, options_.top_k)};
  for (Array& array : out)
    array.device = handle.device;
  return out;
}

void Group::reduce_rows(const Handle& handle, nb::handle by_place, bool weighted,
                        nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  Tensor t = argument(kReduce, "by_place", by_place, handle.rank);
  need_bf16_rows(kReduce, t, -1, options_.hidden);
  const void* const rows = readable(t, handle.rank);
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(
      launch([&] { return box->group().reduce_rows(*from, rows, t.row_stride(), weighted, on); }));
}

}  // namespace crossdock::python
