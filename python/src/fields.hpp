// Fields of options in Python, dataclasses there, as numbers, flags and times of the library. Each
// raises InvalidArgument naming the field where the value is none. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <fmt/format.h>
#include <limits>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <string>

#include "errors.hpp"

namespace crossdock::python {

// A bool is a number to Python, and no number of anything.
template <class T>
T whole_number(nb::handle value, const char* name) {
  T out = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast(value, out))
    raise(invalid_argument(fmt::format("{} = {} must be a whole number from 0 to {}", name,
                                       text_of(nb::object(nb::repr(value))),
                                       std::numeric_limits<T>::max())));
  return out;
}

inline bool flag_of(nb::handle value, const char* name) {
  // NumPy's flags have a type of their own; 0 and 1 are numbers.
  const std::string type = text_of(value.type().attr("__name__"));
  if (type == "bool_" || type == "bool") return PyObject_IsTrue(value.ptr()) == 1;
  bool out = false;
  if (!nb::try_cast(value, out))
    raise(invalid_argument(
        fmt::format("{} = {} must be True or False", name, text_of(nb::object(nb::repr(value))))));
  return out;
}

inline float real_of(nb::handle value, const char* name) {
  float out = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast(value, out))
    raise(invalid_argument(
        fmt::format("{} = {} must be a number", name, text_of(nb::object(nb::repr(value))))));
  return out;
}

inline std::chrono::nanoseconds time_of(nb::handle value, const char* name) {
  double seconds = 0;
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast(value, seconds))
    raise(invalid_argument(fmt::format("{} = {} must be a number of seconds", name,
                                       text_of(nb::object(nb::repr(value))))));
  return seconds_of(seconds, name);
}

}  // namespace crossdock::python
