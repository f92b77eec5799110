// Store buffers, performing of stores, histories and stale loads. Releases and acquires are in
// weak_release.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "twin/weak_memory.hpp"

#include <algorithm>
#include <cstring>

#include "twin/address_space.hpp"
#include "twin/state.hpp"
#include "twin/watch.hpp"

namespace crossdock::twin {

namespace {

constexpr std::uintptr_t kGranule = 16;
constexpr std::size_t kThreadCapacity = 12;
constexpr std::size_t kCtaCapacity = 256;

std::uintptr_t address_of(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p);
}
std::uintptr_t granule_of(std::uintptr_t a) {
  return a & ~(kGranule - 1);
}

bool overlap(const PendingStore& s, std::uintptr_t a, std::uint32_t n) {
  return a < s.address + s.bytes && s.address < a + n;
}
bool covers(const PendingStore& s, std::uintptr_t a, std::uint32_t n) {
  return a >= s.address && a + n <= s.address + s.bytes;
}
std::uint64_t filter_bit(std::uintptr_t granule) {
  return std::uint64_t{1} << (((granule >> 4) * 0x9E3779B97F4A7C15ull) >> 58);
}
std::uint64_t filter_bits(std::uintptr_t a, std::uint32_t n) {
  if (n > 2 * kGranule) return ~std::uint64_t{0};
  std::uint64_t bits = 0;
  for (std::uintptr_t g = granule_of(a); g < a + n; g += kGranule)
    bits |= filter_bit(g);
  return bits;
}
std::uint16_t byte_mask(std::uintptr_t granule, std::uintptr_t a, std::uint32_t n) {
  const std::uintptr_t lo = std::max(granule, a) - granule;
  const std::uintptr_t hi = std::min(granule + kGranule, a + n) - granule;
  return static_cast<std::uint16_t>(((1u << hi) - 1) & ~((1u << lo) - 1));
}

// Words of natural size are written whole, so that no reader sees half of one.
void write_memory(void* p, const unsigned char* data, std::uint32_t bytes) {
  if (bytes == 4) {
    std::uint32_t v;
    raw_copy(&v, data, 4);
    __atomic_store_n(static_cast<std::uint32_t*>(p), v, __ATOMIC_RELEASE);
  } else if (bytes == 8) {
    std::uint64_t v;
    raw_copy(&v, data, 8);
    __atomic_store_n(static_cast<std::uint64_t*>(p), v, __ATOMIC_RELEASE);
  } else {
    raw_copy(p, data, bytes);
  }
}

}  // namespace

WeakMemory::WeakMemory(AddressSpace& space, Watch& watch, Random& random, int ranks)
    : space_(space), watch_(watch), random_(random) {
  ranks_.resize(static_cast<std::size_t>(ranks));
  rank_last_drain_.resize(static_cast<std::size_t>(ranks));
}

void WeakMemory::begin(Modes modes) {
  modes_ = modes;
  modes_.stale = modes.stale && modes.weak;
  now_ = 1;
  ++run_;
  for (PendingList& list : ranks_)
    list = PendingList{};
  std::fill(rank_last_drain_.begin(), rank_last_drain_.end(), 0);
  drain_queue_.clear();
  if (modes_.stale && history_.empty()) history_.resize(kHistorySlots);
  words_.assign(modes_.weak ? 1024 : 0, ReleasedWord{});
  word_filter_.assign(modes_.weak ? 1024 : 0, 0);
  words_used_ = 0;
}

void WeakMemory::start_thread(Fiber& fiber) {
  fiber.memory = ThreadView{};
  fiber.memory.view.time = now_;
  fiber.memory.start_time = now_;
}

// ---- performing -----------------------------------------------------------------------------

WeakMemory::History& WeakMemory::history_of(std::uintptr_t granule) {
  const std::uint64_t key = space_.canonical(reinterpret_cast<const void*>(granule)) >> 4;
  return history_[(key * 0x9E3779B97F4A7C15ull) >> (64 - 15)];
}

