// Group: halves of calls, and ranks that are left out. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep_checks.hpp"
#include "ep_group.hpp"
#include "errors.hpp"

namespace crossdock::python {

void Group::dispatch_receive(const Handle& handle, const std::optional<ExpandArguments>& expanded,
                             nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  ep::Expanded to;
  if (expanded)
    to = expanded_of(
        {"ep dispatch_receive", handle.rank, from->received().row_bytes, handle.payload},
        *expanded);
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] {
    return expanded ? box->group().dispatch_receive(*from, to, on)
                    : box->group().dispatch_receive(*from, on);
  }));
}

void Group::combine_send(const Handle& handle, const ep::CombineOptions& how, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] { return box->group().combine_send(*from, how, on); }));
}

Framework Group::framework() const {
  if (framework_ != Framework::kNone || !loaded_module("torch").is_valid()) return framework_;
  return Framework::kTorch;
}

void Group::mask(uint32_t rank, uint32_t peer, bool masked, nb::handle stream) {
  const auto [box, lock] = enter(rank);
  const ep::StreamPtr on = stream_of(stream, framework(), device_of(rank));
  value_or_raise(launch([&] { return box->group().mask(rank, peer, masked, on); }));
}

void Group::clear_mask(uint32_t rank, nb::handle stream) {
  const auto [box, lock] = enter(rank);
  const ep::StreamPtr on = stream_of(stream, framework(), device_of(rank));
  value_or_raise(launch([&] { return box->group().clear_mask(rank, on); }));
}

void Group::read_mask(uint32_t rank, nb::handle told, nb::handle stream) {
  const auto [box, lock] = enter(rank);
  const int device = device_of(rank);
  const Tensor words = argument("ep read_mask", "told", told, rank);
  if (!words.is(dlpack::kInt, 4) || words.dims != 1 || words.shape[0] != world_ || !words.dense())
    refuse(fmt::format("ep read_mask: told is {}: it must be dense int32 [{}]", words.describe(),
                       world_));
  auto* const to = static_cast<std::int32_t*>(writable(words, rank));
  const ep::StreamPtr on = stream_of(stream, words.framework, device);
  value_or_raise(launch([&] { return box->group().read_mask(rank, to, on); }));
}

Array Group::mask_memory(uint32_t rank) {
  const auto [box, lock] = enter(rank);
  Array array = vector(box, value_or_raise(box->group().mask_memory(rank)), carrier(4), 1);
  array.device = device_of(rank);
  return array;
}

uint32_t Group::masked(uint32_t rank, double timeout) {
  const auto [box, lock] = enter(rank);
  const Deadline deadline = deadline_in(timeout);
  return value_or_raise(launch([&] { return box->group().masked(rank, deadline); }));
}

void bind_masks(nb::class_<Group>& group) {
  group
      .def("mask", &Group::mask, nb::arg("rank"), nb::arg("peer"), nb::arg("masked"),
           nb::arg("stream").none())
      .def("clear_mask", &Group::clear_mask, nb::arg("rank"), nb::arg("stream").none())
      .def("read_mask", &Group::read_mask, nb::arg("rank"), nb::arg("told"),
           nb::arg("stream").none())
      .def_prop_ro("framework", [](const Group& g) { return static_cast<int>(g.framework()); })
      .def("mask_memory", &Group::mask_memory, nb::arg("rank"))
      .def("masked", &Group::masked, nb::arg("rank"), nb::arg("timeout"));
}

}  // namespace crossdock::python
