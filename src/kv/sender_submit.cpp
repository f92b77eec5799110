// From pushes to transfers: which push goes next, the copy runs for its destination, submission,
// and what the end of a transfer does. One thread at a time submits (pumping_); the others leave a
// note. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "kv/sender_core.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

namespace {

// The part of a push that the destination expects; empty when num_pages is 0.
Push clip(const Push& push, const Destination& to) {
  const std::uint64_t begin = std::max(push.first_page, to.first_page);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{push.first_page} + push.num_pages,
                                                    to.first_page + to.pages.size());
  if (begin >= end) return {push.layer, 0, 0};
  return {push.layer, static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end - begin)};
}

// Consecutive layers of the same pages become one part.
void add_part(std::vector<message::Part>& parts, const Push& push) {
  if (!parts.empty()) {
    message::Part& last = parts.back();
    if (last.first_page == push.first_page && last.num_pages == push.num_pages &&
        last.first_layer + last.num_layers == push.layer) {
      ++last.num_layers;
      return;
    }
  }
  parts.push_back({push.layer, 1, push.first_page, push.num_pages});
}

}  // namespace

void SenderCore::pump() {
  Effects effects;
  {
    Lock lock(mutex_);
    if (pumping_) {
      pump_again_ = true;
      return;
    }
    pumping_ = true;
    do {
      pump_again_ = false;
      while (submit_next(lock)) {
      }
      // Pushes that no destination needed leave no transfer whose end would settle the request.
      for (const auto& out : std::vector<OutgoingPtr>(active_.begin(), active_.end()))
        settle(out, effects);
    } while (pump_again_);
    pumping_ = false;
  }
  run(std::move(effects));
}

// Takes and submits one piece of work; false when there is none, or the engine has no room. The
// lock is held on entry and exit and free in between.
bool SenderCore::submit_next(Lock& lock) {
  if (stopped_) return false;
  auto work = next_work();
  if (!work) return false;
  lock.unlock();
  auto result = submit(*work);
  const bool more = result.ok() || refuse(std::move(*work), std::move(result).error());
  lock.lock();
  return more;
}

// With the mutex held.
std::optional<SenderCore::Work> SenderCore::next_work() {
  if (!refused_.empty()) {
    Work work = std::move(refused_.front());
    refused_.pop_front();
    return work;
  }
  if (inflight_ >= options_.max_inflight) return std::nullopt;
  for (const OutgoingPtr& out : active_) {
    if (out->phase != SendPhase::kActive) continue;
    if (options_.mode == SendMode::kBatch && !out->finished) continue;
    for (const auto& [rank, to] : out->destinations)
      if (auto work = work_for(out, to)) return work;
  }
  return std::nullopt;
}

// With the mutex held: the next push of the request for this destination, or all in batch mode.
std::optional<SenderCore::Work> SenderCore::work_for(const OutgoingPtr& out,
                                                     const DestinationPtr& to) {
  const std::size_t most = options_.mode == SendMode::kBatch ? message::kMostParts : 1;
  Work work{out, to, 0, {}};
  while (to->complete && to->go && to->next_push < out->pushes.size() &&
         work.pushes.size() < most) {
    const Push push = clip(out->pushes[to->next_push++], *to);
    to->pages_taken += push.num_pages;
    if (push.num_pages > 0) work.pushes.push_back(push);
  }
  if (work.pushes.empty()) return std::nullopt;
  work.token = next_token_++;
  to->inflight.emplace(work.token, std::nullopt);
  ++inflight_;
  return work;
}

// Without the mutex: a complete destination and the table of a request do not change.
Result<> SenderCore::add_push(const Work& work, const Push& push, std::vector<CopyRun>& runs,
                              message::Parts& parts) const {
  const Destination& to = *work.to;
  const std::span<const PageId> source(work.out->pages);
  const std::span<const PageId> destination(to.pages);
  CROSSDOCK_CHECK_OK(append_copy_runs(
      pool_.layout(), to.layout,
      {push.layer, source.subspan(push.first_page, push.num_pages),
       destination.subspan(push.first_page - to.first_page, push.num_pages), to.heads},
      runs));
  add_part(parts.parts, push);
  return {};
}

