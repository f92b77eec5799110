// See coll_group.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll_group.hpp"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <utility>

#include "bind.hpp"
#include "coll/core.hpp"
#include "ep_options.hpp"
#include "errors.hpp"
#include "ranks.hpp"

namespace crossdock::python {
namespace {

using BoxPtr = std::shared_ptr<CollBox>;

coll::Options coll_options(nb::handle options) {
  coll::Options out;
  const auto number = [&](const char* name) { return number_of(options.attr(name), name); };
  out.session_bytes = nb::cast<uint64_t>(options.attr("session_bytes"));
  out.gathers = number("gathers");
  out.reduce = nb::cast<bool>(options.attr("reduce"));
  out.tensor_bytes = nb::cast<uint64_t>(options.attr("tensor_bytes"));
  out.inflight = number("inflight");
  out.pipeline =
      nb::cast<bool>(options.attr("any_rank")) ? coll::Pipeline::kAll : coll::Pipeline::kNeighbours;
  out.shard_rows = nb::cast<uint64_t>(options.attr("shard_rows"));
  out.row_bytes = number("row_bytes");
  out.wide_indices = nb::cast<bool>(options.attr("wide_indices"));
  out.fetch_sms = number("fetch_sms");
  out.wait = seconds_of(nb::cast<double>(options.attr("wait")), "wait");
  return out;
}

BoxPtr make_coll(nb::handle options, const Ranks& ranks) {
  coll::GroupOptions out;
  out.coll = coll_options(options);
  out.ranks = group_options_of(ranks);
  auto made = [&] {
    const nb::gil_scoped_release release;
    return coll::Group::create(out);
  }();
  auto box = std::make_shared<CollBox>(value_or_raise(std::move(made)));
  const symm::Group& symmetric = box->group.core().group();
  for (const uint32_t rank : symmetric.local_ranks()) {
    const cuda::Context* const context = symmetric.rank(rank).device().context();
    box->ranks.push_back(rank);
    box->devices.push_back(context == nullptr ? kHost : context->ordinal());
  }
  const std::size_t lanes = box->twin() ? 1 : box->ranks.size();
  for (std::size_t i = 0; i < lanes; ++i)
    box->lanes.push_back(std::make_unique<std::mutex>());
  return box;
}

// Runs a call of the library on a stream, without the GIL: it may wait for a full queue.
template <class Run>
auto launch(CollBox& box, uint32_t rank, const Run& run) {
  const auto lock = box.enter(rank);
  auto result = [&] {
    const nb::gil_scoped_release release;
    return run();
  }();
  return value_or_raise(std::move(result));
}
ep::StreamPtr stream_for(const CollBox& box, nb::handle stream, const Tensor& like, uint32_t rank) {
  return stream_of(stream, like.framework, box.device_of(rank));
}
uint64_t bytes_of(const Tensor& t) {
  return t.row_bytes() * static_cast<uint64_t>(t.shape[0]);
}

// ---- calls -------------------------------------------------------------------------------------

CollSession begin(BoxPtr box, uint32_t rank, nb::handle stream) {
  const Framework framework =
      box->twin() || !loaded_module("torch").is_valid() ? Framework::kNone : Framework::kTorch;
  const coll::StreamPtr on = stream_of(stream, framework, box->device_of(rank));
  CollSession out{box, {}, rank};
  out.session.emplace(launch(*box, rank, [&] { return box->group.begin(rank, on); }));
  return out;
}
coll::Session& open(CollSession& s) {
  if (!s.session)
    raise(make_error(Code::kClosed, "coll: the session has ended: begin another one"));
  return *s.session;
}
Array session_input(CollSession& s, uint64_t bytes) {
  coll::Session& session = open(s);
  void* const at = launch(*s.box, s.rank, [&] { return session.input(bytes); });
  Array array = vector(s.box, at, carrier(1), static_cast<int64_t>(bytes));
  array.device = s.box->device_of(s.rank);
  return array;
}
void all_gather(CollSession& s, nb::handle input, nb::handle output) {
  const Tensor in = s.box->dense("coll all_gather", "input", input, s.rank);
  const Tensor out = s.box->dense("coll all_gather", "output", output, s.rank);
  if (bytes_of(out) != bytes_of(in) * s.box->group.world())
    raise(invalid_argument(
        fmt::format("coll all_gather: output is {}, {} bytes: it must have those of input, {}, for "
                    "each of the {} ranks",
                    out.describe(), bytes_of(out), bytes_of(in), s.box->group.world())));
  coll::Session& session = open(s);
  launch(*s.box, s.rank, [&] { return session.all_gather(in.data, out.data, bytes_of(in)); });
}
void reduce_scatter(CollSession& s, nb::handle input, nb::handle output) {
  const Tensor in = s.box->dense("coll reduce_scatter", "input", input, s.rank);
  const Tensor out = s.box->dense("coll reduce_scatter", "output", output, s.rank);
  const bool wide = out.is(dlpack::kFloat, 4);
  if ((!wide && !out.is_bf16()) || in.kind != out.kind || in.item_bytes != out.item_bytes ||
      bytes_of(in) != bytes_of(out) * s.box->group.world())
    raise(invalid_argument(
        fmt::format("coll reduce_scatter: input is {} and output is {}: both must be float32 or "
                    "bfloat16, and input {} times as large",
                    in.describe(), out.describe(), s.box->group.world())));
  coll::Session& session = open(s);
  launch(*s.box, s.rank, [&] {
    return session.reduce_scatter(in.data, out.data, bytes_of(out) / out.item_bytes,
                                  wide ? coll::DataType::kF32 : coll::DataType::kBf16);
  });
}
void end(CollSession& s) {
  if (!s.session) return;
  launch(*s.box, s.rank, [&] { return s.session->end(); });
  s.session.reset();
}

void send(BoxPtr box, uint32_t rank, uint32_t to, nb::handle tensor, nb::handle stream) {
  const Tensor t = box->dense("coll send", "tensor", tensor, rank);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] { return box->group.send(rank, to, t.data, bytes_of(t), on); });
}
void receive(BoxPtr box, uint32_t rank, uint32_t from, nb::handle tensor, nb::handle stream) {
  const Tensor t = box->dense("coll receive", "tensor", tensor, rank);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] { return box->group.receive(rank, from, t.data, bytes_of(t), on); });
}
void write_rows(BoxPtr box, uint32_t rank, uint64_t first, nb::handle rows, nb::handle stream) {
  const Tensor t = box->dense("coll write_rows", "rows", rows, rank);
  const coll::StreamPtr on = stream_for(*box, stream, t, rank);
  launch(*box, rank, [&] {
    return box->group.write_rows(rank, first, t.data, static_cast<uint64_t>(t.shape[0]), on);
  });
}
void fetch_rows(BoxPtr box, uint32_t rank, nb::handle numbers, nb::handle output, bool wide,
                nb::handle stream) {
  const Tensor n = box->dense("coll fetch_rows", "numbers", numbers, rank);
  const Tensor out = box->dense("coll fetch_rows", "output", output, rank);
  const int64_t count = n.shape[0] * n.shape[1];
  if (!n.is(dlpack::kInt, wide ? 8 : 4) || out.shape[0] != count)
    raise(invalid_argument(
        fmt::format("coll fetch_rows: numbers is {} and output is {}: they must be {}, and a row "
                    "for each",
                    n.describe(), out.describe(), wide ? "int64" : "int32")));
  const coll::StreamPtr on = stream_for(*box, stream, out, rank);
  launch(*box, rank, [&] {
    return box->group.fetch_rows(rank, n.data, static_cast<uint32_t>(count), out.data, on);
  });
}
void barrier(BoxPtr box, uint32_t rank, nb::handle stream) {
  const Framework framework =
      box->twin() || !loaded_module("torch").is_valid() ? Framework::kNone : Framework::kTorch;
  const coll::StreamPtr on = stream_of(stream, framework, box->device_of(rank));
  launch(*box, rank, [&] { return box->group.barrier(rank, on); });
}
void synchronize(BoxPtr box, double timeout) {
  const Deadline deadline = deadline_in(timeout);
  // What other ranks are given meanwhile is not waited for.
  const std::vector<nb::object> held = std::exchange(box->held, {});
  const auto wait = [&] {
    const nb::gil_scoped_release release;
    return box->group.synchronize(deadline);
  };
  value_or_raise(wait());
}
Array shard(BoxPtr box, uint32_t rank) {
  const auto bytes = value_or_raise(box->group.shard(rank));
  Array array = vector(box, bytes.data(), carrier(1), static_cast<int64_t>(bytes.size()));
  array.device = box->device_of(rank);
  return array;
}
// Memory of the rank that its kernels can reach in the twin, where they reach no other.
Array empty(BoxPtr box, uint32_t rank, uint64_t bytes) {
  auto memory =
      value_or_raise(box->group.core().group().rank(rank).allocate(bytes == 0 ? 16 : bytes));
  struct Kept {
    std::shared_ptr<CollBox> box;
    symm::LocalMemory memory;
  };
  auto kept = std::make_shared<Kept>(Kept{box, std::move(memory)});
  void* const at = kept->memory.address();
  Array array = vector(std::move(kept), at, carrier(1), static_cast<int64_t>(bytes));
  array.device = box->device_of(rank);
  return array;
}
void reset(BoxPtr box, double timeout) {
  const Deadline deadline = deadline_in(timeout);
  const auto run = [&] {
    const nb::gil_scoped_release release;
    return box->group.reset(deadline);
  };
  value_or_raise(run());
}

