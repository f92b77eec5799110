// MoeWeights of crossdock._native: weights of expert layers from the matrices of a checkpoint.
// Those of all experts come as one matrix each, expert below expert. See moe_weights.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe_weights.hpp"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <optional>
#include <string>

#include "bind.hpp"
#include "ep_checks.hpp"
#include "errors.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

constexpr const char* kPrepare = "moe weights";
constexpr int64_t kGroup = 128;  // values with one scale, either way

// Matrices of Python; None: no scales.
struct Matrices {
  nb::object gate_up, down, gate_up_scales, down_scales;
};

moe::Number number_of_values(const Tensor& t) {
  if (t.is(dlpack::kFloat, 4)) return moe::Number::kF32;
  if (t.is_bf16()) return moe::Number::kBf16;
  const bool codes = t.framework != Framework::kTorch && t.is(dlpack::kUint, 1);
  if (codes || t.is(dlpack::kFloat8E4m3fn, 1)) return moe::Number::kE4m3;
  refuse(
      fmt::format("{}: {} is {}: it must be float32, bfloat16 or float8_e4m3fn (with NumPy also "
                  "codes, as uint16 and uint8)",
                  kPrepare, t.name, t.describe()));
}

Tensor matrix_of(const char* name, nb::handle object, std::optional<int64_t> rows,
                 std::optional<int64_t> columns) {
  const Tensor t = tensor_of(object, kPrepare, name);
  if (t.dims != 2 || (rows && t.shape[0] != *rows) || (columns && t.shape[1] != *columns))
    refuse(fmt::format("{}: {} of all experts is {}: it must be [{}, {}]", kPrepare, name,
                       t.describe(), rows ? std::to_string(*rows) : "experts * rows",
                       columns ? std::to_string(*columns) : "columns"));
  need_matrix(kPrepare, t, t.shape[0], t.shape[1]);
  return t;
}

const float* scales_of(const char* name, nb::handle object, int64_t rows, int64_t columns,
                       Tensor& t) {
  if (object.is_none()) return nullptr;
  t = matrix_of(name, object, rows / kGroup, columns / kGroup);
  if (!t.is(dlpack::kFloat, 4))
    refuse(fmt::format("{}: {} is {}: it must be float32", kPrepare, name, t.describe()));
  return static_cast<const float*>(t.data);
}

void need_host(const Tensor& t) {
  if (t.device != kHost)
    refuse(
        fmt::format("{}: {} is on GPU {}: copy it to the host first", kPrepare, t.name, t.device));
}

// Where matrices are: they have to agree.
struct Found {
  Tensor gate_up, down, gate_up_scales, down_scales;
  moe::PlainWeights plain;
};
Found find(const Matrices& m, uint32_t experts) {
  if (experts == 0) refuse("moe weights: experts = 0: give the matrices of at least one expert");
  Found f;
  f.gate_up = matrix_of("gate_up", m.gate_up, {}, {});
  f.down = matrix_of("down", m.down, {}, {});
  const int64_t hidden = f.gate_up.shape[1], inter = f.down.shape[1];
  f.gate_up = matrix_of("gate_up", m.gate_up, int64_t{experts} * 2 * inter, hidden);
  f.down = matrix_of("down", m.down, int64_t{experts} * hidden, inter);
  f.plain.experts = experts;
  f.plain.hidden = static_cast<uint32_t>(hidden);
  f.plain.inter = static_cast<uint32_t>(inter);
  f.plain.gate_up = f.gate_up.data;
  f.plain.down = f.down.data;
  f.plain.gate_up_scales =
      scales_of("gate_up_scales", m.gate_up_scales, f.gate_up.shape[0], hidden, f.gate_up_scales);
  f.plain.down_scales =
      scales_of("down_scales", m.down_scales, f.down.shape[0], inter, f.down_scales);
  f.plain.number = number_of_values(f.gate_up);
  if (number_of_values(f.down) != f.plain.number)
    refuse(fmt::format("{}: gate_up is {} and down is {}: both must be of one type", kPrepare,
                       f.gate_up.describe(), f.down.describe()));
  return f;
}

