// What a kernel left in a fault record, as an error of the host. No state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core/result.hpp>
#include <crossdock/layout/fault.cuh>

namespace crossdock::symm {

// Success while the record is empty; pairs with the release in raise_fault (comm/wait.cuh).
// Otherwise kPeerLost when the wait was for a peer, kDeadline when it was inside the rank; the
// message names kernel, phase, peer, what was expected and what was seen.
Result<> read_fault(const device::FaultRecord& record);

}  // namespace crossdock::symm
