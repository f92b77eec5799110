// See transport_cases.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/transport_cases.hpp"

#include "transport/loopback/transport.hpp"

namespace crossdock::testing {

std::vector<TransportCase> transport_cases() {
  using transport::TransportContext;
  std::vector<TransportCase> cases;
  cases.push_back({.name = "loopback",
                   .make =
                       [](const TransportContext& context) {
                         return transport::make_loopback(context, transport::LoopbackOptions{});
                       },
                   .same_engine = true});
  return cases;
}

}  // namespace crossdock::testing
