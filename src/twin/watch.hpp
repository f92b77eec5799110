// Who polls what. A fiber that spins records the words it has read and parks; a performed write to
// any of them wakes it. Words share buckets by a hash of their 16-byte granule: a wake-up may be
// spurious, it is never lost, because the version is recorded before the value is read.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace crossdock::twin {

struct Fiber;
class AddressSpace;
class Scheduler;

class Watch {
 public:
  Watch(const AddressSpace& space, Scheduler& scheduler);

  void begin();
  // Before the read.
  void record(Fiber& fiber, const void* p);
  // After the write: wakes the fibers that read a word of the granule.
  void notify(const void* p);
  // Parks `fiber` until one of its reads changes; false when one has changed already (the fiber
  // should then poll again). The caller switches away when true.
  bool park(Fiber& fiber);
  // Wakes a parked fiber from elsewhere (clock, quiescence).
  void wake(Fiber& fiber);
  // Counts performed writes: when it stands still, nothing has happened.
  [[nodiscard]] std::uint64_t writes() const { return writes_; }

 private:
  struct Waiter {
    Fiber* fiber;
    std::uint32_t ticket;
  };
  struct Bucket {
    std::uint32_t version = 0;
    std::vector<Waiter> waiters;
  };
  static constexpr unsigned kBuckets = 1u << 13;

  [[nodiscard]] std::uint32_t bucket_of(const void* p) const;
  static void drop_stale(Bucket& bucket);
  void wake_all(std::vector<Waiter>& waiters);

  const AddressSpace& space_;
  Scheduler& scheduler_;
  std::vector<Bucket> buckets_;
  std::vector<Waiter> any_;  // read more words than a ReadSet holds: woken by every write
  std::uint64_t writes_ = 0;
};

}  // namespace crossdock::twin
