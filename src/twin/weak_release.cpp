// Releases and acquires: how views travel between threads through words, fences and barriers.
//
//   writer: data, release (flush by scope) -> word carries {view, scope}
//   reader: acquire of the word, scopes include each other -> view joins -> data must be seen
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "twin/address_space.hpp"
#include "twin/state.hpp"
#include "twin/watch.hpp"
#include "twin/weak_memory.hpp"

namespace crossdock::twin {

namespace {

constexpr std::size_t kCtaCapacity = 256;
constexpr std::size_t kRankCapacity = 1024;

unsigned level_index(Scope scope) {
  switch (scope) {
    case Scope::kCta:
      return 0;
    case Scope::kCluster:
    case Scope::kGpu:
      return 1;
    case Scope::kSys:
      return 2;
  }
  return 2;
}
bool releases(Access access) {
  return access.order == Order::kRelease || access.order == Order::kAcqRel;
}
bool acquires(Access access) {
  return access.order == Order::kAcquire || access.order == Order::kAcqRel;
}
bool strong(Access access) {
  return access.order != Order::kWeak && access.order != Order::kNonCoherent;
}
std::uint64_t hash_word(std::uintptr_t word) {
  return (word >> 2) * 0x9E3779B97F4A7C15ull;
}

// Calls `visit` for every 4-byte word of the range.
template <class Visit>
void for_each_word(std::uintptr_t a, std::uint32_t bytes, Visit&& visit) {
  for (std::uintptr_t w = a & ~std::uintptr_t{3}; w < a + bytes; w += 4)
    visit(w);
}

}  // namespace

void ReleaseLevel::join(const ReleaseLevel& other) {
  if (other.rank == kNone) return;
  if (rank == kNone) {
    *this = other;
    return;
  }
  view.join(other.view);
  if (rank != other.rank) rank = kMixed;
  if (cta != other.cta) cta = nullptr;
}

// What a release by `fiber` vouches for: what it knows, its own stores, and those drained on behalf
// of the threads of its CTA and rank whose releases it knows.
ReleaseLevel WeakMemory::level_of(const Fiber& fiber) const {
  const Cta& cta = *fiber.cta;
  ReleaseLevel level{fiber.memory.view, &cta, cta.rank};
  std::uint64_t& time = level.view.time;
  time = std::max(time, fiber.memory.own_time);
  if (level.view.cta_seq != 0) time = std::max(time, cta.last_drain);
  if (level.view.rank_seq != 0)
    time = std::max(time, rank_last_drain_[static_cast<std::size_t>(cta.rank)]);
  return level;
}

// ---- flushing -------------------------------------------------------------------------------

void WeakMemory::move_to_cta(Fiber& fiber) {
  PendingList& own = fiber.memory.stores;
  if (own.entries.empty()) return;
  PendingList& list = fiber.cta->pending;
  const std::uint64_t seq = ++list.seq;
  fiber.memory.view.cta_seq = seq;
  for (PendingStore& store : own.entries) {
    store.cta_seq = seq;
    add(list, std::move(store), kCtaCapacity);
  }
  own.entries.clear();
}

bool WeakMemory::route(Fiber& fiber, PendingStore store, Scope scope) {
  const int rank = fiber.cta->rank;
  const bool own_memory =
      space_.owner(reinterpret_cast<const void*>(store.address), store.bytes) == rank;
  if (scope == Scope::kSys || own_memory) {
    perform(store);
    return false;
  }
  PendingList& list = ranks_[static_cast<std::size_t>(rank)];
  store.rank_seq = list.seq + 1;
  add(list, std::move(store), kRankCapacity);
  return true;
}

void WeakMemory::release(Fiber& fiber, Scope scope) {
  if (scope == Scope::kCta) {
    move_to_cta(fiber);
    return;
  }
  View& view = fiber.memory.view;
  const auto known_in_cta = [&](const PendingStore& s) {
    return s.writer->cta == fiber.cta && s.cta_seq != 0 && s.cta_seq <= view.cta_seq;
  };
  const auto take = [](std::vector<PendingStore>& entries, std::size_t i) {
    PendingStore store = std::move(entries[i]);
    if (i + 1 != entries.size()) entries[i] = std::move(entries.back());
    entries.pop_back();
    return store;
  };
  std::vector<PendingStore>& own = fiber.memory.stores.entries;
  bool routed = false;
  while (!own.empty())
    routed |= route(fiber, take(own, own.size() - 1), scope);
  std::vector<PendingStore>& cta = fiber.cta->pending.entries;
  for (std::size_t i = 0; i < cta.size();) {
    if (known_in_cta(cta[i]))
      routed |= route(fiber, take(cta, i), scope);
    else
      ++i;
  }
  PendingList& rank = ranks_[static_cast<std::size_t>(fiber.cta->rank)];
  if (scope != Scope::kSys) {
    if (routed) view.rank_seq = ++rank.seq;
    return;
  }
  for (std::size_t i = 0; i < rank.entries.size();) {
    if (rank.entries[i].rank_seq <= view.rank_seq || known_in_cta(rank.entries[i]))
      perform_at(rank.entries, i);
    else
      ++i;
  }
}

void WeakMemory::finish_thread(Fiber& fiber) {
  if (!modes_.weak) return;
  release(fiber, Scope::kSys);
}

void WeakMemory::finish_cta(Cta& cta) {
  if (!modes_.weak) return;
  for (std::uint32_t i = 0; i < cta.size; ++i) {
    std::vector<PendingStore>& own = cta.fibers[i].memory.stores.entries;
    while (!own.empty())
      perform_at(own, own.size() - 1);
  }
  while (!cta.pending.entries.empty())
    perform_at(cta.pending.entries, 0);
  std::vector<PendingStore>& rank = ranks_[static_cast<std::size_t>(cta.rank)].entries;
  for (std::size_t i = 0; i < rank.size();) {
    if (rank[i].writer->cta == &cta)
      perform_at(rank, i);
    else
      ++i;
  }
  // The lists end with the CTA: the drain queue must not name them any more.
  std::erase_if(drain_queue_, [&](const PendingList* list) {
    const auto* first = reinterpret_cast<const unsigned char*>(cta.fibers);
    const auto* at = reinterpret_cast<const unsigned char*>(list);
    return list == &cta.pending || (at >= first && at < first + cta.size * sizeof(Fiber));
  });
  cta.pending.queued = false;
  for (std::uint32_t i = 0; i < cta.size; ++i)
    cta.fibers[i].memory.stores.queued = false;
}

void WeakMemory::proxy_fence(Fiber& fiber) {
  if (!modes_.weak) return;
  release(fiber, Scope::kGpu);
  fiber.memory.view.time = level_of(fiber).view.time;
}

void WeakMemory::async_writes_waited(Fiber& fiber) {
  if (modes_.weak) fiber.memory.view.time = std::max(fiber.memory.view.time, fiber.memory.own_time);
}

// ---- released words -------------------------------------------------------------------------

ReleasedWord* WeakMemory::find_word(std::uintptr_t word) {
  const std::uint64_t granule_hash = hash_word(word & ~std::uintptr_t{15});
  if ((word_filter_[granule_hash >> 54] >> ((granule_hash >> 48) & 63) & 1) == 0) return nullptr;
  const std::size_t mask = words_.size() - 1;
  for (std::size_t i = hash_word(word) >> 32 & mask;; i = (i + 1) & mask) {
    if (words_[i].word == word) return &words_[i];
    if (words_[i].word == 0) return nullptr;
  }
}

void WeakMemory::grow_words() {
  std::vector<ReleasedWord> old(words_.size() * 2);
  old.swap(words_);
  const std::size_t mask = words_.size() - 1;
  for (ReleasedWord& entry : old) {
    if (entry.word == 0) continue;
    std::size_t i = hash_word(entry.word) >> 32 & mask;
    while (words_[i].word != 0)
      i = (i + 1) & mask;
    words_[i] = entry;
  }
}

ReleasedWord& WeakMemory::word_for(std::uintptr_t word) {
  if (ReleasedWord* found = find_word(word)) return *found;
  if (2 * ++words_used_ > words_.size()) grow_words();
  const std::uint64_t granule_hash = hash_word(word & ~std::uintptr_t{15});
  word_filter_[granule_hash >> 54] |= std::uint64_t{1} << ((granule_hash >> 48) & 63);
  const std::size_t mask = words_.size() - 1;
  std::size_t i = hash_word(word) >> 32 & mask;
  while (words_[i].word != 0)
    i = (i + 1) & mask;
  words_[i].word = word;
  return words_[i];
}

// A store has been performed on these words. A plain store ends the release sequence of other
// writers; a read-modify-write continues it.
void WeakMemory::publish(Fiber& fiber, void* p, std::uint32_t bytes, Access access, bool rmw) {
  const bool fenced = strong(access) && fiber.memory.fence != nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  if (!releases(access) && !fenced) {
    if (!rmw) forget_words(&fiber, address, bytes);
    return;
  }
  for_each_word(address, bytes, [&](std::uintptr_t w) {
    ReleasedWord& word = word_for(w);
    const bool fresh = word.views[0].rank == ReleaseLevel::kNone &&
                       word.views[1].rank == ReleaseLevel::kNone &&
                       word.views[2].rank == ReleaseLevel::kNone;
    if (!rmw && word.writer != nullptr && word.writer != &fiber) word.views = ReleaseViews{};
    word.writer = (fresh || word.writer == &fiber || !rmw) ? &fiber : nullptr;
    if (releases(access)) word.views[level_index(access.scope)].join(level_of(fiber));
    for (unsigned i = 0; fenced && i < word.views.size(); ++i)
      word.views[i].join((*fiber.memory.fence)[i]);
  });
}

void WeakMemory::forget_words(const Fiber* writer, std::uintptr_t address, std::uint32_t bytes) {
  if (!modes_.weak) return;
  for_each_word(address, bytes, [&](std::uintptr_t w) {
    ReleasedWord* word = find_word(w);
    if (word == nullptr || word->writer == nullptr || word->writer == writer) return;
    word->views = ReleaseViews{};
    word->writer = writer;
  });
}

void WeakMemory::take_over(Fiber& fiber, const ReleaseViews& views, Scope scope) {
  const Cta& cta = *fiber.cta;
  for (unsigned i = 0; i < views.size(); ++i) {
    const ReleaseLevel& level = views[i];
    if (level.rank == ReleaseLevel::kNone) continue;
    const bool same_rank = level.rank == cta.rank || level.rank == ReleaseLevel::kMixed;
    const bool same_cta = level.cta == &cta || level.cta == nullptr;
    // Both scopes must include the other side.
    const auto includes = [&](unsigned of) { return of == 2 || (of == 1 ? same_rank : same_cta); };
    if (!includes(i) || !includes(level_index(scope))) continue;
    View view = level.view;
    if (!same_rank) view.rank_seq = 0;
    if (!same_cta) view.cta_seq = 0;
    fiber.memory.view.join(view);
  }
}

void WeakMemory::observe(Fiber& fiber, const void* p, std::uint32_t bytes, Access access) {
  if (!strong(access)) return;
  for_each_word(reinterpret_cast<std::uintptr_t>(p), bytes, [&](std::uintptr_t w) {
    const ReleasedWord* word = find_word(w);
    if (word == nullptr) return;
    if (acquires(access)) {
      take_over(fiber, word->views, access.scope);
      return;
    }
    auto& observed = fiber.memory.observed;
    if (!observed) observed = std::make_unique<ReleaseViews>();
    for (unsigned i = 0; i < word->views.size(); ++i)
      (*observed)[i].join(word->views[i]);
  });
}

// ---- read-modify-write and fences -----------------------------------------------------------

void WeakMemory::begin_rmw(Fiber& fiber, void* p, std::uint32_t bytes, Access access) {
  if (!modes_.weak) return;
  if (releases(access)) release(fiber, access.scope);
  perform_overlapping(fiber, reinterpret_cast<std::uintptr_t>(p), bytes);
}

void WeakMemory::perform_rmw(Fiber& fiber, void* p, const void* value, std::uint32_t bytes,
                             Access access) {
  PendingStore store;
  store.address = reinterpret_cast<std::uintptr_t>(p);
  store.bytes = bytes;
  store.writer = &fiber;
  raw_copy(store.small.data(), value, bytes);
  if (modes_.weak) observe(fiber, p, bytes, access);  // of the value that was read
  write_through(store);
  if (modes_.weak) publish(fiber, p, bytes, access, /*rmw=*/true);
}

void WeakMemory::fence(Fiber& fiber, Order order, Scope scope) {
  if (!modes_.weak) return;
  if (order != Order::kRelease && fiber.memory.observed)
    take_over(fiber, *fiber.memory.observed, scope);
  if (order == Order::kAcquire) return;
  release(fiber, scope);
  View& view = fiber.memory.view;
  if (order == Order::kSc) {
    // Fences that are sequentially consistent agree on one order: know all that came before.
    view.time = std::max(view.time, now_);
    view.cta_seq = fiber.cta->pending.seq;
    if (scope != Scope::kCta) view.rank_seq = ranks_[static_cast<std::size_t>(fiber.cta->rank)].seq;
  }
  auto& fence = fiber.memory.fence;
  if (!fence) fence = std::make_unique<ReleaseViews>();
  (*fence)[level_index(scope)].join(level_of(fiber));
}

// ---- inside a CTA ---------------------------------------------------------------------------

View WeakMemory::release_to_cta(Fiber& fiber) {
  if (!modes_.weak) return View{};
  move_to_cta(fiber);
  return level_of(fiber).view;
}

void WeakMemory::acquire_from_cta(Fiber& fiber, const View& view) {
  if (modes_.weak) fiber.memory.view.join(view);
}

}  // namespace crossdock::twin
