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
  std::optional<std::uint32_t> device;  // CUDA ordinal
  std::string store;
  std::optional<std::uint32_t> local_rank = {};  // number of the process on its host
};

// Fills in what is not given from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
// Without RANK, WORLD_SIZE, and a world of more than one, nothing is. kInvalidArgument, naming the
// variable, where one is no number.
Result<ProcessOptions> with_launcher(ProcessOptions given);

// The GPU of this process, of the `gpus` that it sees. One that is given is taken as it is. By
// numbers of processes they are taken in turns: a launcher may show each process its own GPU alone,
// which is number 0 there whatever LOCAL_RANK says.
std::uint32_t device_of(const ProcessOptions& options, std::uint32_t gpus);

// The store of with_launcher(), which rank 0 serves as long as this lives; null where the store was
// given, and on other ranks.
Result<std::unique_ptr<rendezvous::StoreServer>> serve_store(const ProcessOptions& given,
                                                             const ProcessOptions& filled,
                                                             std::chrono::nanoseconds timeout);

}  // namespace crossdock::tools::bench