void WeakMemory::remember(const PendingStore& store, std::uintptr_t granule) {
  History& history = history_of(granule);
  if (history.granule != granule || history.run != run_) {
    history.granule = granule;
    history.run = run_;
    history.count = 0;
  }
  for (unsigned i = std::min(history.count, kVersions - 1); i > 0; --i)
    history.versions[i] = history.versions[i - 1];
  history.count = std::min(history.count + 1, kVersions);
  Version& version = history.versions[0];
  raw_copy(version.bytes.data(), reinterpret_cast<const void*>(granule), kGranule);
  version.replaced_at = now_;
  version.writer = store.writer;
  version.cta = store.writer->cta;
  version.rank = store.writer->cta->rank;
  version.cta_seq = store.cta_seq;
  version.rank_seq = store.rank_seq;
  version.mask = byte_mask(granule, store.address, store.bytes);
}

void WeakMemory::write_through(const PendingStore& store) {
  ++now_;
  const std::uintptr_t end = store.address + store.bytes;
  if (modes_.stale)
    for (std::uintptr_t g = granule_of(store.address); g < end; g += kGranule)
      remember(store, g);
  write_memory(reinterpret_cast<void*>(store.address), store.data(), store.bytes);
  for (std::uintptr_t g = granule_of(store.address); g < end; g += kGranule)
    watch_.notify(reinterpret_cast<const void*>(g));
  store.writer->memory.own_time = now_;
  if (store.cta_seq != 0) store.writer->cta->last_drain = now_;
  if (store.rank_seq != 0)
    rank_last_drain_[static_cast<std::size_t>(store.writer->cta->rank)] = now_;
}

void WeakMemory::perform(const PendingStore& store) {
  write_through(store);
  forget_words(store.writer, store.address, store.bytes);
}

void WeakMemory::perform_at(std::vector<PendingStore>& entries, std::size_t i) {
  PendingStore store = std::move(entries[i]);
  if (i + 1 != entries.size()) entries[i] = std::move(entries.back());
  entries.pop_back();
  perform(store);
}

// Everything that `fiber` knows to be pending on these bytes becomes memory, so that what follows
// acts on one order of the word.
void WeakMemory::perform_overlapping(Fiber& fiber, std::uintptr_t a, std::uint32_t n) {
  const std::uint64_t bits = filter_bits(a, n);
  const View& view = fiber.memory.view;
  const auto sweep = [&](PendingList& list, auto&& known) {
    if (list.entries.empty() || (list.filter & bits) == 0) return;
    for (std::size_t i = 0; i < list.entries.size();) {
      if (overlap(list.entries[i], a, n) && known(list.entries[i]))
        perform_at(list.entries, i);
      else
        ++i;
    }
  };
  const auto known_in_cta = [&](const PendingStore& s) {
    return s.writer->cta == fiber.cta && s.cta_seq != 0 && s.cta_seq <= view.cta_seq;
  };
  sweep(fiber.memory.stores, [](const PendingStore&) { return true; });
  sweep(fiber.cta->pending, known_in_cta);
  sweep(ranks_[static_cast<std::size_t>(fiber.cta->rank)],
        [&](const PendingStore& s) { return s.rank_seq <= view.rank_seq || known_in_cta(s); });
}

void WeakMemory::enqueue(PendingList& list) {
  if (list.queued) return;
  list.queued = true;
  drain_queue_.push_back(&list);
}

void WeakMemory::add(PendingList& list, PendingStore store, std::size_t capacity) {
  if (list.entries.empty()) list.filter = 0;
  list.filter |= filter_bits(store.address, store.bytes);
  list.entries.push_back(std::move(store));
  enqueue(list);
  while (list.entries.size() > capacity)
    perform_at(list.entries, random_.below(static_cast<std::uint32_t>(list.entries.size())));
}

