// See endpoint.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/endpoint.hpp"

namespace crossdock::transport::loopback {

std::optional<Error> LoopbackEndpoint::check(const Shard& shard) noexcept {
  return check_bounds(shard);
}

std::uint32_t LoopbackEndpoint::copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                                     std::optional<Error>&) noexcept {
  return copy_mapped(shard, first, end, std::nullopt);
}

}  // namespace crossdock::transport::loopback
