// Global memory as a GPU may show it. A store passes four places: the thread's store buffer, the
// list of its CTA (after a release of CTA scope), the list of its rank (a peer's memory, after a
// release of GPU scope) and memory itself, where it is "performed" and seen by all. A load sees the
// newest value, or - with `stale` - an older one that the thread need not know to be overwritten.
// What a thread must know is its View; releases attach views to words and acquires take them over,
// if both scopes include the other side. Both halves of the model are sound: they never show what
// PTX forbids (they do show less than it allows, see docs/design/twin.md). Runs on the scheduler's
// OS thread; never switches fibers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <crossdock/twin/hooks.hpp>

#include "twin/random.hpp"

namespace crossdock::twin {

struct Cta;
struct Fiber;
class AddressSpace;
class Watch;

// All that a thread must see: stores performed up to `time`, and the entries of its CTA's and its
// rank's list up to the sequence numbers.
struct View {
  std::uint64_t time = 0;
  std::uint64_t cta_seq = 0;
  std::uint64_t rank_seq = 0;
  void join(const View& other) {
    if (other.time > time) time = other.time;
    if (other.cta_seq > cta_seq) cta_seq = other.cta_seq;
    if (other.rank_seq > rank_seq) rank_seq = other.rank_seq;
  }
};

// A store that is not yet performed.
struct PendingStore {
  std::uintptr_t address = 0;
  std::uint32_t bytes = 0;
  bool async = false;  // written by the async proxy: later asynchronous reads see it
  Fiber* writer = nullptr;
  std::uint64_t cta_seq = 0;
  std::uint64_t rank_seq = 0;
  std::shared_ptr<std::vector<unsigned char>> large;
  alignas(16) std::array<unsigned char, 32> small{};
  [[nodiscard]] const unsigned char* data() const { return large ? large->data() : small.data(); }
};

struct PendingList {
  std::vector<PendingStore> entries;
  std::uint64_t seq = 0;
  std::uint64_t filter = 0;  // a Bloom filter over granules, so that most loads skip the list
  bool queued = false;       // known to the drain queue
};

// The view that a release of one scope attached to a word. `rank` and `cta` say whose it was;
// kMixed: several, any reader may take it (the safe side).
struct ReleaseLevel {
  static constexpr int kNone = -1;
  static constexpr int kMixed = -2;
  View view;
  const Cta* cta = nullptr;  // nullptr with a rank set: mixed
  int rank = kNone;
  void join(const ReleaseLevel& other);
};
using ReleaseViews = std::array<ReleaseLevel, 3>;  // CTA, GPU, system

// A word that releases were made on.
struct ReleasedWord {
  std::uintptr_t word = 0;
  const Fiber* writer = nullptr;
  ReleaseViews views;
};

// Per thread.
struct ThreadView {
  View view;
  std::uint64_t own_time = 0;  // when the last store of this thread was performed
  std::uint64_t start_time = 0;
  PendingList stores;
  struct Seen {
    std::uintptr_t granule = 0;
    std::uint64_t time = 0;
  };
  std::array<Seen, 4> seen{};           // read-read coherence of strong loads
  std::unique_ptr<ReleaseViews> fence;  // views of release fences: later strong stores carry them
  std::unique_ptr<ReleaseViews> observed;  // views read by relaxed loads: a fence takes them over
};

class WeakMemory {
 public:
  struct Modes {
    bool weak = false;
    bool stale = false;
  };
  WeakMemory(AddressSpace& space, Watch& watch, Random& random, int ranks);

  void begin(Modes modes);
  [[nodiscard]] bool weak() const { return modes_.weak; }

  // A thread starts: everything performed until now is visible to it.
  void start_thread(Fiber& fiber);
  // A thread of a kernel has ended: its stores reach the system.
  void finish_thread(Fiber& fiber);
  void finish_cta(Cta& cta);

  void store(Fiber& fiber, void* p, const void* value, std::uint32_t bytes, hooks::Access access);
  void load(Fiber& fiber, const void* p, void* out, std::uint32_t bytes, hooks::Access access);
  // Order of a read-modify-write: begin_rmw, read and write memory through `perform`, end_rmw.
  void begin_rmw(Fiber& fiber, void* p, std::uint32_t bytes, hooks::Access access);
  void perform_rmw(Fiber& fiber, void* p, const void* value, std::uint32_t bytes,
                   hooks::Access access);
  void fence(Fiber& fiber, hooks::Order order, hooks::Scope scope);

