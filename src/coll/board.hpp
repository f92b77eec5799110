// What streams of a rank wait for, told to the host. Whoever makes a stream wait puts the wait
// between two marks in memory that the host reads, so that watch.hpp can bound it, in a replayed
// graph too, of which the host knows nothing else:
//
//   stream                                            watch
//     mark {value, what}, state = 1  ------------->     sees 1, makes it 2, takes the time
//     wait for word ... word                            sees 2 again: the same wait still lasts
//     words = 0                                         too long: who is missing? release the words
//     state = 0
//
// A *site* is one place of a rank where at most one stream waits at a time. Plain data and pure
// functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "coll/lane.hpp"
#include "coll/window.hpp"
#include "symm/rank.hpp"

namespace crossdock::coll {

struct alignas(64) Mark {
  static constexpr u64 kNone = 0;
  static constexpr u64 kWaiting = 1;
  static constexpr u64 kWatched = 2;
  u64 state;
  u64 what;
  u64 value;
};

enum class What : u32 { kFree = 1, kPosted, kCredit, kArrived, kSeen, kHere, kFailed };
// `index`: the gather, or the slot of a tensor to or from `peer`.
struct Awaited {
  What what = What::kFree;
  u32 index = 0;
  u32 peer = 0;
  u64 value = 1;  // of each word

  [[nodiscard]] u64 packed() const {
    return static_cast<u64>(what) | u64{index} << 8 | u64{peer} << 32;
  }
  static Awaited unpack(u64 packed, u64 value) {
    return {static_cast<What>(packed & 0xffu), static_cast<u32>(packed >> 8 & 0xffffffu),
            static_cast<u32>(packed >> 32), value};
  }
};

// A word that a stream of `rank` waits for, which `peer` writes.
struct AwaitedWord {
  u64* word = nullptr;
  u64 value = 0;
  u32 peer = 0;
};
std::vector<AwaitedWord> words_of(const symm::Rank& rank, const Window& window,
                                  const Awaited& awaited);

// Sites of a rank: gathers, the barrier, and one for each direction of each peer.
constexpr u32 kGatherSite = 0;
constexpr u32 kBarrierSite = 1;
constexpr u32 send_site(u32 peer) {
  return 2 + 2 * peer;
}
constexpr u32 receive_site(u32 peer) {
  return 3 + 2 * peer;
}
constexpr u32 num_sites(u32 world) {
  return 2 + 2 * world;
}

// Collects word operations, with waits between marks.
class Steps {
 public:
  Steps(const symm::Rank& rank, const Window& window, Mark* marks)
      : rank_(&rank), window_(&window), marks_(marks) {}
  // `marks` as streams see them.
  Steps& await(u32 site, const Awaited& awaited);
  Steps& say(u64* word, u64 value) {
    ops_.push_back({WordOp::Kind::kWrite, word, value});
    return *this;
  }
  // The word at `offset` in the window of every other rank.
  Steps& tell_peers(u64 offset, u64 value);
  std::vector<WordOp> take() { return std::move(ops_); }

 private:
  const symm::Rank* rank_;
  const Window* window_;
  Mark* marks_;
  std::vector<WordOp> ops_;
};

// What went wrong with a wait. `seen`: the words as they were, in the order of words_of().
Error explain(const symm::Rank& rank, const Awaited& awaited, const std::vector<AwaitedWord>& words,
              const std::vector<u64>& seen, std::chrono::nanoseconds waited);

}  // namespace crossdock::coll
