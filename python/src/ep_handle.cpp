// See ep_handle.hpp. SPDX-License-Identifier: Apache-2.0
#include "ep_handle.hpp"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <optional>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

Array on_device(const Handle& h, Array array) {
  array.device = h.device;
  return array;
}

std::optional<Array> scales_of(const Handle& h, const ep::Received& got) {
  if (got.scales == nullptr || h.payload.scale_values == 0) return std::nullopt;
  Array array =
      matrix(h.handle, got.scales, h.payload.scales, got.capacity, h.payload.scale_values);
  if (got.scale_columns != 0) {
    array.strides[0] = 1;
    array.strides[1] = got.scale_columns;
  } else {
    array.strides[0] = got.scale_bytes / h.payload.scales.bytes;
  }
  return on_device(h, array);
}

void* writable(const void* address) {
  return const_cast<void*>(address);
}

// One part of what arrived; nothing where the dispatch brought none.
std::optional<Array> received(const Handle& h, std::string_view part) {
  const ep::Received& got = h.open()->received();
  const auto& owner = h.handle;
  if (part == "rows")
    return on_device(h,
                     matrix(owner, got.rows, h.payload.rows, got.capacity, h.payload.row_values));
  if (part == "scales") return scales_of(h, got);
  if (part == "ids") return on_device(h, matrix(owner, got.ids, kInt32, got.capacity, h.top_k));
  if (part == "weights") {
    if (!h.payload.weights) return std::nullopt;
    return on_device(h, matrix(owner, got.weights, kFloat32, got.capacity, h.top_k));
  }
  if (part == "tokens") return on_device(h, vector(owner, got.tokens, kInt32, got.capacity));
  if (part == "source_ends")
    return on_device(h, vector(owner, writable(got.source_ends), kInt32, h.world));
  if (part == "expert_counts")
    return on_device(h, vector(owner, writable(got.expert_counts), kInt32, h.experts));
  throw nb::attribute_error("no such part of what is received");
}

// Nothing where the caller gave an output and no input.
std::optional<Array> expert_input(const Handle& h, std::string_view part) {
  const auto open = h.open();
  const ep::ExpertInput& input = open->expert_input();
  if (input.rows == nullptr) return std::nullopt;
  const auto capacity = static_cast<int64_t>(open->received().capacity);
  if (part == "rows")
    return on_device(h, matrix(h.handle, input.rows, h.bf16(), capacity, h.hidden));
  if (part == "weights")
    return on_device(h, matrix(h.handle, input.weights, kFloat32, capacity, h.top_k));
  throw nb::attribute_error("no such part of the expert input");
}

// Waits without the GIL.
template <class Wait>
auto wait_for(const Handle& h, double timeout, const Wait& wait) {
  const auto kept = h.open();
  const Deadline deadline = deadline_in(timeout);
  auto result = [&] {
    const nb::gil_scoped_release release;
    return wait(*kept, deadline);
  }();
  return value_or_raise(std::move(result));
}

uint32_t rows(const Handle& h, double timeout) {
  return wait_for(h, timeout, [](const ep::Handle& handle, Deadline d) { return handle.rows(d); });
}
std::vector<uint32_t> expert_counts(const Handle& h, double timeout) {
  return wait_for(h, timeout,
                  [](const ep::Handle& handle, Deadline d) { return handle.expert_counts(d); });
}

}  // namespace

std::shared_ptr<const ep::Handle> Handle::open() const {
  if (!handle)
    raise(make_error(Code::kClosed,
                     fmt::format("ep: the handle of rank {} is closed: its slot belongs to later "
                                 "dispatches; use it before close()",
                                 rank)));
  return handle;
}

ArrayType Handle::bf16() const {
  const bool knows = framework == Framework::kTorch || framework == Framework::kNone;
  return knows ? kBf16 : ArrayType{dlpack::kUint, 2};
}

void add_ep_handle(nb::module_& m) {
  nb::class_<Handle>(m, "Handle")
      .def_ro("rank", &Handle::rank)
      .def_ro("tokens", &Handle::tokens)
      .def_ro("hidden", &Handle::hidden)
      .def_ro("top_k", &Handle::top_k)
      .def_ro("device", &Handle::device)
      .def_ro("experts", &Handle::experts)
      .def_prop_ro("row_values", [](const Handle& h) { return h.payload.row_values; })
      .def_prop_ro("scale_values", [](const Handle& h) { return h.payload.scale_values; })
      .def_prop_ro("has_weights", [](const Handle& h) { return h.payload.weights; })
      .def_prop_ro("source_stride",
                   [](const Handle& h) { return h.open()->received().source_stride; })
      .def_prop_ro("copied", [](const Handle& h) { return h.open()->copied(); })
      .def_prop_ro("framework", [](const Handle& h) { return static_cast<int>(h.framework); })
      .def_prop_ro("closed", [](const Handle& h) { return h.handle == nullptr; })
      .def("close", [](Handle& h) { h.handle.reset(); })
      // Arrays made of it that are still there, also of others: what keeps its slot after close().
      .def_prop_ro("arrays", [](const Handle& h) { return h.open().use_count() - 2; })
      .def("received", &received, nb::arg("part"))
      .def("expert_input", &expert_input, nb::arg("part"))
      .def("rows", &rows, nb::arg("timeout"))
      .def("expert_counts", &expert_counts, nb::arg("timeout"));
}

}  // namespace crossdock::python
