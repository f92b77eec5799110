// See transfer_list.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/transfer_list.hpp"

#include <fmt/format.h>

#include "transfer/peer_core.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(20);

}  // namespace

void TransferList::add(const std::shared_ptr<TransferCore>& transfer) {
  const std::lock_guard lock(mutex_);
  if (transfer->listing != TransferCore::Listing::kNever) return;
  transfer->listing = TransferCore::Listing::kListed;
  transfer->list_position = list_.insert(list_.end(), transfer);
  if (!armed_ || transfer->deadline < *armed_) arm(transfer->deadline);
}

// Precondition: the lock is held.
void TransferList::arm(Deadline when) {
  armed_ = when;
  loop_.post([this, when] { loop_.call_at(when, [this] { check_deadlines(); }); });
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
    const auto cut = Deadline::at(transfer->deadline.when() +
                                  std::chrono::duration_cast<Deadline::Clock::duration>(grace_));
    if (now < transfer->deadline) {
      next = next ? earlier(*next, transfer->deadline) : transfer->deadline;
      continue;
    }
    const auto status = transfer->status();
    const Error why{
        .code = Code::kDeadline,
        .scope = Scope::kTransfer,
        .retry = Retry::kLater,
        .message = fmt::format(
            "transfer {} to peer '{}' passed its deadline with {} of {} bytes done", transfer->id,
            transfer->peer->name(), status.bytes_done, status.bytes_total)};
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
