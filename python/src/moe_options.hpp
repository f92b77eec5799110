// Options of crossdock.moe, dataclasses there, as the library's structs. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <crossdock/moe/layer.hpp>

namespace nb = nanobind;

namespace crossdock::python {

// Each raises InvalidArgument naming the field where one is not what it has to be.
moe::LayerOptions layer_options_of(nb::handle options);
moe::Format format_of(nb::handle name);
moe::GemmTile tile_of(nb::handle name);
const char* format_name(moe::Format format);
moe::ScaleType scale_type_of(nb::handle name);
const char* scale_type_name(moe::ScaleType type);
nb::dict dict_of(const moe::LayerSizes& sizes);

}  // namespace crossdock::python