  // Synchronisation inside a CTA: barriers, syncwarp, mbarriers.
  View release_to_cta(Fiber& fiber);
  void acquire_from_cta(Fiber& fiber, const View& view);

  // fence.proxy.async: generic stores become visible to asynchronous reads.
  void proxy_fence(Fiber& fiber);
  // An asynchronous write of `fiber` has happened; the data is taken over.
  void async_write(Fiber& fiber, unsigned char* p, std::shared_ptr<std::vector<unsigned char>> data,
                   std::uint32_t offset, std::uint32_t bytes);
  // wait_group: the thread's asynchronous writes are visible to it.
  void async_writes_waited(Fiber& fiber);
  // What an asynchronous read issued under `view` gets.
  void async_read(Fiber& fiber, const View& view, const unsigned char* p, unsigned char* out,
                  std::uint32_t bytes);

  // Performs one pending store somewhere; false when there is none.
  bool drain_one();
  [[nodiscard]] std::size_t drainable() const { return drain_queue_.size(); }

 private:
  static constexpr unsigned kVersions = 3;
  static constexpr unsigned kHistorySlots = 1u << 15;
  struct Version {  // what a granule held before one store to it
    alignas(16) std::array<unsigned char, 16> bytes;
    std::uint64_t replaced_at;
    const Fiber* writer;
    const Cta* cta;  // the writer's
    int rank;
    std::uint64_t cta_seq;
    std::uint64_t rank_seq;
    std::uint16_t mask;  // bytes that the store wrote
  };
  struct History {
    std::uintptr_t granule = 0;
    std::uint32_t run = 0;
    std::uint32_t count = 0;
    std::array<Version, kVersions> versions;  // newest first
  };

  // performing
  void perform(const PendingStore& store);
  void write_through(const PendingStore& store);
  void remember(const PendingStore& store, std::uintptr_t granule);
  void perform_at(std::vector<PendingStore>& entries, std::size_t i);
  void perform_overlapping(Fiber& fiber, std::uintptr_t address, std::uint32_t bytes);
  void enqueue(PendingList& list);
  void add(PendingList& list, PendingStore store, std::size_t capacity);
  // releases
  void release(Fiber& fiber, hooks::Scope scope);
  void move_to_cta(Fiber& fiber);
  bool route(Fiber& fiber, PendingStore store, hooks::Scope scope);  // true: to the rank's list
  [[nodiscard]] ReleaseLevel level_of(const Fiber& fiber) const;
  // words
  ReleasedWord* find_word(std::uintptr_t word);
  ReleasedWord& word_for(std::uintptr_t word);
  void grow_words();
  void publish(Fiber& fiber, void* p, std::uint32_t bytes, hooks::Access access, bool rmw);
  void forget_words(const Fiber* writer, std::uintptr_t address, std::uint32_t bytes);
  void take_over(Fiber& fiber, const ReleaseViews& views, hooks::Scope scope);
  void observe(Fiber& fiber, const void* p, std::uint32_t bytes, hooks::Access access);
  // stale loads
  History& history_of(std::uintptr_t granule);
  [[nodiscard]] static bool must_see(const Fiber& fiber, const View& view, const Version& version);
  bool load_stale(Fiber& fiber, const void* p, void* out, std::uint32_t bytes,
                  hooks::Access access);
  [[nodiscard]] std::uint64_t seen_time(Fiber& fiber, std::uintptr_t granule) const;
  void note_seen(Fiber& fiber, std::uintptr_t granule, std::uint64_t time) const;

  AddressSpace& space_;
  Watch& watch_;
  Random& random_;
  Modes modes_;
  std::uint64_t now_ = 1;
  std::uint32_t run_ = 0;
  std::vector<PendingList> ranks_;
  std::vector<std::uint64_t> rank_last_drain_;
  std::vector<PendingList*> drain_queue_;
  std::vector<History> history_;
  std::vector<ReleasedWord> words_;  // open addressing, a power of two
  std::size_t words_used_ = 0;
  std::vector<std::uint64_t> word_filter_;  // one bit per hash of a granule with released words
};

}  // namespace crossdock::twin
