// The border between Error and Python exceptions: a Result becomes a value or an exception of the
// tree in crossdock/errors.py, and an exception of a caller's function becomes an Error. Needs the
// GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <nanobind/nanobind.h>
#include <string>
#include <string_view>
#include <utility>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

namespace nb = nanobind;

namespace crossdock::python {

// The exception object that stands for `error`.
nb::object make_exception(const Error& error);
[[noreturn]] void raise(const Error& error);

template <class T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

// What a function of the caller has thrown; `doing` names it: "all_gather() of the exchange".
Error error_of(const nb::python_error& thrown, std::string_view doing);

// str() of the object.
std::string text_of(nb::handle object);

// Refuses what is no number of seconds; `name` is for the message. Longest: ten years.
std::chrono::nanoseconds seconds_of(double seconds, const char* name);
Deadline deadline_in(double seconds);

}  // namespace crossdock::python
