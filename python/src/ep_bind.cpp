// The class Group of crossdock._native. SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "ep_group.hpp"
#include "ep_options.hpp"
#include "errors.hpp"
#include "ranks.hpp"

namespace crossdock::python {
namespace {

void make_group(Group* where, nb::handle options, const Ranks& ranks) {
  ep::GroupOptions out;
  out.ep = options_of(options);
  out.ranks = group_options_of(ranks);
  auto made = [&] {
    const nb::gil_scoped_release release;
    return ep::Group::create(out);
  }();
  new (where) Group(value_or_raise(std::move(made)), out.ep);
}

ArrayType type_named(const std::string& name) {
  if (name == "float32") return kFloat32;
  if (name == "bfloat16") return kBf16;
  if (name == "uint8") return carrier(1);
  if (name == "int16") return carrier(2);
  if (name == "int32") return kInt32;
  if (name == "int64") return carrier(8);
  throw nb::value_error("empty(): no such type");
}

// `planes`: rows, scales, weights, sources.
ExpandArguments expand_arguments(nb::handle planes, uint32_t rows_per_expert,
                                 bool scales_by_column) {
  return {planes[0], planes[1], planes[2], planes[3], rows_per_expert, scales_by_column};
}

// `expanded`: None, or (planes, rows_per_expert, scales_by_column).
std::optional<ExpandArguments> maybe_expanded(nb::handle expanded) {
  if (expanded.is_none()) return std::nullopt;
  return expand_arguments(expanded[0], number_of(expanded[1], "rows_per_expert"),
                          nb::cast<bool>(expanded[2]));
}

// `how`: None, or (routing, output, input, path, most_tokens, send_only, expanded), of which the
// first three and the last may be None.
DispatchArguments dispatch_arguments(DispatchArguments arguments, nb::handle how) {
  if (how.is_none()) return arguments;
  arguments.routing = how[0];
  arguments.output = how[1];
  arguments.input = how[2];
  arguments.path = path_of(how[3]);
  arguments.most_tokens = number_of(how[4], "most_tokens");
  arguments.send_only = nb::cast<bool>(how[5]);
  const nb::object expanded = how[6];
  arguments.expanded = maybe_expanded(expanded);
  if (!arguments.routing.is_none() && !nb::isinstance<Handle>(arguments.routing))
    raise(invalid_argument("ep dispatch: routing must be a Handle of an earlier dispatch"));
  return arguments;
}

// Calls that move tokens.
void bind_calls(nb::class_<Group>& group) {
  group
      .def(
          "dispatch",
          [](Group& g, uint32_t rank, nb::object rows, nb::object ids, nb::object weights,
             nb::object scales, nb::object cast, bool scales_by_column, nb::object how,
             nb::object stream) {
            return g.dispatch(
                rank,
                dispatch_arguments({std::move(rows), std::move(ids), std::move(weights),
                                    std::move(scales), cast_of(cast), scales_by_column},
                                   how),
                stream);
          },
          nb::arg("rank"), nb::arg("rows"), nb::arg("ids").none(), nb::arg("weights").none(),
          nb::arg("scales").none(), nb::arg("cast"), nb::arg("scales_by_column"),
          nb::arg("how").none(), nb::arg("stream").none())
      .def(
          "combine",
          [](Group& g, const Handle& handle, nb::object out, nb::object weights,
             std::vector<nb::object> bias, nb::object rows, nb::object row_weights,
             bool receive_only, nb::object payload, bool packed, nb::object stream) {
            g.combine(handle,
                      {std::move(out),
                       std::move(weights),
                       std::move(bias),
                       std::move(rows),
                       std::move(row_weights),
                       receive_only,
                       {payload_of(payload), packed}},
                      stream);
          },
          nb::arg("handle"), nb::arg("out"), nb::arg("weights").none(), nb::arg("bias"),
          nb::arg("rows").none(), nb::arg("row_weights").none(), nb::arg("receive_only"),
          nb::arg("payload"), nb::arg("packed"), nb::arg("stream").none())
      .def(
          "dispatch_receive",
          [](Group& g, const Handle& handle, nb::object expanded, nb::object stream) {
            g.dispatch_receive(handle, maybe_expanded(expanded), stream);
          },
          nb::arg("handle"), nb::arg("expanded").none(), nb::arg("stream").none())
      .def(
          "combine_send",
          [](Group& g, const Handle& handle, nb::object payload, bool packed, nb::object stream) {
            g.combine_send(handle, {payload_of(payload), packed}, stream);
          },
          nb::arg("handle"), nb::arg("payload"), nb::arg("packed"), nb::arg("stream").none());
}

// Rows by expert, and memory that the library lends.
void bind_layouts(nb::class_<Group>& group) {
  group.def("group_rows", &Group::group_rows, nb::arg("handle"), nb::arg("stream").none())
      .def("grouped", &Group::grouped, nb::arg("handle"))
      .def(
          "expand_rows",
          [](Group& g, const Handle& handle, nb::tuple planes, uint32_t rows_per_expert,
             bool scales_by_column, nb::object stream) {
            g.expand_rows(handle, expand_arguments(planes, rows_per_expert, scales_by_column),
                          stream);
          },
          nb::arg("handle"), nb::arg("planes"), nb::arg("rows_per_expert"),
          nb::arg("scales_by_column"), nb::arg("stream").none())
      .def(
          "reduce_rows",
          [](Group& g, const Handle& handle, nb::object by_place, uint32_t rows_per_expert,
             bool weighted, nb::object payload, nb::object ids, nb::object stream) {
            g.reduce_rows(handle,
                          {std::move(by_place), rows_per_expert, weighted, payload_of(payload),
                           std::move(ids)},
                          stream);
          },
          nb::arg("handle"), nb::arg("by_place"), nb::arg("rows_per_expert"), nb::arg("weighted"),
          nb::arg("payload"), nb::arg("ids").none(), nb::arg("stream").none())
      .def("reserve_copies", &Group::reserve_copies, nb::arg("rank"), nb::arg("copies"))
      .def("user_memory", &Group::user_memory, nb::arg("rank"))
      .def(
          "output_bytes",
          [](Group& g, uint32_t rank, nb::object rows, nb::object scales, nb::object cast,
             bool scales_by_column) {
            return g.output_bytes(rank, {std::move(rows), nb::none(), nb::none(), std::move(scales),
                                         cast_of(cast), scales_by_column});
          },
          nb::arg("rank"), nb::arg("rows"), nb::arg("scales").none(), nb::arg("cast"),
          nb::arg("scales_by_column"))
      .def("statistics_memory", &Group::statistics_memory, nb::arg("rank"))
      .def(
          "empty",
          [](Group& g, uint32_t rank, const std::string& type, int64_t rows, int64_t columns) {
            return g.empty(rank, type_named(type), rows, columns);
          },
          nb::arg("rank"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"));
}

void bind_life(nb::class_<Group>& group) {
  group.def("synchronize", &Group::synchronize, nb::arg("timeout"), nb::arg("stream").none())
      .def("check", &Group::check)
      .def("reset", &Group::reset, nb::arg("timeout"))
      .def("reform", &Group::reform, nb::arg("timeout"))
      .def("vacant_ranks", &Group::vacant_ranks)
      .def("waiting_ranks", &Group::waiting_ranks, nb::arg("timeout"))
      .def(
          "statistics",
          [](Group& g, uint32_t rank, double timeout) {
            const auto got = g.statistics(rank, timeout);
            return std::tuple(got.expert_selections, got.source_wait_ns, got.combine_wait_ns);
          },
          nb::arg("rank"), nb::arg("timeout"))
      .def("close", &Group::close);
}

}  // namespace

void add_ep_group(nb::module_& m) {
  m.def("stream_number", &stream_number, nb::arg("stream"));
  nb::class_<Group> group(m, "Group");
  bind_elastic_ranks(group, &make_group);
  group.def_prop_ro("memory", [](const Group& g) { return dict_of(g.memory()); });
  bind_calls(group);
  bind_masks(group);
  bind_layouts(group);
  bind_life(group);
}

}  // namespace crossdock::python
