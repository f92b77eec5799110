// Who this process is, for peers that want to know whether they share a host with it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "transport/transport.hpp"

namespace crossdock::transfer::detail {

// Fields that the system does not tell (a hardened /proc) stay empty or 0, and then match nobody.
transport::HostIdentity read_host_identity();

}  // namespace crossdock::transfer::detail
