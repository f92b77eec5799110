// The parts of the module `crossdock._native`; each add_...() is in the file of that name and binds
// one part of the API. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace crossdock::python {

void add_core(nb::module_& m);         // core.cpp: version, settings
void add_array(nb::module_& m);        // array.cpp: memory that Python sees
void add_exchange(nb::module_& m);     // exchange.cpp: how processes of a group meet
void add_ep_options(nb::module_& m);   // ep_options.cpp: sizes, defaults
void add_ep_handle(nb::module_& m);    // ep_handle.cpp
void add_coll(nb::module_& m);         // coll_group.cpp: gathers, pipelines, tables of rows
void add_ep_group(nb::module_& m);     // ep_group.cpp
void add_moe_options(nb::module_& m);  // moe_options.cpp: sizes
void add_moe_weights(nb::module_& m);  // moe_weights.cpp
void add_moe_layer(nb::module_& m);    // moe_bind.cpp
void add_moe_gemm(nb::module_& m);     // moe_gemm.cpp

}  // namespace crossdock::python
