// What a symmetric group is made of: which ranks this process has, on which GPUs, and how it finds
// the other processes. Plain values, thread-compatible. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <crossdock/symm/exchange.hpp>

namespace crossdock::symm {
inline namespace v1 {

// Where windows lie and kernels run. Every rank of a group has the same.
enum class Backend : std::uint8_t {
  kGpu = 0,
  kCpu = 1,  // host memory; kernels run in the twin when all ranks are in one process
};

// How a kernel finds a peer's window: one multiply-add, or a table of offsets for windows that lie
// anywhere. The same on all ranks is not required.
enum class Addressing : std::uint8_t { kStride = 0, kTable = 1 };

struct LocalRank {
  std::uint32_t rank = 0;
  int device = -1;  // CUDA ordinal in this process; not used on the CPU
};

// Where the processes of an elastic group meet: at its creation, and again (Group::reform) when a
// rank has gone or another wants to come. A seat is the place of a rank; who comes first has it.
// The same for all processes, but for `settle`.
struct MeetingPlace {
  std::string store = {};  // URL: file://, tcp://, http://, inproc://
  std::string name = {};   // of the group; used for one group in the life of the store
  // The fewest ranks with which the group goes on, the other seats being vacant. 0: all of them.
  // More than half of the world, unless the caller makes sure in another way that ranks that cannot
  // see each other do not go on apart.
  std::uint32_t fewest = 0;
  // With `fewest`: how long a process waits for seats that nobody has taken, from the last one on
  // that was. Longer than ranks take to notice that one of them is gone.
  std::chrono::milliseconds settle{5'000};
};

struct GroupOptions {
  std::uint32_t world = 1;  // ranks in all, any number from 1 to 1024
  // The ranks of this process. Empty without an exchange: all of them, rank r on GPU r. With an
  // exchange they have to be given.
  std::vector<LocalRank> ranks = {};
  Backend backend = Backend::kGpu;
  Addressing addressing = Addressing::kStride;
  // Null: all ranks are in this process.
  std::shared_ptr<Exchange> exchange = nullptr;
  // Instead of an exchange: an elastic group, whose ranks may leave and join while it exists. On
  // the CPU kernels run where all meet in one process, at an inproc:// store: one thread at a time.
  std::optional<MeetingPlace> place = std::nullopt;
  // How long creating the group may take in all, waits for other processes included.
  std::chrono::milliseconds timeout{60'000};
  // CPU only: memory of each rank besides its window, and ranks on one "node" of the twin (0: all).
  std::uint64_t cpu_local_bytes = std::uint64_t{64} << 20;
  std::uint32_t ranks_per_node = 0;
};

}  // namespace v1
}  // namespace crossdock::symm
