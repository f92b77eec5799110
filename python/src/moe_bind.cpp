// The classes MoeLayer and MoeForward of crossdock._native. SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "errors.hpp"
#include "moe_layer.hpp"
#include "moe_options.hpp"
#include "ranks.hpp"

namespace crossdock::python {
namespace {

void make_layer(Layer* where, nb::handle options, const Ranks& ranks) {
  moe::LayerOptions out = layer_options_of(options);
  out.ranks = group_options_of(ranks);
  using Made = std::pair<ep::Group, moe::Layer>;
  auto made = [&]() -> Result<Made> {
    const nb::gil_scoped_release release;
    CROSSDOCK_CHECK_OK(moe::layer_sizes(out));  // before anybody is met
    CROSSDOCK_TRY(group, ep::Group::create({.ranks = out.ranks, .ep = moe::group_options(out)}));
    CROSSDOCK_TRY(layer, moe::Layer::create(group, out, Deadline::in(out.compile_timeout)));
    return Made(std::move(group), std::move(layer));
  }();
  auto [group, layer] = value_or_raise(std::move(made));
  new (where) Layer(std::move(group), std::move(layer), out);
}

nb::tuple layout_of(const moe::WeightLayout& layout) {
  return nb::make_tuple(layout.version, format_name(layout.format), layout.experts, layout.hidden,
                        layout.inter, scale_type_name(layout.scales));
}

// Its framework, rows, columns and GPU (-1: the host).
nb::tuple place_of(const Tensor& t) {
  return nb::make_tuple(static_cast<int>(t.framework), t.shape[0], t.shape[1], t.device);
}

void bind_calls(nb::class_<Layer>& layer) {
  layer
      .def(
          "place_of_rows",
          [](Layer& l, uint32_t rank, nb::object rows) { return place_of(l.rows_of(rank, rows)); },
          nb::arg("rank"), nb::arg("rows"))
      .def(
          "forward",
          [](Layer& l, uint32_t rank, nb::tuple input, nb::object out, nb::object residual,
             uint32_t expected_rows, nb::object stream) {
            l.forward(rank, {input[0], input[1], input[2], input[3], input[4], expected_rows},
                      {std::move(out), std::move(residual)}, stream);
          },
          nb::arg("rank"), nb::arg("input"), nb::arg("out"), nb::arg("residual").none(),
          nb::arg("expected_rows"), nb::arg("stream").none())
      .def(
          "forward_begin",
          [](Layer& l, uint32_t rank, nb::tuple input, uint32_t expected_rows, nb::object stream) {
            return l.begin(rank, {input[0], input[1], input[2], input[3], input[4], expected_rows},
                           stream);
          },
          nb::arg("rank"), nb::arg("input"), nb::arg("expected_rows"), nb::arg("stream").none())
      .def(
          "forward_end",
          [](Layer& l, BegunForward& begun, nb::object out, nb::object residual,
             nb::object stream) { l.end(begun, {std::move(out), std::move(residual)}, stream); },
          nb::arg("begun"), nb::arg("out").none(), nb::arg("residual").none(),
          nb::arg("stream").none())
      .def("load", &Layer::load, nb::arg("rank"), nb::arg("weights"), nb::arg("shared"),
           nb::arg("timeout"))
      .def("load_bias", &Layer::load_bias, nb::arg("rank"), nb::arg("gate_up").none(),
           nb::arg("down").none(), nb::arg("up_first"), nb::arg("timeout"))
      .def("use", &Layer::use, nb::arg("rank"), nb::arg("weights"), nb::arg("shared"))
      .def(
          "prepare",
          [](Layer& l, uint32_t rank, nb::tuple given, uint32_t experts, bool up_first,
             std::string number, double timeout) {
            return l.prepare(
                rank,
                {{given[0], given[1], given[2], given[3]}, experts, up_first, std::move(number)},
                timeout);
          },
          nb::arg("rank"), nb::arg("matrices"), nb::arg("experts"), nb::arg("up_first"),
          nb::arg("number"), nb::arg("timeout"))
      .def(
          "empty",
          [](Layer& l, uint32_t rank, const std::string& type, int64_t rows, int64_t columns) {
            if (type != "bfloat16" && type != "int16")
              throw nb::value_error("empty(): no such type");
            return l.empty(rank, type == "int16" ? carrier(2) : kBf16, rows, columns);
          },
          nb::arg("rank"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"));
}

void bind_life(nb::class_<Layer>& layer) {
  layer.def("synchronize", &Layer::synchronize, nb::arg("timeout"), nb::arg("stream").none())
      .def("check", &Layer::check)
      .def("reset", &Layer::reset, nb::arg("timeout"))
      .def(
          "statistics",
          [](Layer& l, uint32_t rank, double timeout) {
            const ep::Statistics got = l.statistics(rank, timeout);
            return std::tuple(got.expert_selections, got.source_wait_ns, got.combine_wait_ns);
          },
          nb::arg("rank"), nb::arg("timeout"))
      .def("sibling", &Layer::sibling)
      .def(
          "weight_layout",
          [](const Layer& l, uint32_t rank) { return layout_of(l.weight_layout(rank)); },
          nb::arg("rank"))
      .def("shared_layout", [](const Layer& l) { return layout_of(l.shared_layout()); })
      .def("close", &Layer::close);
}

}  // namespace

void add_moe_layer(nb::module_& m) {
  nb::class_<BegunForward>(m, "MoeForward")
      .def_prop_ro("rank", [](const BegunForward& b) { return b.rank; })
      .def_prop_ro("tokens", [](const BegunForward& b) { return b.tokens; })
      .def_prop_ro("device", [](const BegunForward& b) { return b.device; })
      .def_prop_ro("framework", [](const BegunForward& b) { return static_cast<int>(b.framework); })
      .def_prop_ro("ended", [](const BegunForward& b) { return b.half == nullptr; });
  nb::class_<Layer> layer(m, "MoeLayer");
  bind_ranks(layer, &make_layer);
  layer.def_prop_ro("memory", [](const Layer& l) { return dict_of(l.memory()); });
  bind_calls(layer);
  bind_life(layer);
  m.def(
      "framework_of",
      [](nb::object array, const char* call, const char* name) {
        return place_of(tensor_of(array, call, name));
      },
      nb::arg("array"), nb::arg("call"), nb::arg("name"));
}

}  // namespace crossdock::python
