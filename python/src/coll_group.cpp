// Coll: making a group, its calls, waiting. See coll_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <iterator>
#include <limits>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <utility>

#include "bind.hpp"
#include "coll/core.hpp"
#include "coll_calls.hpp"
#include "copies.hpp"
#include "cuda/stream.hpp"
#include "errors.hpp"
#include "ranks.hpp"

namespace crossdock::python {
namespace {

using BoxPtr = std::shared_ptr<CollBox>;

BoxPtr make_coll(nb::handle options, const Ranks& ranks) {
  coll::GroupOptions out;
  out.coll = coll_options(options);
  out.ranks = group_options_of(ranks);
  auto made = [&] {
    const nb::gil_scoped_release release;
    return coll::Group::create(out);
  }();
  return std::make_shared<CollBox>(value_or_raise(std::move(made)));
}

// ---- calls -------------------------------------------------------------------------------------

CollSession begin(BoxPtr box, uint32_t rank, nb::handle stream) {
  const coll::StreamPtr on = stream_for(*box, stream, rank);
  CollSession out{box, {}, rank};
  out.session.emplace(launch(*box, rank, [&] { return box->group.begin(rank, on); }));
  return out;
}
void send(BoxPtr box, uint32_t rank, uint32_t to, nb::handle tensor, nb::handle stream) {
  const Tensor t = box->dense("coll send", "tensor", tensor, rank);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] { return box->group.send(rank, to, t.data, bytes_of(t), on); });
}
void receive(BoxPtr box, uint32_t rank, uint32_t from, nb::handle tensor, nb::handle stream) {
  const Tensor t = box->dense("coll receive", "tensor", tensor, rank);
  need_writable(t);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] { return box->group.receive(rank, from, t.data, bytes_of(t), on); });
}
void write_rows(BoxPtr box, uint32_t rank, uint64_t first, nb::handle rows, nb::handle stream) {
  const Tensor t = box->table_rows("coll write_rows", "rows", rows, rank);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] {
    return box->group.write_rows(rank, first, t.data, static_cast<uint64_t>(t.shape[0]), on);
  });
}
void fetch_rows(BoxPtr box, uint32_t rank, nb::handle numbers, nb::handle output, bool wide,
                nb::handle stream) {
  const Tensor n = box->dense("coll fetch_rows", "numbers", numbers, rank);
  const Tensor out = box->table_rows("coll fetch_rows", "out", output, rank);
  need_writable(out);
  const int64_t count = n.shape[0] * n.shape[1];
  if (count > std::numeric_limits<uint32_t>::max())
    raise(invalid_argument(fmt::format(
        "coll fetch_rows: numbers is {}: there may be at most {} of them: fetch them in parts",
        n.describe(), std::numeric_limits<uint32_t>::max())));
  if (!n.is(dlpack::kInt, wide ? 8 : 4) || out.shape[0] != count)
    raise(invalid_argument(
        fmt::format("coll fetch_rows: numbers is {} and out is {}: they must be {}, and a row "
                    "for each",
                    n.describe(), out.describe(), wide ? "int64" : "int32")));
  const coll::StreamPtr on = stream_for(*box, stream, out, rank);
  launch(*box, rank, [&] {
    return box->group.fetch_rows(rank, n.data, static_cast<uint32_t>(count), out.data, on);
  });
}
void barrier(BoxPtr box, uint32_t rank, nb::handle stream) {
  const coll::StreamPtr on = stream_for(*box, stream, rank);
  launch(*box, rank, [&] { return box->group.barrier(rank, on); });
}
void synchronize(BoxPtr box, double timeout, nb::handle stream) {
  const Deadline deadline = deadline_in(timeout);
  std::vector<cuda::Stream> streams;
  for (const uint32_t rank : box->ranks().local_ranks())
    if (const coll::StreamPtr on = stream_for(*box, stream, rank); on != nullptr)
      streams.push_back(cuda::Stream::borrow(*box->ranks().rank(rank).device().context(),
                                             static_cast<cuda::StreamHandle>(on)));
  // What other ranks are given meanwhile is not waited for.
  std::vector<nb::object> held = std::exchange(box->held, {});
  const auto wait = [&]() -> Result<> {
    const nb::gil_scoped_release release;
    for (const cuda::Stream& on : streams)
      CROSSDOCK_CHECK_OK(on.synchronize(deadline));
    return box->group.synchronize(deadline);
  };
  const Result<> done = wait();
  // Lanes still use it: it stays until they are waited for again, or end.
  if (done.code() == Code::kDeadline)
    box->held.insert(box->held.end(), std::make_move_iterator(held.begin()),
                     std::make_move_iterator(held.end()));
  value_or_raise(done);
}
Array shard(BoxPtr box, uint32_t rank) {
  const auto bytes = value_or_raise(box->group.shard(rank));
  Array array = vector(box, bytes.data(), carrier(1), static_cast<int64_t>(bytes.size()));
  array.device = box->device_of(rank);
  return array;
}
// Memory of the rank that its kernels can reach in the twin, where they reach no other.
Array empty(BoxPtr box, uint32_t rank, uint64_t bytes) {
  const auto lock = box->enter(rank);
  const int device = box->device_of(rank);
  auto memory = value_or_raise(twin_memory(box, rank, bytes));
  void* const at = memory->address();
  Array array = vector(std::move(memory), at, carrier(1), static_cast<int64_t>(bytes));
  array.device = device;
  return array;
}
void reset(BoxPtr box, double timeout) {
  const Deadline deadline = deadline_in(timeout);
  const auto run = [&] {
    const nb::gil_scoped_release release;
    const auto locks = box->enter_all();
    return box->group.reset(deadline);
  };
  const Result<> done = run();
  if (done.ok()) box->held.clear();
  value_or_raise(done);
}
// Not in the lanes: it does not wait for a call that does.
void check(const BoxPtr& box) {
  value_or_raise([&] {
    const nb::gil_scoped_release release;
    return box->group.check();
  }());
}

}  // namespace

