// crossdock._native: what the typed modules of python/crossdock are made of. Not an API of its own.
// SPDX-License-Identifier: Apache-2.0
#include "bind.hpp"

NB_MODULE(_native, m) {
  namespace python = crossdock::python;
  m.doc() = "Native part of crossdock; use crossdock, crossdock.ep and crossdock.moe.";
  // A guest prints nothing when a process ends with objects of ours still there.
  nb::set_leak_warnings(false);
  python::add_core(m);
  python::add_array(m);
  python::add_exchange(m);
  python::add_ep_options(m);
  python::add_ep_handle(m);
  python::add_ep_group(m);
  python::add_coll(m);
  python::add_moe_options(m);
  python::add_moe_weights(m);
  python::add_moe_layer(m);
  python::add_moe_gemm(m);
}
