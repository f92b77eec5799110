// The transports that the contract suite runs against. Adding a transport is one row.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "support/transport_fixture.hpp"

namespace crossdock::testing {

std::vector<TransportCase> transport_cases();

}  // namespace crossdock::testing
