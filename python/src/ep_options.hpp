// Options of crossdock.ep, dataclasses there, as the library's structs. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <crossdock/ep/group.hpp>

namespace nb = nanobind;

namespace crossdock::python {

// Raises InvalidArgument naming the field where one is no number of its range.
ep::Options options_of(nb::handle options);
// "auto", "small" or "large".
ep::Path path_of(nb::handle value);
// Whether rows of bf16 are cast to e4m3, and with which scales: False, True or "ue8m0".
enum class Cast : std::uint8_t { kNone, kF32, kUe8m0 };
Cast cast_of(nb::handle value);
// "bf16", "fp8" or "logfmt10".
ep::Payload payload_of(nb::handle value);
nb::dict dict_of(const ep::Sizes& sizes);
// `value` as a number of 32 bits; `name` is for the message.
std::uint32_t number_of(nb::handle value, const char* name);
// A number, or "auto".
std::uint32_t expand_sms_of(nb::handle value);

}  // namespace crossdock::python
