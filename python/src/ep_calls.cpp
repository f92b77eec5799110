// Group: dispatch. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <crossdock/layout/ep.cuh>

#include "ep/core.hpp"
#include "ep_checks.hpp"
#include "ep_group.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

constexpr uint32_t kScaleGroup = 128;  // values with one scale
constexpr uint32_t kWordScales = 4;    // scales of ue8m0 in a word

}  // namespace

Tensor Group::argument(const char* call, const char* name, nb::handle object, uint32_t rank) const {
  const Tensor t = tensor_of(object, call, name);
  need_device(call, t, rank, device_of(rank));
  return t;
}

void Group::add_scales(ep::Tokens& tokens, uint32_t rank, const DispatchArguments& a,
                       Payload& payload) {
  const uint32_t groups = options_.hidden / kScaleGroup;
  if (tokens.cast) {
    payload.rows = carrier(1);
    payload.scales = tokens.cast_ue8m0 ? kInt32 : kFloat32;
    payload.scale_values = tokens.cast_ue8m0 ? (groups + kWordScales - 1) / kWordScales : groups;
  }
  if (a.scales.is_none()) return;
  if (tokens.cast)
    refuse("ep dispatch: a cast makes its own scales: leave scales out, or cast = False");
  Tensor t = argument(kDispatch, "scales", a.scales, rank);
  need_rows(kDispatch, t);
  if (t.shape[0] != tokens.count)
    refuse(fmt::format("{}: scales is {}: it must have a row for each of the {} tokens", kDispatch,
                       t.describe(), tokens.count));
  if (a.scales_by_column && t.item_bytes != 4)
    refuse(fmt::format(
        "{}: scales_by_column delivers words of 4 bytes, but scales is {}: view it as int32 first",
        kDispatch, t.describe()));
  payload.scales = shown_as(t);
  payload.scale_values = t.shape[1];
  tokens.scales = readable(t, rank);
  tokens.scale_bytes = static_cast<uint32_t>(t.row_bytes());
  tokens.scale_stride = t.row_stride();
}

void Group::add_ids(ep::Tokens& tokens, uint32_t rank, const DispatchArguments& a) {
  if (a.ids.is_none()) {
    if (!a.routing.is_none() && a.weights.is_none()) return;
    refuse(
        "ep dispatch: ids are missing: give them, or the routing of an earlier dispatch instead of "
        "ids and weights");
  }
  Tensor ids = argument(kDispatch, "ids", a.ids, rank);
  if (!ids.is(dlpack::kInt, options_.wide_ids ? 8 : 4))
    refuse(
        fmt::format("{}: ids is {}, but the group was made with wide_ids = {}: convert to {}, or "
                    "make the group "
                    "with wide_ids = {}",
                    kDispatch, ids.describe(), options_.wide_ids ? "True" : "False",
                    options_.wide_ids ? "int64" : "int32", options_.wide_ids ? "False" : "True"));
  need_matrix(kDispatch, ids, tokens.count, options_.top_k);
  tokens.ids = readable(ids, rank);
  if (a.weights.is_none()) return;
  Tensor weights = argument(kDispatch, "weights", a.weights, rank);
  if (!weights.is(dlpack::kFloat, 4))
    refuse(fmt::format("{}: weights is {}: it must be float32", kDispatch, weights.describe()));
  need_matrix(kDispatch, weights, tokens.count, options_.top_k);
  tokens.weights = static_cast<const float*>(readable(weights, rank));
}

ep::Tokens Group::tokens_of(uint32_t rank, const DispatchArguments& a, Payload& payload,
                            Framework& framework) {
  Tensor rows = argument(kDispatch, "rows", a.rows, rank);
  need_rows(kDispatch, rows);
  if (a.cast != Cast::kNone && !rows.is_bf16())
    refuse(
        fmt::format("{}: rows is {}, but a cast takes bfloat16 (with NumPy also its codes as "
                    "uint16): convert it, "
                    "or call with cast = False",
                    kDispatch, rows.describe()));
  need_aligned(kDispatch, rows);
  ep::Tokens tokens{.count = static_cast<uint32_t>(rows.shape[0]),
                    .rows = readable(rows, rank),
                    .row_bytes = static_cast<uint32_t>(rows.row_bytes()),
                    .row_stride = rows.row_stride(),
                    .cast = a.cast != Cast::kNone,
                    .cast_ue8m0 = a.cast == Cast::kUe8m0,
                    .scales_by_column = a.scales_by_column};
  add_ids(tokens, rank, a);
  payload.weights = tokens.weights != nullptr;
  payload.rows = shown_as(rows);
  payload.row_values = rows.shape[1];
  framework = rows.framework;
  add_scales(tokens, rank, a, payload);
  return tokens;
}

ep::DispatchOptions Group::options_of(uint32_t rank, const DispatchArguments& a,
                                      std::shared_ptr<const ep::Handle>& routing,
                                      Payload& payload) const {
  ep::DispatchOptions how;
  how.path = a.path;
  how.most_tokens = a.most_tokens;
  if (!a.routing.is_none()) {
    const auto* const earlier = nb::inst_ptr<Handle>(a.routing);
    routing = earlier->open();
    how.routing = routing.get();
    payload.weights = earlier->payload.weights;
  }
  const auto place = [&](const char* name, nb::handle object, void*& address, uint64_t& room) {
    if (object.is_none()) return;
    const Tensor t = argument(kDispatch, name, object, rank);
    if (t.dims != 1 && !t.dense())
      refuse(fmt::format("{}: {} is {}, but must be dense: give a part of user_memory()", kDispatch,
                         name, t.describe()));
    address = t.data;
    room = t.row_bytes() * static_cast<uint64_t>(t.shape[0]);
  };
  place("output", a.output, how.output, how.output_room);
  place("input", a.input, how.input, how.input_room);
  return how;
}

Handle Group::dispatch(uint32_t rank, const DispatchArguments& arguments, nb::handle stream) {
  const auto [box, lock] = enter(rank);
  Handle out;
  out.rank = rank;
  out.device = device_of(rank);
  const ep::Tokens tokens = tokens_of(rank, arguments, out.payload, out.framework);
  std::shared_ptr<const ep::Handle> routing;
  ep::DispatchOptions how = options_of(rank, arguments, routing, out.payload);
  ep::Expanded expanded;
  if (arguments.expanded) {
    const uint32_t row_bytes = tokens.cast ? options_.hidden : tokens.row_bytes;
    expanded = expanded_of({kDispatch, rank, row_bytes, out.payload}, *arguments.expanded);
    how.expanded = &expanded;
  }
  framework_ = out.framework;
  const ep::StreamPtr on = stream_of(stream, out.framework, out.device);
  ep::Handle made = value_or_raise(launch([&] {
    return arguments.send_only ? box->group().dispatch_send(rank, tokens, how, on)
                               : box->group().dispatch(rank, tokens, how, on);
  }));
  out.handle = keep(box, rank, std::move(made));
  out.tokens = tokens.count;
  out.top_k = options_.top_k;
  out.hidden = options_.hidden;
  out.world = world_;
  out.experts = device::EpExperts::make(options_.experts, world_).count(rank);
  return out;
}

}  // namespace crossdock::python
