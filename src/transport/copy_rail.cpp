// The queue, the thread and the inline path of a copying rail. See copy_rail.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/copy_rail.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>

#include "base/clock.hpp"
#include "base/worker_thread.hpp"
#include "transport/copy_bytes.hpp"

namespace crossdock::transport {
namespace {

// Progress is reported when this much is in place, and at the end.
constexpr std::uint64_t kReportBytes = 256u << 10;

// Spreads posting threads over the lanes.
std::size_t lane_of_thread() noexcept {
  static std::atomic<std::size_t> next{0};
  thread_local const std::size_t lane = next.fetch_add(1, std::memory_order_relaxed);
  return lane;
}

void relax_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The end of the window that starts at `first`: at least one slice.
std::uint32_t window_end(const Shard& shard, std::uint32_t first, const SliceCopier& copier) {
  const auto count = static_cast<std::uint32_t>(shard.slices.size());
  const std::uint32_t limit = std::min(count, first + std::max(1u, copier.window_slices()));
  std::uint64_t bytes = shard.slices[first].length;
  std::uint32_t end = first + 1;
  while (end < limit && bytes + shard.slices[end].length <= copier.window_bytes())
    bytes += shard.slices[end++].length;
  return end;
}

std::uint64_t bytes_of(const Shard& shard, std::uint32_t first, std::uint32_t count) noexcept {
  std::uint64_t bytes = 0;
  for (const Slice& slice : shard.slices.subspan(first, count))
    bytes += slice.length;
  return bytes;
}

// Ranges of one process may overlap (loopback): the destination then gets what the source held.
bool overlap(const CopyPair& pair, std::size_t bytes) noexcept {
  return pair.to < pair.from + bytes && pair.from < pair.to + bytes;
}

void copy_slice(const CopyPair& pair, std::size_t bytes, bool streaming) noexcept {
  if (overlap(pair, bytes)) [[unlikely]]
    std::memmove(pair.to, pair.from, bytes);
  else
    (streaming ? copy_streaming : copy_cached)(pair.to, pair.from, bytes);
}

CopyPair ends_of(const Shard& shard, const Slice& slice,
                 std::optional<std::size_t> delta_slot) noexcept {
  const std::int64_t delta = delta_slot ? slice.region->attached[*delta_slot]->delta : 0;
  auto* const remote =
      reinterpret_cast<std::byte*>(slice.remote + static_cast<std::uint64_t>(delta));
  return shard.op == Op::kWrite ? CopyPair{remote, slice.local} : CopyPair{slice.local, remote};
}

// The four slices from `first` on, which are there, side by side. False, and nothing is copied,
// where they do not lend themselves to that.
bool copy_four(const Shard& shard, std::uint32_t first,
               std::optional<std::size_t> delta_slot) noexcept {
  const std::uint32_t bytes = shard.slices[first].length;
  if (bytes < kTogetherMinBytes || bytes >= kTogetherEndBytes || bytes % kCacheLine != 0 ||
      !streams_together())
    return false;
  std::array<CopyPair, kTogether> pairs;
  for (std::uint32_t i = 0; i < kTogether; ++i) {
    const Slice& slice = shard.slices[first + i];
    if (slice.length != bytes) return false;
    pairs[i] = ends_of(shard, slice, delta_slot);
    if (reinterpret_cast<std::uintptr_t>(pairs[i].to) % kCacheLine != 0) return false;
  }
  for (const CopyPair& to : pairs)
    for (const CopyPair& from : pairs)
      if (overlap({to.to, from.from}, bytes)) return false;
  copy_together(pairs, bytes);
  return true;
}

}  // namespace

void CopyRail::List::push(Shard& shard) noexcept {
  shard.next = nullptr;
  (head == nullptr ? head : tail->next) = &shard;
  tail = &shard;
}

Shard* CopyRail::List::pop() noexcept {
  Shard* const shard = head;
  if (shard != nullptr) head = shard->next;
  return shard;
}

CopyRail::CopyRail(CopyRailOptions options) : options_(std::move(options)) {}

CopyRail::~CopyRail() {
  if (!thread_.joinable()) return;
  ended_.store(true);
  wake();
  thread_.join();
}

Result<> CopyRail::start() {
  const std::lock_guard lock(start_mutex_);
  if (started_.load(std::memory_order_relaxed)) return {};
  CROSSDOCK_TRY(thread, base::start_worker(options_.name, [this] { serve(); }));
  thread_ = std::move(thread);
  started_.store(true, std::memory_order_release);  // pairs with the load in enqueue()
  return {};
}

Result<> CopyRail::enqueue(Shard& shard) {
  if (!started_.load(std::memory_order_acquire)) CROSSDOCK_CHECK_OK(start());
  // Counted before it is linked: the thread may look in vain for a moment, never miss it.
  if (waiting_.fetch_add(1) >= options_.queue_shards) {
    waiting_.fetch_sub(1);
    return Error{.code = Code::kWouldBlock,
                 .retry = Retry::kLater,
                 .message = fmt::format("rail {} has {} shards waiting; post again when some "
                                        "have finished",
                                        options_.name, options_.queue_shards)};
  }
  Lane& lane = lanes_[lane_of_thread() % kLanes];
  {
    const std::lock_guard lock(lane.mutex);
    lane.list.push(shard);
  }
  // Sequentially consistent with sleep(): either it sees the count, or this sees it sleeping.
  if (sleeping_.load()) wake();
  return {};
}

void CopyRail::wake() noexcept {
  // Through the mutex, so that the signal cannot fall between the thread's check and its wait.
  {
    const std::lock_guard lock(sleep_mutex_);
  }
  wakeup_.notify_one();
}

template <class Pick>
void CopyRail::hasten(Pick&& pick) noexcept {
  if (waiting_.load() == 0) return;
  List picked;
  for (Lane& lane : lanes_) {
    const std::lock_guard lock(lane.mutex);
    List rest;
    while (Shard* const shard = lane.list.pop())
      (pick(*shard) ? picked : rest).push(*shard);
    lane.list = rest;
  }
  if (picked.head == nullptr) return;
  {
    const std::lock_guard lock(urgent_mutex_);
    while (Shard* const shard = picked.pop()) {
      waiting_.fetch_sub(1);
      urgent_list_.push(*shard);
    }
    urgent_.store(true);
  }
  wake();
}

void CopyRail::serve_urgent() noexcept {
  List all;
  {
    const std::lock_guard lock(urgent_mutex_);
    std::swap(all, urgent_list_);
    urgent_.store(false);
  }
  while (Shard* const shard = all.pop()) {
    CopyPort& port = CopyPort::of(*shard);
    std::optional<Error> why = port.stop_reason(*shard);
    // cancel() was called without the flag: the request counts.
    if (!why) why = make_error(Code::kCancelled, "cancelled before it started");
    port.finish(*shard, why);
  }
}

Shard* CopyRail::take() noexcept {
  for (std::size_t i = 0; i < kLanes; ++i) {
    Lane& lane = lanes_[next_lane_++ % kLanes];
    const std::lock_guard lock(lane.mutex);
    if (Shard* const shard = lane.list.pop()) {
      waiting_.fetch_sub(1);
      return shard;
    }
  }
  return nullptr;
}

bool CopyRail::spin_for_work() const noexcept {
  const std::uint64_t end = base::now_ns() + static_cast<std::uint64_t>(options_.spin.count());
  do {
    for (int i = 0; i < 16; ++i) {
      if (waiting_.load(std::memory_order_relaxed) != 0 || urgent_.load(std::memory_order_relaxed))
        return true;
      relax_cpu();
    }
  } while (base::now_ns() < end);
  return false;
}

void CopyRail::sleep() noexcept {
  std::unique_lock lock(sleep_mutex_);
  sleeping_.store(true);  // before the checks below; see enqueue()
  wakeup_.wait(lock, [this] { return waiting_.load() != 0 || urgent_.load() || ended_.load(); });
  sleeping_.store(false);
}

void CopyRail::serve() noexcept {
  while (!ended_.load()) {
    if (urgent_.load()) serve_urgent();
    if (Shard* const shard = take())
      execute(*shard, true);
    else if (!spin_for_work())
      sleep();
  }
}

void CopyRail::execute(Shard& shard, bool worker) noexcept {
  CopyPort& port = CopyPort::of(shard);
  SliceCopier& copier = port.copier_;
  const auto count = static_cast<std::uint32_t>(shard.slices.size());
  std::uint64_t unreported = 0;
  std::optional<Error> error;
  while (shard.slices_done < count && !error) {
    error = port.stop_reason(shard);
    if (error) break;
    const std::uint32_t end = window_end(shard, shard.slices_done, copier);
    const std::uint32_t done = copier.copy(shard, shard.slices_done, end, error);
    unreported += bytes_of(shard, shard.slices_done, done);
    shard.slices_done += done;
    if (unreported >= kReportBytes) {
      shard.sink->shard_progress(shard, unreported);
      unreported = 0;
    }
    if (worker && urgent_.load(std::memory_order_relaxed)) serve_urgent();
  }
  if (unreported != 0) shard.sink->shard_progress(shard, unreported);
  port.finish(shard, error);
}

CopyPort& CopyPort::of(const Shard& shard) noexcept {
  return *reinterpret_cast<CopyPort*>(shard.scratch[0]);
}

Result<> CopyPort::post(Shard& shard) {
  if (severed_.load()) return why_severed();
  shard.slices_done = 0;
  shard.next = nullptr;
  shard.scratch[0] = reinterpret_cast<std::uint64_t>(this);
  queued_bytes_.fetch_add(shard.bytes, std::memory_order_relaxed);
  if (auto refused = copier_.check(shard)) {
    finish(shard, refused);
    return {};
  }
  const bool small = shard.bytes <= rail_.options_.inline_bytes;
  if (small && rail_.waiting_.load(std::memory_order_relaxed) == 0) {
    rail_.execute(shard, false);
    return {};
  }
  if (auto queued = rail_.enqueue(shard); !queued.ok()) {
    queued_bytes_.fetch_sub(shard.bytes, std::memory_order_relaxed);
    return queued;
  }
  return {};
}

void CopyPort::cancel(const Shard& shard) noexcept {
  rail_.hasten([&](const Shard& waiting) { return &waiting == &shard; });
}

void CopyPort::sever(const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (why_) return;
    why_ = why;
  }
  severed_.store(true);
  rail_.hasten([this](const Shard& waiting) { return &of(waiting) == this; });
}

