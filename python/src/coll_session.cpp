// CollSession: gathers and scatters. See coll_group.hpp. SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include "coll_calls.hpp"
#include "copies.hpp"

namespace crossdock::python {
namespace {

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
  need_writable(out);
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
  need_writable(out);
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

}  // namespace

void add_coll_session(nb::module_& m) {
  nb::class_<CollSession>(m, "CollSession")
      .def("input", &session_input, nb::arg("bytes"))
      .def("all_gather", &all_gather, nb::arg("input"), nb::arg("output"))
      .def("reduce_scatter", &reduce_scatter, nb::arg("input"), nb::arg("output"))
      .def("end", &end);
}

}  // namespace crossdock::python
