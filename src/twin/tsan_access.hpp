// Memory accesses of CUDA threads as ThreadSanitizer should see them: weak ones as plain accesses,
// strong ones as C++ atomics. Scopes are not modelled there. In other builds none of this is
// called.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "twin/hook.hpp"

namespace crossdock::twin::tsan {

std::uint64_t load(Fiber& fiber, const void* p, unsigned bytes, Access access);
void store(Fiber& fiber, void* p, std::uint64_t value, unsigned bytes, Access access);
// The order of a read-modify-write whose value is computed outside: call before it.
void before_rmw(Fiber& fiber, void* p, unsigned bytes, Access access);
void fence(Fiber& fiber, Order order);

}  // namespace crossdock::twin::tsan
