// A rail of a transport that copies with the CPU. It owns a bounded queue of shards and one thread,
// started at the first shard that is queued; small shards are copied by the thread that posts them.
//
//   CopyPort (one per endpoint) ──post──> CopyRail (one per rail of the transport)
//                                           lanes: by posting thread, served in turn
//                                           urgent: cancelled and severed shards, served first
//                                           thread: window by window ──> SliceCopier
//
// A window is a run of slices of at most SliceCopier::window_bytes(): between windows the rail
// looks at the stop flag, the deadline, a severed port and the urgent list. The thread sleeps on a
// condition variable when there is nothing to do. Nothing here allocates per shard or slice, except
// for errors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "transport/transport.hpp"

namespace crossdock::transport {

// How a transport copies. Called by the rail's thread and by posting threads at the same time.
class SliceCopier {
 public:
  // Judges a whole shard before its first byte moves: nothing is copied when it returns an error.
  virtual std::optional<Error> check(const Shard& shard) noexcept = 0;
  // Copies slices from [first, end) and returns how many of them, from the front, are in place: at
  // least one, unless `error` is set or `*shard.stop` was seen. Called again for the rest.
  virtual std::uint32_t copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                             std::optional<Error>& error) noexcept = 0;
  [[nodiscard]] virtual std::uint64_t window_bytes() const noexcept { return 256u << 10; }
  [[nodiscard]] virtual std::uint32_t window_slices() const noexcept { return 256; }

 protected:
  ~SliceCopier() = default;
};

struct CopyRailOptions {
  std::string name = "copy";               // of the thread
  std::uint32_t queue_shards = 1024;       // more are refused with kWouldBlock
  std::uint64_t inline_bytes = 64u << 10;  // shards up to this are copied inside post()
  std::chrono::nanoseconds spin = std::chrono::microseconds(20);  // polls that long before sleeping
};

class CopyPort;

// Thread-safe.
class CopyRail {
 public:
  explicit CopyRail(CopyRailOptions options);
  // Joins the thread. Precondition: every shard has finished.
  ~CopyRail();
  CopyRail(const CopyRail&) = delete;
  CopyRail& operator=(const CopyRail&) = delete;

 private:
  friend class CopyPort;
  static constexpr std::size_t kLanes = 4;
  struct List {
    Shard* head = nullptr;
    Shard* tail = nullptr;
    void push(Shard& shard) noexcept;
    Shard* pop() noexcept;
  };
  struct alignas(64) Lane {
    std::mutex mutex;
    List list;
  };

  // kWouldBlock when full, kNoMemory when the thread cannot be started.
  Result<> enqueue(Shard& shard);
  Result<> start();
  void wake() noexcept;
  // Moves the waiting shards that `pick` names to the urgent list.
  template <class Pick>
  void hasten(Pick&& pick) noexcept;

  void serve() noexcept;
  Shard* take() noexcept;
  void serve_urgent() noexcept;
  bool spin_for_work() const noexcept;
  void sleep() noexcept;
  // Copies a shard and finishes it. `worker`: serve the urgent list between windows.
  void execute(Shard& shard, bool worker) noexcept;

  const CopyRailOptions options_;
  std::array<Lane, kLanes> lanes_;
  std::size_t next_lane_ = 0;                          // of the thread
  alignas(64) std::atomic<std::uint32_t> waiting_{0};  // shards in the lanes
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> urgent_{false};
  std::atomic<bool> ended_{false};
  std::mutex urgent_mutex_;
  List urgent_list_;
  std::mutex sleep_mutex_;
  std::condition_variable wakeup_;
  std::mutex start_mutex_;
  std::atomic<bool> started_{false};
  std::thread thread_;
};

// One endpoint's use of a rail: its queue share, its copier, whether it is severed. Thread-safe.
// The rail and the copier outlive it; it is destroyed after its last shard has finished.
class CopyPort {
 public:
  CopyPort(CopyRail& rail, SliceCopier& copier) : rail_(rail), copier_(copier) {}

  Result<> post(Shard& shard);
  void cancel(const Shard& shard) noexcept;
  void sever(const Error& why);
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept {
    return queued_bytes_.load(std::memory_order_relaxed);
  }

 private:
  friend class CopyRail;
  static CopyPort& of(const Shard& shard) noexcept;
  // Why the shard must end now: severed, stopped, or late.
  std::optional<Error> stop_reason(const Shard& shard) noexcept;
  void finish(Shard& shard, const std::optional<Error>& error) noexcept;
  [[nodiscard]] Error why_severed();

  CopyRail& rail_;
  SliceCopier& copier_;
  std::atomic<bool> severed_{false};
  std::mutex mutex_;
  std::optional<Error> why_;
  alignas(64) std::atomic<std::uint64_t> queued_bytes_{0};
};

// Whether every slice lies inside its region and the region allows the direction. kInvalidArgument
// or kDenied; the sentence names the first offender. For SliceCopier::check().
std::optional<Error> check_bounds(const Shard& shard) noexcept;

// Copies one slice after the other inside this address space; `to_remote` is added to remote
// addresses. What copy() of a copier does whose memory is mapped. `delta_slot`: the transport's
// slot in RemoteRegion::attached.
std::uint32_t copy_mapped(const Shard& shard, std::uint32_t first, std::uint32_t end,
                          std::optional<std::size_t> delta_slot) noexcept;

}  // namespace crossdock::transport