LayerWeights prepare(const Matrices& m, uint32_t experts, bool up_first, nb::handle format) {
  Found f = find(m, experts);
  need_host(f.gate_up);
  need_host(f.down);
  if (f.plain.gate_up_scales != nullptr) need_host(f.gate_up_scales);
  if (f.plain.down_scales != nullptr) need_host(f.down_scales);
  f.plain.up_first = up_first;
  const moe::Format to = format_of(format);
  auto made = [&] {
    const nb::gil_scoped_release release;
    return moe::Weights::prepare(f.plain, to);
  }();
  LayerWeights out;
  out.made = std::make_shared<const moe::Weights>(value_or_raise(std::move(made)));
  out.view = out.made->view();
  return out;
}

// What has been prepared already, and is on the host or on one GPU.
LayerWeights take(const Matrices& m, uint32_t experts, uint32_t version) {
  const Found f = find(m, experts);
  if (f.plain.number == moe::Number::kF32)
    refuse(fmt::format("{}: gate_up is {}: prepared weights are bfloat16 or float8_e4m3fn",
                       kPrepare, f.gate_up.describe()));
  LayerWeights out;
  out.device = f.gate_up.device;
  for (const Tensor* t : {&f.down, &f.gate_up_scales, &f.down_scales})
    if (t->data != nullptr && t->device != out.device)
      refuse(fmt::format("{}: {} and gate_up are on different devices: move them to one", kPrepare,
                         t->name));
  out.view = {.layout = {.version = version,
                         .format = f.plain.number == moe::Number::kE4m3 ? moe::Format::kE4m3
                                                                        : moe::Format::kBf16,
                         .experts = experts,
                         .hidden = f.plain.hidden,
                         .inter = f.plain.inter},
              .gate_up = f.plain.gate_up,
              .gate_up_scales = f.plain.gate_up_scales,
              .down = f.plain.down,
              .down_scales = f.plain.down_scales};
  (void)value_or_raise(moe::weight_sizes(out.view.layout));
  out.held = {m.gate_up, m.down, m.gate_up_scales, m.down_scales};
  return out;
}

// One of the prepared matrices, expert below expert; what was taken comes back as it was given.
nb::object part(const LayerWeights& w, const std::string& name) {
  const bool down = name.starts_with("down"), scales = name.ends_with("scales");
  if (w.made == nullptr) return w.held[(scales ? 2 : 0) + (down ? 1 : 0)];
  const moe::WeightLayout& layout = w.view.layout;
  const bool fp8 = layout.format == moe::Format::kE4m3;
  if (scales && !fp8) return nb::none();
  const int64_t rows = int64_t{layout.experts} * (down ? layout.hidden : 2 * layout.inter);
  const int64_t columns = down ? layout.inter : layout.hidden;
  const void* const of_scales = down ? w.view.down_scales : w.view.gate_up_scales;
  const void* const data = down ? w.view.down : w.view.gate_up;
  if (scales)
    return nb::cast(
        matrix(w.made, const_cast<void*>(of_scales), kFloat32, rows / kGroup, columns / kGroup));
  return nb::cast(matrix(w.made, const_cast<void*>(data), fp8 ? carrier(1) : kBf16, rows, columns));
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
      .def_prop_ro("device", [](const LayerWeights& w) { return w.device; })
      .def_prop_ro("taken", [](const LayerWeights& w) { return w.made == nullptr; })
      .def("part", &part, nb::arg("name"), nb::sig("def part(self, name: str) -> Any"));
  m.def(
      "moe_prepare",
      [](nb::object gate_up, nb::object down, nb::object gate_up_scales, nb::object down_scales,
         uint32_t experts, bool up_first, nb::object format) {
        return prepare({std::move(gate_up), std::move(down), std::move(gate_up_scales),
                        std::move(down_scales)},
                       experts, up_first, format);
      },
      nb::arg("gate_up"), nb::arg("down"), nb::arg("gate_up_scales").none(),
      nb::arg("down_scales").none(), nb::arg("experts"), nb::arg("up_first"), nb::arg("format"));
  m.def(
      "moe_take",
      [](nb::object gate_up, nb::object down, nb::object gate_up_scales, nb::object down_scales,
         uint32_t experts, uint32_t version) {
        return take({std::move(gate_up), std::move(down), std::move(gate_up_scales),
                     std::move(down_scales)},
                    experts, version);
      },
      nb::arg("gate_up"), nb::arg("down"), nb::arg("gate_up_scales").none(),
      nb::arg("down_scales").none(), nb::arg("experts"), nb::arg("version"));
}

}  // namespace crossdock::python