nb::dict coll_sizes(nb::handle options, uint32_t world) {
  const coll::Sizes sizes = value_or_raise(coll::sizes(coll_options(options), world));
  nb::dict out;
  out["control_bytes"] = sizes.control_bytes;
  out["session_bytes"] = sizes.session_bytes;
  out["pipeline_bytes"] = sizes.pipeline_bytes;
  out["table_bytes"] = sizes.table_bytes;
  out["window_bytes"] = sizes.window_bytes;
  out["local_bytes"] = sizes.local_bytes;
  return out;
}

}  // namespace

int CollBox::device_of(uint32_t rank) const {
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] == rank) return devices[i];
  raise(invalid_argument(
      fmt::format("coll: rank {} is not one of the {} ranks of this process", rank, ranks.size())));
}

std::unique_lock<std::mutex> CollBox::enter(uint32_t rank) {
  std::size_t lane = 0;
  for (std::size_t i = 0; i < ranks.size() && i < lanes.size(); ++i)
    if (ranks[i] == rank) lane = i;
  std::unique_lock lock(*lanes[lane], std::try_to_lock);
  if (!lock) {
    const nb::gil_scoped_release release;
    lock.lock();
  }
  return lock;
}

Tensor CollBox::dense(const char* call, const char* name, nb::handle object, uint32_t rank) {
  const Tensor t = tensor_of(object, call, name);
  need_device(call, t, rank, device_of(rank));
  const bool packed =
      t.dims == 1
          ? t.shape[0] <= 1 || t.strides[0] == static_cast<int64_t>(t.item_bytes)
          : t.dense() && (t.shape[1] <= 1 || t.strides[1] == static_cast<int64_t>(t.item_bytes));
  if (!packed)
    raise(invalid_argument(
        fmt::format("{}: {} is {} with gaps: make it contiguous first", call, name, t.describe())));
  if (twin()) held.push_back(nb::borrow(object));
  return t;
}

void add_coll(nb::module_& m) {
  nb::class_<CollSession>(m, "CollSession")
      .def("input", &session_input, nb::arg("bytes"))
      .def("all_gather", &all_gather, nb::arg("input"), nb::arg("output"))
      .def("reduce_scatter", &reduce_scatter, nb::arg("input"), nb::arg("output"))
      .def("end", &end);
  nb::class_<CollBox>(m, "Coll")
      .def_prop_ro("world", [](const CollBox& b) { return b.group.world(); })
      .def_prop_ro("twin", &CollBox::twin)
      .def_prop_ro("ranks", [](const CollBox& b) { return b.ranks; })
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
      .def("synchronize", &synchronize, nb::arg("timeout"))
      .def("check", [](CollBox& b) { value_or_raise(b.group.check()); })
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
