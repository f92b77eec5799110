// A process of the soak: one engine with a pool, and threads that move random batches to and from
// the pools of all others. It knows every byte that it wrote, for nobody else writes there:
//
//   pool of a member = areas; area (member, thread, incarnation) is used by that thread alone
//
// What it reads back must be what it wrote; of a transfer that did not end well each byte is the
// old or the new one, and stays so. A restarted member takes other areas than the one that was
// killed, whose last bytes may still be on their way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::testing::soak {

inline constexpr std::size_t kMembers = 4;
inline constexpr std::size_t kThreads = 2;
inline constexpr std::size_t kIncarnations = 4;
inline constexpr std::size_t kAreaBytes = 256 << 10;
inline constexpr std::size_t kPoolBytes = kMembers * kThreads * kIncarnations * kAreaBytes;

struct MemberOptions {
  std::size_t index = 0;
  std::size_t incarnation = 0;
  std::uint64_t seed = 1;

  // "--role=member" and the rest.
  [[nodiscard]] std::vector<std::string> arguments() const;
};

// In the child. Says its engine's name, then obeys lines; answers are one line:
//   peer INDEX NAME   the engine of another member, or of its successor; no answer
//   run               starts the threads; no answer
//   settle            stops them, checks every area and that every member is reached
//                     -> "ok TRANSFERS" or what was wrong
//   rest              lets go of all peers -> "use DESCRIPTORS THREADS MAPPINGS HEAP_BYTES"
//   end               releases and closes everything -> "ok" or what is left; then it ends
int member_main(const std::vector<std::string>& arguments);

}  // namespace crossdock::testing::soak
