// See transfer_list.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/transfer_list.hpp"

#include <fmt/format.h>

#include "transfer/peer_core.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(20);
constexpr auto kShortestLook = std::chrono::milliseconds(1);

// By when a transfer must be over, as far as is known now, and when to look at it again.
struct Limit {
  Deadline ends;
  Deadline look;
};

Limit limit_of(const TransferCore& transfer, Deadline now) {
  const auto& watch = transfer.watch;
  if (watch.stall.count() == 0) return {transfer.deadline, transfer.deadline};
  const Deadline ends = earlier(transfer.deadline, watch.since.after(watch.stall));
  const auto pause = std::max<std::chrono::nanoseconds>(watch.stall / 4, kShortestLook);
  return {ends, earlier(ends, now.after(pause))};
}

// Once it is asked to stop, what still arrives is no progress: it shall end.
void note_progress(TransferCore& transfer, Deadline now) {
  if (transfer.watch.stall.count() == 0 || transfer.stopping()) return;
  const auto progress = transfer.progress();
  if (progress == transfer.watch.seen) return;
  transfer.watch.seen = progress;
  transfer.watch.since = now;
}

Error overdue(const TransferCore& transfer, Deadline now) {
  const auto status = transfer.status();
  const std::string what =
      now < transfer.deadline
          ? fmt::format("did not move for {} ms",
                        std::chrono::ceil<std::chrono::milliseconds>(transfer.watch.stall).count())
          : "passed its deadline";
  return Error{
      .code = Code::kDeadline,
      .scope = Scope::kTransfer,
      .retry = Retry::kLater,
      .message = fmt::format("transfer {} to peer '{}' {} with {} of {} bytes done", transfer.id,
                             transfer.peer->name(), what, status.bytes_done, status.bytes_total)};
}

}  // namespace

void TransferList::add(const std::shared_ptr<TransferCore>& transfer) {
  const std::lock_guard lock(mutex_);
  if (transfer->listing != TransferCore::Listing::kNever) return;
  transfer->listing = TransferCore::Listing::kListed;
  transfer->list_position = list_.insert(list_.end(), transfer);
  const Deadline look = limit_of(*transfer, Deadline::now()).look;
  if (!armed_ || look < *armed_) arm(look);
}

// Precondition: the lock is held. The earlier moment takes the place of the later one: a timer that
// stayed would arm itself anew for as long as transfers come and go.
void TransferList::arm(Deadline when) {
  armed_ = when;
  loop_.post([this, when] {
    if (timer_) loop_.cancel(*timer_);
    timer_ = loop_.call_at(when, [this] { check_deadlines(); });
  });
}

void TransferList::remove(TransferCore& transfer) {
  std::shared_ptr<TransferCore> last;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  if (transfer.listing == TransferCore::Listing::kListed) {
    last = std::move(*transfer.list_position);
    list_.erase(transfer.list_position);
    if (list_.empty()) emptied_.notify_all();
  }
  transfer.listing = TransferCore::Listing::kOver;
}

std::size_t TransferList::size() const {
  const std::lock_guard lock(mutex_);
  return list_.size();
}

std::vector<std::shared_ptr<TransferCore>> TransferList::all() const {
  const std::lock_guard lock(mutex_);
  return {list_.begin(), list_.end()};
}

bool TransferList::wait_empty(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return emptied_.wait_until(lock, deadline.when(), [&] { return list_.empty(); });
}

void TransferList::check_deadlines() {
  {
    // From here on a transfer that is added arms the timer for itself.
    const std::lock_guard lock(mutex_);
    armed_.reset();
  }
  const auto now = Deadline::now();
  std::optional<Deadline> next;
  for (const auto& transfer : all()) {
    note_progress(*transfer, now);
    const Limit limit = limit_of(*transfer, now);
    if (now < limit.ends) {
      next = next ? earlier(*next, limit.look) : limit.look;
      continue;
    }
    const Deadline cut = limit.ends.after(grace_);
    const Error why = overdue(*transfer, now);
    transfer->request_stop(why);
    if (now >= cut) {
      // The peer does not answer: cut the connection, so that nothing can follow.
      transfer->sever_rails(why);
      // And look again until it is gone: what it began meanwhile is ended then.
      const auto again = Deadline::in(std::max<std::chrono::nanoseconds>(grace_, kLookAgain));
      next = next ? earlier(*next, again) : again;
    } else {
      next = next ? earlier(*next, cut) : cut;
    }
  }
  const std::lock_guard lock(mutex_);
  if (next && !list_.empty() && (!armed_ || *next < *armed_)) arm(*next);
}

}  // namespace crossdock::transfer::detail
