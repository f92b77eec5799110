// Parking and waking of polling fibers.
// SPDX-License-Identifier: Apache-2.0
#include "twin/watch.hpp"

#include <algorithm>
#include <bit>

#include "twin/address_space.hpp"
#include "twin/random.hpp"
#include "twin/scheduler.hpp"
#include "twin/state.hpp"

namespace crossdock::twin {

Watch::Watch(const AddressSpace& space, Scheduler& scheduler)
    : space_(space), scheduler_(scheduler), buckets_(kBuckets) {}

void Watch::begin() {
  for (Bucket& bucket : buckets_)
    bucket.waiters.clear();
  any_.clear();
  writes_ = 0;
}

std::uint32_t Watch::bucket_of(const void* p) const {
  const std::uint64_t granule = space_.canonical(p) >> 4;
  return static_cast<std::uint32_t>((granule * 0x9E3779B97F4A7C15ull) >> (64 - 13));
}

void Watch::record(Fiber& fiber, const void* p) {
  ReadSet& reads = fiber.reads;
  const std::uint32_t bucket = bucket_of(p);
  // A bucket that is there already keeps its older version: a change in between must wake.
  for (unsigned i = 0; i < reads.count; ++i)
    if (reads.marks[i].bucket == bucket) return;
  if (reads.count == ReadSet::kCapacity) {
    reads.overflow = true;
    return;
  }
  reads.marks[reads.count++] = {bucket, buckets_[bucket].version};
}

void Watch::notify(const void* p) {
  ++writes_;
  Bucket& bucket = buckets_[bucket_of(p)];
  ++bucket.version;
  wake_all(bucket.waiters);
  wake_all(any_);
}

void Watch::wake_all(std::vector<Waiter>& waiters) {
  for (const Waiter& waiter : waiters)
    if (waiter.fiber->ticket == waiter.ticket) wake(*waiter.fiber);
  waiters.clear();
}

void Watch::drop_stale(Bucket& bucket) {
  std::erase_if(bucket.waiters, [](const Waiter& w) { return w.fiber->ticket != w.ticket; });
}

bool Watch::park(Fiber& fiber) {
  const ReadSet& reads = fiber.reads;
  for (unsigned i = 0; i < reads.count; ++i)
    if (buckets_[reads.marks[i].bucket].version != reads.marks[i].version) return false;
  if (++fiber.next_ticket == 0) ++fiber.next_ticket;
  fiber.ticket = fiber.next_ticket;
  if (reads.overflow) {
    any_.push_back({&fiber, fiber.ticket});
    return true;
  }
  for (unsigned i = 0; i < reads.count; ++i) {
    Bucket& bucket = buckets_[reads.marks[i].bucket];
    // Waiters woken through another word stay behind; sweep when the list has doubled.
    if (bucket.waiters.size() >= 64 && std::has_single_bit(bucket.waiters.size()))
      drop_stale(bucket);
    bucket.waiters.push_back({&fiber, fiber.ticket});
  }
  return true;
}

void Watch::wake(Fiber& fiber) {
  fiber.ticket = 0;
  scheduler_.make_ready(fiber);
}

}  // namespace crossdock::twin
