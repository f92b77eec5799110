// How the processes of a group meet: over a metadata store, or over a function of the caller, which
// is called on the thread that makes or resets the group, with the GIL.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <memory>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <string>
#include <vector>

#include <crossdock/symm/exchange.hpp>

#include "bind.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

using ExchangePtr = std::shared_ptr<symm::Exchange>;

std::vector<std::string> parts_of(nb::handle gathered) {
  std::vector<std::string> parts;
  for (const nb::handle part : nb::iter(gathered)) {
    const auto bytes = nb::cast<nb::bytes>(part);
    parts.emplace_back(static_cast<const char*>(bytes.data()), bytes.size());
  }
  return parts;
}

Result<std::vector<std::string>> call(nb::handle function, std::string_view bytes,
                                      Deadline deadline) {
  const nb::gil_scoped_acquire gil;
  constexpr const char* kDoing = "all_gather() of the exchange";
  try {
    const std::chrono::duration<double> left = deadline.remaining();
    return parts_of(function(nb::bytes(bytes.data(), bytes.size()), left.count()));
  } catch (const nb::python_error& thrown) {
    return error_of(thrown, kDoing);
  } catch (const nb::cast_error&) {
    return invalid_argument(std::string(kDoing) +
                            " must return a list of bytes, one of each process");
  }
}

ExchangePtr function_exchange(std::uint32_t member, std::uint32_t members, nb::callable function) {
  // The library may drop it on any thread.
  const std::shared_ptr<PyObject> kept(function.release().ptr(), [](PyObject* object) {
    const nb::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return value_or_raise(
      symm::make_exchange({member, members}, [kept](std::string_view bytes, Deadline deadline) {
        return call(kept.get(), bytes, deadline);
      }));
}

ExchangePtr store_exchange(const std::string& url, const std::string& name, std::uint32_t member,
                           std::uint32_t members, double timeout) {
  const Deadline deadline = deadline_in(timeout);
  const auto open = [&] {
    const nb::gil_scoped_release release;
    return symm::open_store_exchange(url, name, {member, members}, deadline);
  };
  return value_or_raise(open());
}

}  // namespace

void add_exchange(nb::module_& m) {
  nb::class_<symm::Exchange>(m, "Exchange", "How the processes of a group tell each other things.")
      .def_prop_ro("member", [](const symm::Exchange& e) { return e.membership().member; })
      .def_prop_ro("members", [](const symm::Exchange& e) { return e.membership().members; })
      .def("__repr__", [](const symm::Exchange& e) { return "<Exchange: " + e.describe() + ">"; })
      .def(
          "all_gather",
          [](symm::Exchange& e, nb::bytes bytes, double timeout) {
            const std::string own(static_cast<const char*>(bytes.data()), bytes.size());
            const Deadline deadline = deadline_in(timeout);
            const auto gather = [&] {
              const nb::gil_scoped_release release;
              return e.all_gather(own, deadline);
            };
            nb::list out;
            for (const std::string& part : value_or_raise(gather()))
              out.append(nb::bytes(part.data(), part.size()));
            return out;
          },
          nb::arg("data"), nb::arg("timeout"),
          nb::sig("def all_gather(self, data: bytes, timeout: float) -> list[bytes]"),
          "Every process's bytes, by member.");
  m.def("function_exchange", &function_exchange, nb::arg("member"), nb::arg("members"),
        nb::arg("all_gather"));
  m.def("store_exchange", &store_exchange, nb::arg("url"), nb::arg("name"), nb::arg("member"),
        nb::arg("members"), nb::arg("timeout"));
}

}  // namespace crossdock::python