bool WeakMemory::drain_one() {
  while (!drain_queue_.empty()) {
    const std::uint32_t i = random_.below(static_cast<std::uint32_t>(drain_queue_.size()));
    PendingList& list = *drain_queue_[i];
    if (!list.entries.empty()) {
      perform_at(list.entries, random_.below(static_cast<std::uint32_t>(list.entries.size())));
      return true;
    }
    list.queued = false;
    drain_queue_[i] = drain_queue_.back();
    drain_queue_.pop_back();
  }
  return false;
}

// ---- stores and loads -----------------------------------------------------------------------

void WeakMemory::store(Fiber& fiber, void* p, const void* value, std::uint32_t bytes,
                       Access access) {
  PendingStore store;
  store.address = address_of(p);
  store.bytes = bytes;
  store.writer = &fiber;
  raw_copy(store.small.data(), value, bytes);
  if (!modes_.weak) {
    write_through(store);
    return;
  }
  const bool releases = access.order == Order::kRelease || access.order == Order::kAcqRel;
  const bool strong = access.order != Order::kWeak && access.order != Order::kNonCoherent;
  if (releases) release(fiber, access.scope);
  perform_overlapping(fiber, store.address, bytes);
  // A strong store after a release fence carries the fence's view, so it is performed here and now.
  if (releases || (strong && fiber.memory.fence)) {
    write_through(store);
    publish(fiber, p, bytes, access, /*rmw=*/false);
    return;
  }
  add(fiber.memory.stores, std::move(store), kThreadCapacity);
}

void WeakMemory::load(Fiber& fiber, const void* p, void* out, std::uint32_t bytes, Access access) {
  const std::uintptr_t a = address_of(p);
  if (modes_.weak) {
    for (const PendingStore& s : fiber.memory.stores.entries) {
      if (!covers(s, a, bytes)) continue;
      raw_copy(out, s.data() + (a - s.address), bytes);  // the thread's own store, forwarded
      return;
    }
    perform_overlapping(fiber, a, bytes);
    if (modes_.stale && load_stale(fiber, p, out, bytes, access)) {
      fiber.reads.stale = true;
      return;
    }
  }
  if (bytes <= 8)
    raw_copy(out, p, bytes);
  else
    raw_copy(out, p, bytes);
  if (modes_.weak) observe(fiber, p, bytes, access);
}

bool WeakMemory::must_see(const Fiber& fiber, const View& view, const Version& version) {
  if (version.replaced_at <= view.time) return true;
  if (version.cta_seq != 0 && version.cta == fiber.cta && version.cta_seq <= view.cta_seq)
    return true;
  return version.rank_seq != 0 && version.rank == fiber.cta->rank &&
         version.rank_seq <= view.rank_seq;
}

std::uint64_t WeakMemory::seen_time(Fiber& fiber, std::uintptr_t granule) const {
  const auto& slot = fiber.memory.seen[(granule >> 4) % fiber.memory.seen.size()];
  return slot.granule == granule ? slot.time : 0;
}

void WeakMemory::note_seen(Fiber& fiber, std::uintptr_t granule, std::uint64_t time) const {
  auto& slot = fiber.memory.seen[(granule >> 4) % fiber.memory.seen.size()];
  if (slot.granule != granule) {
    // The forgotten word must not go back in time: know everything up to then instead.
    fiber.memory.view.time = std::max(fiber.memory.view.time, slot.time);
    slot = {granule, time};
  }
  slot.time = std::max(slot.time, time);
}

