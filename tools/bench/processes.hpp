// One process a rank: what torchrun and launchers like it tell a process by environment, as
// defaults of a bench's own options, and the store where the processes of one host meet then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <crossdock/core/result.hpp>

namespace crossdock::rendezvous {
class StoreServer;
}

namespace crossdock::tools::bench {

struct ProcessOptions {
  std::optional<std::uint32_t> rank;
  std::uint32_t world = 0;
  std::optional<std::uint32_t> device;  // CUDA ordinal; none: the rank modulo the GPUs
  std::string store;
};

// Fills in what is not given from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
// Without RANK, WORLD_SIZE, and a world of more than one, nothing is. kInvalidArgument, naming the
// variable, where one is no number.
Result<ProcessOptions> with_launcher(ProcessOptions given);

// The store of with_launcher(), which rank 0 serves as long as this lives; null where the store was
// given, and on other ranks.
Result<std::unique_ptr<rendezvous::StoreServer>> serve_store(const ProcessOptions& given,
                                                             const ProcessOptions& filled,
                                                             std::chrono::nanoseconds timeout);

}  // namespace crossdock::tools::bench
