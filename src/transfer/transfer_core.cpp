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

#include "base/futex.hpp"
#include "transfer/engine_core.hpp"
#include "transfer/peer_core.hpp"
#include "transfer/verifier.hpp"

namespace crossdock::transfer {
inline namespace v1 {

std::string_view to_string(Op op) noexcept {
  return op == Op::kRead ? "read" : "write";
}

std::string_view to_string(State state) noexcept {
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
  std::atomic_ref(shard.in_flight).store(1);
}

std::vector<TransferCore::Ride> TransferCore::rides() const {
  const std::lock_guard lock(mutex_);
  return rides_;
}

bool TransferCore::request_stop(Error reason) {
  bool data_over = false;
  {
    const std::lock_guard lock(mutex_);
    if (stop_reason_ || terminal()) return false;
    stop_reason_ = reason;
    data_over = data_over_;
  }
  stop_.store(true);
  // A rail may finish the shard inside cancel(), so no lock is held.
  for (const auto& ride : rides())
    if (ride.rail != nullptr) ride.rail->cancel(*ride.shard);
  if (data_over) peer->abandon(id, reason);
  return true;
}

std::optional<Error> TransferCore::stop_reason() const {
  const std::lock_guard lock(mutex_);
  return stop_reason_;
}

void TransferCore::sever_rails(const Error& why) {
  for (const auto& ride : rides())
    if (ride.rail != nullptr && std::atomic_ref(ride.shard->in_flight).load() != 0) {
      ride.set->down.store(true);
      ride.rail->sever(why);
    }
  peer->abandon(id, why);
}

void TransferCore::shard_progress(transport::Shard& shard, std::uint64_t bytes) noexcept {
  shard.progress += bytes;
  bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
}

void TransferCore::shard_finished(transport::Shard& shard, const Error* error) noexcept {
  // A transport that reports twice (the fault injector does) must not end the transfer early.
  if (std::atomic_ref(shard.in_flight).exchange(0) == 0) return;
  if (error == nullptr) return shard_over();
  if (!stopping() && engine->retry(*this, shard, *error)) return;
  give_up(*error);
}

void TransferCore::give_up(const Error& error) noexcept {
  record_error(error);
  stop_.store(true);  // the other shards need not start what will not count
  shard_over();
}

std::shared_ptr<RailSet> TransferCore::set_of(const transport::Shard& shard) const {
  const auto index = static_cast<std::size_t>(&shard - shards.data());
  const std::lock_guard lock(mutex_);
  return rides_[index].set;
}

void TransferCore::shard_refused(transport::Shard& shard, const Error& error) noexcept {
  std::atomic_ref(shard.in_flight).store(1);
  shard_finished(shard, &error);
}

void TransferCore::shard_over() noexcept {
  // Acquire-release: the last one sees what every shard wrote.
  if (shards_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete();
}

void TransferCore::complete() {
  std::optional<Error> failure;
  {
    const std::lock_guard lock(mutex_);
    data_over_ = true;
    const bool all_there = !error_ && bytes_done_.load() >= bytes_total;
    if (!all_there) failure = stop_reason_ ? stop_reason_ : error_;
  }
  if (failure) return finish(std::move(failure));
  if (checksum && bytes_total > 0) return verify_transfer(shared_from_this());
  after_checksum();
}

void TransferCore::after_checksum() {
  if (!options.notification) return finish(std::nullopt);
  peer->send_notification(*options.notification, id, [self = shared_from_this()](Result<> sent) {
    self->finish(sent.ok() ? std::nullopt : std::optional<Error>(sent.error()));
  });
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
  data_over_ = false;
  listing = Listing::kNever;
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
  return {transfer.release(), [pool = shared_from_this()](TransferCore* raw) {
            pool->give_back(std::unique_ptr<TransferCore>(raw));
          }};
}

void TransferPool::give_back(std::unique_ptr<TransferCore> transfer) {
  transfer->recycle();
  const std::lock_guard lock(mutex_);
  if (free_.size() < kKeep) free_.push_back(std::move(transfer));
}

}  // namespace detail
}  // namespace crossdock::transfer
