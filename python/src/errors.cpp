// See errors.hpp. SPDX-License-Identifier: Apache-2.0
#include "errors.hpp"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <string>

#include "bind.hpp"

namespace crossdock::python {
namespace {

const char* domain_name(Native::Domain domain) {
  switch (domain) {
    case Native::Domain::kErrno:
      return "errno";
    case Native::Domain::kCuda:
      return "cuda";
    case Native::Domain::kNvrtc:
      return "nvrtc";
    case Native::Domain::kVerbs:
      return "verbs";
    default:
      return "";
  }
}

// Names of crossdock/errors.py, kept for the life of the process.
nb::handle errors_module() {
  static PyObject* const module = nb::module_::import_("crossdock.errors").release().ptr();
  return module;
}

Code code_of(nb::handle exception) {
  if (PyObject_IsInstance(exception.ptr(), PyExc_TimeoutError) == 1) return Code::kDeadline;
  if (PyObject_IsInstance(exception.ptr(), PyExc_ConnectionError) == 1) return Code::kPeerLost;
  if (PyObject_IsInstance(exception.ptr(), PyExc_KeyboardInterrupt) == 1) return Code::kCancelled;
  return Code::kInvalidArgument;
}

}  // namespace

std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object));
}

nb::object make_exception(const Error& error) {
  return errors_module().attr("_make")(
      static_cast<int>(error.code), static_cast<int>(error.scope), static_cast<int>(error.retry),
      domain_name(error.native.domain), error.native.value, error.message.c_str(),
      error.where.file_name(), error.where.line(), error.describe().c_str());
}

void raise(const Error& error) {
  const nb::object exception = make_exception(error);
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

Error error_of(const nb::python_error& thrown, std::string_view doing) {
  const nb::handle exception = thrown.value();
  if (PyObject_IsInstance(exception.ptr(), nb::object(errors_module().attr("Error")).ptr()) == 1) {
    Error error = make_error(static_cast<Code>(nb::cast<int>(exception.attr("code"))),
                             nb::cast<std::string>(exception.attr("message")));
    error.scope = static_cast<Scope>(nb::cast<int>(exception.attr("scope")));
    error.retry = static_cast<Retry>(nb::cast<int>(exception.attr("retry")));
    return error;
  }
  return make_error(
      code_of(exception),
      fmt::format("{} raised {}: {}", doing, text_of(nb::object(exception.type().attr("__name__"))),
                  text_of(exception)));
}

std::chrono::nanoseconds seconds_of(double seconds, const char* name) {
  constexpr double kLongest = 10 * 365.25 * 86400;
  if (std::isnan(seconds) || seconds < 0)
    raise(invalid_argument(
        fmt::format("{} = {} must be a number of seconds, 0 or more", name, seconds)));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, kLongest)));
}
Deadline deadline_in(double seconds) {
  return Deadline::in(seconds_of(seconds, "timeout"));
}

}  // namespace crossdock::python
