// See transfer_core.hpp.
//
//   submit ── start() ──> shards in flight ── last shard_finished ──> complete()
//                                                                      │ error or stopped: finish()
//                                                                      │ checksum: PeerCore::verify
//                                                                      │ notification: acknowledged
//                                                                      └─> finish(): leases back,
//                                                                          state, callback, waiters
// SPDX-License-Identifier: Apache-2.0
#include "transfer/transfer_core.hpp"

#include <algorithm>
#include <fmt/format.h>

#include <crossdock/core/export.hpp>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "transfer/engine_core.hpp"
#include "transfer/peer_core.hpp"
#include "transfer/verifier.hpp"

namespace crossdock::transfer {
inline namespace v1 {
namespace {

// Takes about as long as a wake-up; waiting for more than that is not worth a CPU.
constexpr std::uint64_t kSmallTransfer = 64 * 1024;

}  // namespace

// Exported here, at the definitions, as those of core/error.hpp are.
CROSSDOCK_API std::string_view to_string(Op op) noexcept {
  return op == Op::kRead ? "read" : "write";
}

CROSSDOCK_API std::string_view to_string(State state) noexcept {
  switch (state) {
    case State::kPosted:
      return "posted";
    case State::kActive:
      return "active";
    case State::kCancelling:
      return "cancelling";
    case State::kDelivered:
      return "delivered";
    case State::kFailed:
      return "failed";
    case State::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

}  // namespace v1

namespace detail {

bool TransferCore::at_rest() const noexcept {
  return std::all_of(shards.begin(), shards.end(), [](const transport::Shard& shard) {
    return std::atomic_ref(const_cast<std::uint32_t&>(shard.in_flight)).load() != kOnRail;
  });
}

void TransferCore::start() {
  self_ = shared_from_this();
  // One more than the shards, held by submit() itself: a shard that finishes inside post() must not
  // complete the transfer while later ones are still to be posted.
  shards_left_.store(static_cast<std::uint32_t>(shards.size()) + 1, std::memory_order_relaxed);
}

void TransferCore::all_posted() noexcept {
  shard_over();
}

void TransferCore::record_error(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
}

void TransferCore::assign(transport::Shard& shard, const std::shared_ptr<RailSet>& set,
                          transport::Endpoint* rail) {
  const auto index = static_cast<std::size_t>(&shard - shards.data());
  const std::lock_guard lock(mutex_);
  if (rides_.size() <= index) rides_.resize(index + 1);
  rides_[index] = {set, rail, &shard};
  shard.owner = set.get();
  shard.in_doubt = false;
  set->board();
  std::atomic_ref(shard.in_flight).store(kOnRail);
}

std::vector<TransferCore::Ride> TransferCore::rides() const {
  const std::lock_guard lock(mutex_);
  return rides_;
}

bool TransferCore::request_stop(Error reason) {
  Stage stage = Stage::kData;
  {
    const std::lock_guard lock(mutex_);
    if (stop_reason_ || terminal()) return false;
    stop_reason_ = reason;
    stage = stage_;
    // The hashing thread may be busy with others for long: it need not get to this one any more.
    if (stage == Stage::kHashQueued) stage_ = Stage::kOver;
  }
  stop_.store(true);
  // A rail may finish the shard inside cancel(), so no lock is held.
  for (const auto& ride : rides())
    if (ride.rail != nullptr) ride.rail->cancel(*ride.shard);
  give_up_all_held();
  if (stage == Stage::kHashQueued) finish(reason);
  // Or nothing is owed yet, and who asks finds the reason: heed_stop().
  if (stage == Stage::kDigests || stage == Stage::kNotice) peer->abandon(id, reason);
  return true;
}

std::optional<Error> TransferCore::stop_reason() const {
  const std::lock_guard lock(mutex_);
  return stop_reason_;
}

void TransferCore::sever_rails(const Error& why) {
  // Others may have shards on the same rails; theirs are tried again when the peer answers.
  const Error cut{
      .code = Code::kUnreachable,
      .scope = Scope::kPeer,
      .retry = Retry::kLater,
      .message = fmt::format("a rail to peer '{}' was cut: {}", peer->name(), why.message)};
  for (const auto& ride : rides())
    if (ride.rail != nullptr && std::atomic_ref(ride.shard->in_flight).load() == kOnRail) {
      ride.set->mark_cut();
      ride.rail->sever(cut);
    }
  peer->abandon(id, why);
}

void TransferCore::shard_progress(transport::Shard& shard, std::uint64_t bytes) noexcept {
  shard.progress += bytes;
  bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
  peer->count_moved(bytes);
}

TransferCore::Stage TransferCore::stage() const {
  const std::lock_guard lock(mutex_);
  return stage_;
}

TransferCore::Progress TransferCore::progress() const {
  const std::uint64_t own = bytes_done_.load(std::memory_order_relaxed);
  if (own == 0) return {own, peer->moved_bytes()};
  switch (stage()) {
    case Stage::kHashQueued:
    case Stage::kHashing:
      return {own, engine->hashed_bytes()};
    case Stage::kDigests:
      return {own, peer->digests_answered()};
    default:
      return {own, 0};
  }
}

void TransferCore::shard_finished(transport::Shard& shard, const Error* error) noexcept {
  // A transport that reports twice (the fault injector does) must not end the transfer early.
  std::uint32_t on_rail = kOnRail;
  if (!std::atomic_ref(shard.in_flight).compare_exchange_strong(on_rail, kNowhere)) return;
  auto& set = *static_cast<RailSet*>(shard.owner);
  if (error != nullptr && shard.in_doubt) {
    shard.back_ns = base::now_ns();
    set.down.store(true);  // dialled anew, it is known to be quiet
  }
  set.leave();
  if (error == nullptr) return shard_over();
  const bool taken = (!stopping() && engine->retry(*this, shard, *error)) ||
                     engine->confirm_cut(*this, shard, *error);
  if (!taken) give_up(*error);
}

void TransferCore::give_up(const Error& error) noexcept {
  record_error(error);
  stop_.store(true);  // the other shards need not start what will not count
  give_up_all_held();
  shard_over();  // last: it may be the end of this object
}

void TransferCore::hold(transport::Shard& shard) noexcept {
  held_.fetch_add(1);
  std::atomic_ref(shard.in_flight).store(kHeld);
}

bool TransferCore::take_held(transport::Shard& shard) noexcept {
  std::uint32_t held = kHeld;
  if (!std::atomic_ref(shard.in_flight).compare_exchange_strong(held, kNowhere)) return false;
  held_.fetch_sub(1);
  return true;
}

void TransferCore::await_cut(transport::Shard& shard) noexcept {
  std::atomic_ref(shard.in_flight).store(kCut);
}

void TransferCore::give_up_cut(transport::Shard& shard, const Error& error) noexcept {
  std::uint32_t cut = kCut;
  if (std::atomic_ref(shard.in_flight).compare_exchange_strong(cut, kNowhere)) give_up(error);
}

void TransferCore::give_up_held(transport::Shard& shard, const Error& error) noexcept {
  if (take_held(shard) && !engine->confirm_cut(*this, shard, error)) give_up(error);
}

// Precondition: `stop_` is set, and somebody holds the transfer or a shard of it.
void TransferCore::give_up_all_held() noexcept {
  if (held_.load() == 0) return;
  const Error why = stop_reason().value_or(make_error(Code::kCancelled, "the transfer stopped"));
  for (auto& shard : shards)
    if (take_held(shard) && !engine->confirm_cut(*this, shard, why)) shard_over();
}

std::shared_ptr<RailSet> TransferCore::set_of(const transport::Shard& shard) const {
  const auto index = static_cast<std::size_t>(&shard - shards.data());
  const std::lock_guard lock(mutex_);
  return index < rides_.size() ? rides_[index].set : nullptr;
}

std::shared_ptr<transport::RemoteRegion> TransferCore::lease_of(
    const transport::RemoteRegion* region) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      remote_leases, [region](const auto& held) { return held.get() == region; });
  return found != remote_leases.end() ? *found : nullptr;
}

void TransferCore::shard_refused(transport::Shard& shard, const Error& error) noexcept {
  shard_finished(shard, &error);
}

void TransferCore::shard_over() noexcept {
  // Acquire-release: the last one sees what every shard wrote.
  if (shards_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete();
}

void TransferCore::complete() {
  const bool hash = checksum && bytes_total > 0;
  std::optional<Error> failure;
  // Whoever stops a transfer that waits for its checksum ends it, and the last handle may go then.
  std::shared_ptr<TransferCore> keep;
  {
    const std::lock_guard lock(mutex_);
    if (hash) keep = shared_from_this();
    const bool all_there = !error_ && bytes_done_.load() >= bytes_total;
    const bool more_to_do = hash || options.notification.has_value();
    if (!all_there || (more_to_do && stop_reason_)) failure = stop_reason_ ? stop_reason_ : error_;
    if (!failure) stage_ = hash ? Stage::kHashQueued : Stage::kNotice;
  }
  if (failure) return finish(std::move(failure));
  if (hash) return verify_transfer(keep);
  after_checksum();
}

bool TransferCore::begin_hashing() {
  const std::lock_guard lock(mutex_);
  if (stage_ != Stage::kHashQueued) return false;
  stage_ = Stage::kHashing;
  return true;
}

void TransferCore::await_digests() {
  const std::lock_guard lock(mutex_);
  stage_ = Stage::kDigests;
}

void TransferCore::after_checksum() {
  if (!options.notification) return finish(std::nullopt);
  {
    const std::lock_guard lock(mutex_);
    stage_ = Stage::kNotice;
  }
  if (auto reason = stop_reason()) return finish(std::move(reason));
  const auto self = shared_from_this();
  peer->send_notification(*options.notification, id, [self](Result<> sent) {
    self->finish(sent.ok() ? std::nullopt : std::optional<Error>(sent.error()));
  });
  heed_stop();
}

// Sequentially consistent with request_stop(): either that finds what the peer owes, or this finds
// the reason.
void TransferCore::heed_stop() {
  if (const auto reason = stop_reason()) peer->abandon(id, *reason);
}

State TransferCore::final_state(const std::optional<Error>& error) const {
  if (!error) return State::kDelivered;
  return error->code == Code::kCancelled ? State::kCancelled : State::kFailed;
}

void TransferCore::release_leases() {
  local_leases.clear();
  decltype(remote_leases) remote;
  {
    const std::lock_guard lock(mutex_);
    remote.swap(remote_leases);
    // The rails may be destroyed from here on; a handle to a finished transfer needs none.
    rides_.clear();
  }
  for (const auto& region : remote)
    peer->release_remote(*region);
}

bool TransferCore::uses_revoked() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(remote_leases.begin(), remote_leases.end(),
                     [](const auto& region) { return region->revoked.load(); });
}

void TransferCore::finish(std::optional<Error> error) {
  const auto self = std::move(self_);  // keeps this alive to the end of the function
  engine->transfers().remove(*this);
  if (error && error->scope == Scope::kCall) error->scope = Scope::kTransfer;
  release_leases();
  const State state = final_state(error);
  if (state == State::kDelivered) bytes_done_.store(bytes_total, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    state_.store(state);
  }
  engine->account(*this, state);
  const auto callback = std::move(options.on_complete);
  options.on_complete = nullptr;
  // Sequentially consistent with wait(): either the waiter sees `done_`, or we see the waiter.
  done_.store(1);
  if (waiters_.load() != 0) base::futex_wake_all(done_);
  if (callback) callback(status());
}

Status TransferCore::status() const {
  const State state = state_.load();
  Status status{.bytes_done = std::min(bytes_done_.load(std::memory_order_relaxed), bytes_total),
                .bytes_total = bytes_total};
  if (is_terminal(state)) {
    status.state = state;
    const std::lock_guard lock(mutex_);
    status.error = error_;
  } else if (stopping()) {
    status.state = State::kCancelling;
  } else {
    status.state = status.bytes_done == 0 ? State::kPosted : State::kActive;
  }
  return status;
}

Result<> TransferCore::wait(Deadline until) {
  if (bytes_total <= kSmallTransfer)
    (void)engine->short_wait().look(done_, engine->settings().wait_spin, until);
  if (done_.load() == 0) {
    waiters_.fetch_add(1);
    while (done_.load() == 0 && !until.passed())
      base::futex_wait(done_, 0, until);
    waiters_.fetch_sub(1);
  }
  if (done_.load() == 0)
    return make_error(Code::kDeadline,
                      fmt::format("transfer {} to peer '{}' is still {}: {} of {} bytes", id,
                                  peer->name(), to_string(status().state),
                                  bytes_done_.load(std::memory_order_relaxed), bytes_total));
  const std::lock_guard lock(mutex_);
  if (error_) return *error_;
  return {};
}

void TransferCore::recycle() {
  release_leases();
  peer.reset();
  options = {};
  rides_.clear();
  stage_ = Stage::kData;
  listing = Listing::kNever;
  planned_local.clear();
  planned_remote.clear();
  slices.clear();
  shards.clear();
  checksum = false;
  bytes_total = 0;
  shards_left_ = 0;
  bytes_done_ = 0;
  stop_ = false;
  state_ = State::kPosted;
  done_ = 0;
  stop_reason_.reset();
  error_.reset();
}

std::shared_ptr<TransferCore> TransferPool::acquire() {
  std::unique_ptr<TransferCore> transfer;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      transfer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!transfer) transfer = std::make_unique<TransferCore>();
  return {transfer.release(), [pool = shared_from_this()](TransferCore* raw) mutable {
            // In a forked child its locks may be held for ever.
            if (raw->engine != nullptr && raw->engine->forked()) return;
            // A pooled transfer refers to this control block weakly, so that the deleter lives as
            // long as it does: a reference to the pool left in it would be a cycle.
            const auto owner = std::move(pool);
            owner->give_back(std::unique_ptr<TransferCore>(raw));
          }};
}

void TransferPool::give_back(std::unique_ptr<TransferCore> transfer) {
  transfer->recycle();
  const std::lock_guard lock(mutex_);
  if (free_.size() < kKeep) free_.push_back(std::move(transfer));
}

}  // namespace detail
}  // namespace crossdock::transfer
