// Defaults of the contract. No state.
// SPDX-License-Identifier: Apache-2.0
#include "transport/transport.hpp"

#include <fmt/format.h>

namespace crossdock::transport {

Result<> Transport::accept(InboundLane lane) {
  return make_error(Code::kUnsupported,
                    fmt::format("peer '{}' opened a data lane for transport {}, which takes none",
                                lane.peer_name, name()));
}

bool Transport::sever_inbound(std::uint64_t) {
  return true;
}

}  // namespace crossdock::transport