Error CopyPort::why_severed() {
  const std::lock_guard lock(mutex_);
  return *why_;
}

std::optional<Error> CopyPort::stop_reason(const Shard& shard) noexcept {
  if (severed_.load(std::memory_order_acquire)) return why_severed();
  if (shard.stop != nullptr && shard.stop->load(std::memory_order_acquire))
    return make_error(Code::kCancelled, fmt::format("stopped after {} of {} slices",
                                                    shard.slices_done, shard.slices.size()));
  if (shard.deadline.passed())
    return make_error(Code::kDeadline,
                      fmt::format("the deadline passed with {} of {} slices in place",
                                  shard.slices_done, shard.slices.size()));
  return std::nullopt;
}

void CopyPort::finish(Shard& shard, const std::optional<Error>& error) noexcept {
  // Before the call, which may be the last moment of this port.
  queued_bytes_.fetch_sub(shard.bytes, std::memory_order_relaxed);
  shard.sink->shard_finished(shard, error ? &*error : nullptr);
}

std::optional<Error> check_bounds(const Shard& shard) noexcept {
  for (const Slice& slice : shard.slices) {
    const RemoteRegion* const region = slice.region;
    if (region == nullptr || slice.remote < region->address || slice.length > region->length ||
        slice.remote - region->address > region->length - slice.length) [[unlikely]]
      return invalid_argument(fmt::format(
          "remote range [{:#x}, +{}) is outside region [{:#x}, +{})", slice.remote, slice.length,
          region == nullptr ? 0 : region->address, region == nullptr ? 0 : region->length));
    const auto needed =
        shard.op == Op::kWrite ? transfer::Access::kRemoteReadWrite : transfer::Access::kRemoteRead;
    if (region->access < needed) [[unlikely]]
      return make_error(Code::kDenied,
                        fmt::format("region [{:#x}, +{}) of the peer does not allow remote {}; it "
                                    "was registered with another access",
                                    region->address, region->length,
                                    shard.op == Op::kWrite ? "writes" : "reads"));
  }
  return std::nullopt;
}

std::uint32_t copy_mapped(const Shard& shard, std::uint32_t first, std::uint32_t end,
                          std::optional<std::size_t> delta_slot) noexcept {
  const bool streaming = shard.bytes >= kStreamingBytes;
  std::uint32_t done = first;
  while (done < end) {
    if (done != first && shard.stop != nullptr && shard.stop->load(std::memory_order_relaxed))
      break;
    if (streaming && done + kTogether <= end && copy_four(shard, done, delta_slot)) {
      done += kTogether;
      continue;
    }
    const Slice& slice = shard.slices[done];
    const CopyPair pair = ends_of(shard, slice, delta_slot);
    copy_slice(pair, slice.length, streaming && slice.length >= kStreamingSliceBytes);
    ++done;
  }
  if (streaming) finish_streaming();
  return done - first;
}

}  // namespace crossdock::transport