bool WeakMemory::load_stale(Fiber& fiber, const void* p, void* out, std::uint32_t bytes,
                            Access access) {
  const std::uintptr_t a = address_of(p);
  const std::uintptr_t granule = granule_of(a);
  const bool strong = access.order != Order::kWeak && access.order != Order::kNonCoherent;
  // A word that was released on keeps only its newest views, so strong loads of it are fresh.
  if (strong && find_word(a & ~std::uintptr_t{3}) != nullptr) return false;
  const History& history = history_of(granule);
  const bool known = history.granule == granule && history.run == run_;
  const bool non_coherent = access.order == Order::kNonCoherent;
  const View view = non_coherent ? View{fiber.memory.start_time, 0, 0} : fiber.memory.view;
  const std::uint64_t seen = strong ? seen_time(fiber, granule) : 0;
  const std::uint16_t mask = byte_mask(granule, a, bytes);
  std::array<unsigned, kVersions> candidates;
  std::uint32_t count = 0;
  for (unsigned i = 0; known && i < history.count; ++i) {
    const Version& version = history.versions[i];
    if ((version.mask & mask) == 0) continue;
    const bool own = version.writer == &fiber && !non_coherent;
    if (own || version.replaced_at <= seen || must_see(fiber, view, version)) break;
    candidates[count++] = i;
  }
  if (count == 0 || random_.one_in(2)) {
    if (strong) note_seen(fiber, granule, now_);
    return false;
  }
  const Version& version = history.versions[candidates[random_.below(count)]];
  raw_copy(out, version.bytes.data() + (a - granule), bytes);
  if (strong) note_seen(fiber, granule, version.replaced_at - 1);
  return true;
}

// ---- asynchronous accesses ------------------------------------------------------------------

void WeakMemory::async_write(Fiber& fiber, unsigned char* p,
                             std::shared_ptr<std::vector<unsigned char>> data, std::uint32_t offset,
                             std::uint32_t bytes) {
  PendingStore store;
  store.address = address_of(p);
  store.bytes = bytes;
  store.writer = &fiber;
  store.async = true;
  if (bytes <= store.small.size())
    raw_copy(store.small.data(), data->data() + offset, bytes);
  else if (offset == 0)
    store.large = std::move(data);
  else
    store.large = std::make_shared<std::vector<unsigned char>>(data->begin() + offset,
                                                               data->begin() + offset + bytes);
  if (!modes_.weak) {
    write_through(store);
    return;
  }
  perform_overlapping(fiber, store.address, bytes);
  add(fiber.memory.stores, std::move(store), kCtaCapacity);
}

void WeakMemory::async_read(Fiber& fiber, const View& view, const unsigned char* p,
                            unsigned char* out, std::uint32_t bytes) {
  raw_copy(out, p, bytes);
  if (!modes_.weak) return;
  const std::uintptr_t a = address_of(p);
  for (std::uintptr_t g = granule_of(a); modes_.stale && g < a + bytes; g += kGranule) {
    const History& history = history_of(g);
    if (history.granule != g || history.run != run_ || history.count == 0) continue;
    if (must_see(fiber, view, history.versions[0]) || random_.one_in(2)) continue;
    const std::uintptr_t lo = std::max(g, a);
    const std::uintptr_t hi = std::min(g + kGranule, a + bytes);
    raw_copy(out + (lo - a), history.versions[0].bytes.data() + (lo - g), hi - lo);
  }
  const auto overlay = [&](const PendingList& list, auto&& visible) {
    for (const PendingStore& s : list.entries) {
      if (!overlap(s, a, bytes) || !visible(s)) continue;
      const std::uintptr_t lo = std::max(s.address, a);
      const std::uintptr_t hi = std::min(s.address + s.bytes, a + bytes);
      raw_copy(out + (lo - a), s.data() + (lo - s.address), hi - lo);
    }
  };
  const auto known_in_cta = [&](const PendingStore& s) {
    return s.async && s.writer->cta == fiber.cta && s.cta_seq != 0 && s.cta_seq <= view.cta_seq;
  };
  overlay(ranks_[static_cast<std::size_t>(fiber.cta->rank)],
          [&](const PendingStore& s) { return s.rank_seq <= view.rank_seq || known_in_cta(s); });
  overlay(fiber.cta->pending, known_in_cta);
  overlay(fiber.memory.stores, [](const PendingStore& s) { return s.async; });
}

}  // namespace crossdock::twin
