// Which ranks of a group are in this process, as Python says it, for all classes that are made of
// it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <utility>
#include <vector>

#include <crossdock/symm/group_options.hpp>

namespace crossdock::python {

namespace nb = nanobind;

using RankList = std::vector<std::pair<uint32_t, int>>;  // rank, CUDA device

struct Ranks {
  uint32_t world;
  RankList local;
  bool cpu;
  std::shared_ptr<symm::Exchange> exchange;
  double timeout;  // seconds
  // Of an elastic group: None, or (store, name, fewest, settle in seconds).
  nb::object place = nb::none();
};
// Raises InvalidArgument when the timeout is none.
symm::GroupOptions group_options_of(const Ranks& ranks);

// The ranks of a RankBox.
template <class Box>
RankList ranks_of(const Box& box) {
  RankList out;
  for (const auto& local : box.ranks())
    out.emplace_back(local.rank, local.device);
  return out;
}

template <class Box>
void bind_who(nb::class_<Box>& bound) {
  bound.def_prop_ro("world", &Box::world)
      .def_prop_ro("twin", &Box::twin)
      .def_prop_ro("closed", &Box::closed)
      .def_prop_ro("ranks", &ranks_of<Box>);
}

// Calls `make(options, ranks)` with what a constructor in Python is given.
template <class Box, class Make>
void bind_ranks(nb::class_<Box>& bound, const Make& make) {
  bind_who(bound);
  bound.def(
      "__init__",
      [make](Box* where, nb::object options, uint32_t world, RankList local, bool cpu,
             std::shared_ptr<symm::Exchange> exchange, double timeout) {
        make(where, options, Ranks{world, std::move(local), cpu, std::move(exchange), timeout});
      },
      nb::arg("options"), nb::arg("world"), nb::arg("ranks"), nb::arg("cpu"),
      nb::arg("exchange").none(), nb::arg("timeout"));
}

// The same for what may be an elastic group.
template <class Box, class Make>
void bind_elastic_ranks(nb::class_<Box>& bound, const Make& make) {
  bind_who(bound);
  bound.def(
      "__init__",
      [make](Box* where, nb::object options, uint32_t world, RankList local, bool cpu,
             std::shared_ptr<symm::Exchange> exchange, double timeout, nb::object place) {
        make(where, options,
             Ranks{world, std::move(local), cpu, std::move(exchange), timeout, std::move(place)});
      },
      nb::arg("options"), nb::arg("world"), nb::arg("ranks"), nb::arg("cpu"),
      nb::arg("exchange").none(), nb::arg("timeout"), nb::arg("place").none());
}

}  // namespace crossdock::python
