// Masked ranks: those that a rank goes on without. Each rank has its own mask, in its device
// memory, that all its kernels of expert parallelism look at when they begin: a masked rank is sent
// nothing and nobody waits for it. Plain data, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>

namespace crossdock::device {

// Zero before the first launch and after a reset.
struct EpMask {
  u32 ranks;  // a bit each; never that of the rank itself
  u32 late;   // of them, those that a kernel has masked because they did not come in time
};

// What kernels get. `mask` null: nobody is ever masked.
struct EpMasking {
  EpMask* mask;
  bool late;  // a rank that does not come by the deadline is masked; else that is a fault
};

}  // namespace crossdock::device
