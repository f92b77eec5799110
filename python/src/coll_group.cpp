// See coll_group.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll_group.hpp"

#include <fmt/format.h>
#include <limits>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <utility>

#include "bind.hpp"
#include "coll/core.hpp"
#include "cuda/stream.hpp"
#include "errors.hpp"
#include "fields.hpp"
#include "ranks.hpp"

namespace crossdock::python {
namespace {

using BoxPtr = std::shared_ptr<CollBox>;

coll::Options coll_options(nb::handle options) {
  coll::Options out;
  const auto number = [&](const char* name) {
    return whole_number<uint32_t>(options.attr(name), name);
  };
  const auto bytes = [&](const char* name) {
    return whole_number<uint64_t>(options.attr(name), name);
  };
  const auto flag = [&](const char* name) { return flag_of(options.attr(name), name); };
  out.session_bytes = bytes("session_bytes");
  out.gathers = number("gathers");
  out.reduce = flag("reduce");
  out.tensor_bytes = bytes("tensor_bytes");
  out.inflight = number("inflight");
  out.pipeline = flag("any_rank") ? coll::Pipeline::kAll : coll::Pipeline::kNeighbours;
  out.shard_rows = bytes("shard_rows");
  out.row_bytes = number("row_bytes");
  out.wide_indices = flag("wide_indices");
  out.fetch_sms = number("fetch_sms");
  out.wait = time_of(options.attr("wait"), "wait");
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
  return std::make_shared<CollBox>(value_or_raise(std::move(made)));
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
// The same for a call without an array: torch's current one where the process has torch.
ep::StreamPtr stream_for(const CollBox& box, nb::handle stream, uint32_t rank) {
  const bool torch = !box.on_host() && loaded_module("torch").is_valid();
  return stream_of(stream, torch ? Framework::kTorch : Framework::kNone, box.device_of(rank));
}
uint64_t bytes_of(const Tensor& t) {
  return t.row_bytes() * static_cast<uint64_t>(t.shape[0]);
}

// ---- calls -------------------------------------------------------------------------------------

CollSession begin(BoxPtr box, uint32_t rank, nb::handle stream) {
  const coll::StreamPtr on = stream_for(*box, stream, rank);
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
  const std::vector<nb::object> held = std::exchange(box->held, {});
  const auto wait = [&]() -> Result<> {
    const nb::gil_scoped_release release;
    for (const cuda::Stream& on : streams)
      CROSSDOCK_CHECK_OK(on.synchronize(deadline));
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

CollBox::CollBox(coll::Group made) : group(std::move(made)) {
  for (const uint32_t rank : ranks().local_ranks()) {
    const cuda::Context* const context = ranks().rank(rank).device().context();
    devices.push_back(context == nullptr ? kHost : context->ordinal());
  }
  make_lanes();
}

CollBox::~CollBox() {
  drop_lanes();
  const nb::gil_scoped_acquire acquire;
  {
    const nb::gil_scoped_release release;
    const coll::Group last = std::move(group);
  }
  held.clear();  // lanes of the CPU have used it until here
}

symm::Group& CollBox::ranks() const {
  return group.core().group();
}

int CollBox::device_of(uint32_t rank) const {
  const auto local = ranks().local_ranks();
  for (std::size_t i = 0; i < local.size(); ++i)
    if (local[i] == rank) return devices[i];
  raise(invalid_argument(
      fmt::format("coll: rank {} is not one of the {} ranks of this process", rank, local.size())));
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
  if (on_host()) held.push_back(nb::borrow(object));
  return t;
}

Tensor CollBox::table_rows(const char* call, const char* name, nb::handle object, uint32_t rank) {
  const Tensor t = dense(call, name, object, rank);
  const coll::Options& made_for = group.core().options();
  if (made_for.shard_rows > 0 && t.row_bytes() != made_for.row_bytes)
    raise(invalid_argument(
        fmt::format("{}: {} is {}, rows of {} bytes: those of the table have row_bytes = {}: give "
                    "[rows, columns] of that width",
                    call, name, t.describe(), t.row_bytes(), made_for.row_bytes)));
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