Result<std::vector<transfer::Request>> SenderCore::build(const Work& work,
                                                         message::Parts& parts) const {
  std::vector<Push> pushes = work.pushes;
  std::sort(pushes.begin(), pushes.end(), [](const Push& a, const Push& b) {
    return std::tie(a.first_page, a.num_pages, a.layer) <
           std::tie(b.first_page, b.num_pages, b.layer);
  });
  std::vector<CopyRun> runs;
  for (const Push& push : pushes)
    CROSSDOCK_CHECK_OK(add_push(work, push, runs, parts));
  std::vector<transfer::Request> batch;
  batch.reserve(runs.size());
  for (const CopyRun& run : runs)
    batch.push_back({transfer::Op::kWrite, pool_.base() + run.source,
                     work.to->base + run.destination, run.length});
  return batch;
}

Result<> SenderCore::submit(const Work& work) {
  message::Parts parts;
  parts.request = work.out->request;
  parts.ticket = work.to->ticket;
  parts.sender_rank = pool_.layout().options().tp_rank;
  CROSSDOCK_TRY(batch, build(work, parts));
  transfer::TransferOptions options;
  options.deadline = work.to->expires;
  options.notification = {options_.receiver_mailbox, message::encode(parts)};
  options.user_data = work.out->request;
  // The closure keeps the request, and so the lease of its pages, until the transfer is terminal,
  // even when the sender is destroyed meanwhile.
  options.on_complete = [weak = weak_from_this(), out = work.out, to = work.to,
                         token = work.token](const transfer::Status& status) {
    if (const auto core = weak.lock()) core->on_transfer(out, to, token, status);
  };
  // By value: the transfer, and with it the request, may be over before submit() returns.
  const transfer::Peer peer = *work.to->peer;
  CROSSDOCK_TRY(transfer, engine_.submit(peer, batch, std::move(options)));
  bool cancel = false;
  {
    const Lock lock(mutex_);
    ++stats_.transfers;
    stats_.runs += batch.size();
    const auto running = work.to->inflight.find(work.token);
    if (running != work.to->inflight.end()) {
      running->second = transfer;
      cancel = work.out->phase != SendPhase::kActive;  // aborted while it was being submitted
    }
  }
  if (cancel) transfer.cancel();
  return {};
}

// What submit() did not take. False when the engine has no room: the work waits its turn. Any other
// error fails the request.
bool SenderCore::refuse(Work work, Error error) {
  Effects effects;
  {
    const Lock lock(mutex_);
    if (error.code == Code::kWouldBlock && work.out->phase == SendPhase::kActive) {
      refused_.push_front(std::move(work));
      clock_wake_.notify_one();
      return false;
    }
    inflight_ -= work.to->inflight.erase(work.token);
    error.message = fmt::format("request {}: writing to {} failed: {}", work.out->request,
                                work.to->peer_name, error.message);
    fail(work.out, std::move(error), effects);
    settle(work.out, effects);
  }
  run(std::move(effects));
  return true;
}

// On the thread that ended the transfer, perhaps inside submit().
void SenderCore::on_transfer(const OutgoingPtr& out, const DestinationPtr& to, std::uint64_t token,
                             const transfer::Status& status) {
  Effects effects;
  {
    const Lock lock(mutex_);
    inflight_ -= to->inflight.erase(token);
    if (status.state == transfer::State::kDelivered) {
      stats_.bytes_sent += status.bytes_total;
    } else {
      Error error = status.error.value_or(make_error(Code::kCancelled, "cancelled"));
      error.message = fmt::format("request {}: writing to {} failed: {}", out->request,
                                  to->peer_name, error.message);
      fail(out, std::move(error), effects);
    }
    settle(out, effects);
    if (stopped_) return;
  }
  run(std::move(effects));
  pump();
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
