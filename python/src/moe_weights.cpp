// MoeWeights of crossdock._native: weights of expert layers from the matrices of a checkpoint, on
// the host; those made on a rank come from its layer. See moe_weights.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe_weights.hpp"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <string>
#include <utility>

#include "bind.hpp"
#include "ep_checks.hpp"
#include "errors.hpp"
#include "moe_matrices.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

constexpr int64_t kGroup = 128;  // values with one scale, either way

struct Wanted {
  uint32_t experts;
  bool up_first;
  moe::PrepareOptions options;
};

LayerWeights prepare(const Matrices& given, const std::string& number, const Wanted& wanted) {
  PlainMatrices m = plain_matrices(given, wanted.experts, number);
  for (const Tensor* t : m.found.all())
    if (t->data != nullptr && t->device != kHost)
      refuse(fmt::format(
          "moe weights: {} is on GPU {}: copy it to the host first, or prepare it there "
          "with Layer.prepare()",
          t->name, t->device));
  const moe::PlainWeights plain = m.plain(wanted.up_first);
  auto made = [&] {
    const nb::gil_scoped_release release;
    return moe::Weights::prepare(plain, wanted.options.format, wanted.options.scales);
  }();
  const auto kept = std::make_shared<const moe::Weights>(value_or_raise(std::move(made)));
  return {.owner = kept, .view = kept->view(), .report = kept->report()};
}

// What has been prepared already, and is on the host or on one GPU.
LayerWeights take(const Matrices& given, uint32_t experts, uint32_t version,
                  const std::string& format) {
  PreparedMatrices m = prepared_matrices(given, experts, version, format);
  LayerWeights out{.view = m.view, .device = m.found.gate_up.device};
  for (const Tensor* t : m.found.all())
    if (t->data != nullptr && t->device != out.device)
      refuse(fmt::format("moe weights: {} and gate_up are on different devices: move them to one",
                         t->name));
  (void)value_or_raise(moe::weight_sizes(out.view.layout));
  out.held = {given.gate_up, given.down, given.gate_up_scales, given.down_scales};
  return out;
}

// One of the prepared matrices, expert below expert; what was taken comes back as it was given.
nb::object part(const LayerWeights& w, const std::string& name) {
  const bool down = name.starts_with("down"), scales = name.ends_with("scales");
  if (w.owner == nullptr) return w.held[(scales ? 2 : 0) + (down ? 1 : 0)];
  const moe::WeightLayout& layout = w.view.layout;
  const bool bf16 = layout.format == moe::Format::kBf16;
  if (scales && bf16) return nb::none();
  const int64_t rows = int64_t{layout.experts} * (down ? layout.hidden : 2 * layout.inter);
  const int64_t columns = down ? layout.inter : layout.hidden;
  const void* const of_scales = down ? w.view.down_scales : w.view.gate_up_scales;
  const void* const data = scales ? of_scales : down ? w.view.down : w.view.gate_up;
  const ArrayShape shape = scales ? ArrayShape{rows / kGroup, columns / kGroup}
                                  : prepared_shape(layout.format, rows, columns);
  const ArrayType of_scale = layout.scales == moe::ScaleType::kUe8m0 ? carrier(1) : kFloat32;
  const ArrayType type = scales ? of_scale : bf16 ? kBf16 : carrier(1);
  Array out = matrix(w.owner, const_cast<void*>(data), type, shape.rows, shape.columns);
  out.device = w.device;
  return nb::cast(std::move(out));
}

nb::object report_of(const LayerWeights& w) {
  if (!w.report) return nb::none();
  return nb::make_tuple(w.report->groups, w.report->inexact_groups);
}

}  // namespace

void add_moe_weights(nb::module_& m) {
  nb::class_<LayerWeights>(m, "MoeWeights")
      .def_prop_ro("version", [](const LayerWeights& w) { return w.view.layout.version; })
      .def_prop_ro("format",
                   [](const LayerWeights& w) { return format_name(w.view.layout.format); })
      .def_prop_ro("experts", [](const LayerWeights& w) { return w.view.layout.experts; })
      .def_prop_ro("hidden", [](const LayerWeights& w) { return w.view.layout.hidden; })
      .def_prop_ro("inter", [](const LayerWeights& w) { return w.view.layout.inter; })
      .def_prop_ro("scales",
                   [](const LayerWeights& w) { return scale_type_name(w.view.layout.scales); })
      .def_prop_ro("device", [](const LayerWeights& w) { return w.device; })
      .def_prop_ro("taken", [](const LayerWeights& w) { return w.owner == nullptr; })
      .def_prop_ro("report", &report_of)
      .def("part", &part, nb::arg("name"), nb::sig("def part(self, name: str) -> Any"));
  m.def(
      "moe_prepare",
      [](nb::tuple given, uint32_t experts, bool up_first, const std::string& number,
         nb::object format, nb::object scales) {
        return prepare({given[0], given[1], given[2], given[3]}, number,
                       {experts, up_first, {format_of(format), scale_type_of(scales)}});
      },
      nb::arg("matrices"), nb::arg("experts"), nb::arg("up_first"), nb::arg("number"),
      nb::arg("format"), nb::arg("scales"));
  m.def(
      "moe_take",
      [](nb::tuple given, uint32_t experts, uint32_t version, const std::string& format) {
        return take({given[0], given[1], given[2], given[3]}, experts, version, format);
      },
      nb::arg("matrices"), nb::arg("experts"), nb::arg("version"), nb::arg("format"));
}

}  // namespace crossdock::python