void add_coll(nb::module_& m) {
  add_coll_session(m);
  nb::class_<CollBox>(m, "Coll")
      .def_prop_ro("world", [](const CollBox& b) { return b.group.world(); })
      .def_prop_ro("twin", &CollBox::on_host)
      .def_prop_ro("ranks",
                   [](const CollBox& b) {
                     const auto local = b.ranks().local_ranks();
                     return std::vector<uint32_t>(local.begin(), local.end());
                   })
      .def("begin", &begin, nb::arg("rank"), nb::arg("stream").none())
      .def("send", &send, nb::arg("rank"), nb::arg("to"), nb::arg("tensor"),
           nb::arg("stream").none())
      .def("receive", &receive, nb::arg("rank"), nb::arg("source"), nb::arg("tensor"),
           nb::arg("stream").none())
      .def("shard", &shard, nb::arg("rank"))
      .def("write_rows", &write_rows, nb::arg("rank"), nb::arg("first"), nb::arg("rows"),
           nb::arg("stream").none())
      .def("fetch_rows", &fetch_rows, nb::arg("rank"), nb::arg("numbers"), nb::arg("output"),
           nb::arg("wide"), nb::arg("stream").none())
      .def("empty", &empty, nb::arg("rank"), nb::arg("bytes"))
      .def("barrier", &barrier, nb::arg("rank"), nb::arg("stream").none())
      .def("synchronize", &synchronize, nb::arg("timeout"), nb::arg("stream").none())
      .def("check", &check)
      .def("reset", &reset, nb::arg("timeout"));
  m.def(
      "coll_group",
      [](nb::object options, uint32_t world, RankList local, bool cpu,
         std::shared_ptr<symm::Exchange> exchange, double timeout) {
        return make_coll(options, {world, std::move(local), cpu, std::move(exchange), timeout});
      },
      nb::arg("options"), nb::arg("world"), nb::arg("ranks"), nb::arg("cpu"),
      nb::arg("exchange").none(), nb::arg("timeout"));
  m.def("coll_sizes", &coll_sizes, nb::arg("options"), nb::arg("world"));
}

}  // namespace crossdock::python
