// Requests of the sender: pushes, waits, aborts, the clock. How pushes become transfers is in
// sender_submit.cpp, what messages do in sender_messages.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "kv/sender_core.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "base/worker_thread.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

namespace {
constexpr std::size_t kHistory = 4'096;
// How soon a batch that the engine had no room for is offered again when no transfer of ours ends.
constexpr std::chrono::milliseconds kRetryAfter{1};
}  // namespace

SenderCore::SenderCore(transfer::Engine& engine, PagePool pool, SenderOptions options)
    : engine_(engine),
      pool_(std::move(pool)),
      options_(std::move(options)),
      links_(engine, options_.send_timeout) {}

Result<> SenderCore::start() {
  if (options_.max_inflight == 0)
    return invalid_argument("sender option max_inflight = 0 must be at least 1");
  CROSSDOCK_CHECK_OK(links_.start());
  CROSSDOCK_TRY(clock_thread, base::start_worker("xd-kv-clock", [this] { clock(); }));
  clock_ = std::move(clock_thread);
  CROSSDOCK_TRY(mailbox, engine_.mailbox(options_.mailbox));
  CROSSDOCK_TRY(subscription,
                mailbox.on_message([weak = weak_from_this()](const transfer::Message& message) {
                  if (const auto core = weak.lock()) core->on_message(message);
                }));
  subscription_ = std::move(subscription);
  return {};
}

void SenderCore::shutdown() {
  if (forked()) return;  // its threads are the parent's
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    for (const auto& out : std::vector<OutgoingPtr>(active_.begin(), active_.end()))
      fail(out, make_error(Code::kClosed, "the KV sender is gone"), effects);
  }
  for (transfer::Transfer& transfer : effects.cancel)
    transfer.cancel();
  changed_.notify_all();
  clock_wake_.notify_all();
  subscription_.end();
  links_.stop();
  if (clock_.joinable()) clock_.join();
}

void PushedPages::reset(std::uint32_t layers, std::uint32_t pages) {
  pages_ = pages;
  pushed_.assign(std::size_t{layers} * pages, false);
}

bool PushedPages::add(const Push& push, std::uint32_t& repeated) {
  const auto first = pushed_.begin() + static_cast<std::ptrdiff_t>(
                                           std::size_t{push.layer} * pages_ + push.first_page);
  const auto end = first + push.num_pages;
  const auto found = std::find(first, end, true);
  if (found != end) {
    repeated = push.first_page + static_cast<std::uint32_t>(found - first);
    return false;
  }
  std::fill(first, end, true);
  return true;
}

// With the mutex held. A request that failed stays what it is, so that late pushes and tickets
// learn of it; an id that was delivered may be used again.
SenderCore::OutgoingPtr SenderCore::find_or_make(RequestId request) {
  auto& out = requests_[request];
  if (out == nullptr || (out->phase == SendPhase::kDone && !out->error)) {
    const OutgoingPtr before = std::exchange(out, std::make_shared<Outgoing>());
    out->request = request;
    if (before != nullptr)
      for (const auto& [rank, to] : before->destinations)
        out->earlier.emplace(to->instance, to->ticket);
    active_.push_back(out);
  }
  return out;
}

// With the mutex held. A request that only a refused ticket named leaves nothing behind: nobody
// would ever end it. `before` is what had the id.
void SenderCore::undo_make(const OutgoingPtr& out, const OutgoingPtr& before) {
  active_.erase(std::remove(active_.begin(), active_.end(), out), active_.end());
  if (before != nullptr)
    requests_[out->request] = before;
  else
    requests_.erase(out->request);
}

Result<> SenderCore::push(RequestId request, std::uint32_t layer,
                          std::optional<std::pair<std::uint32_t, std::uint32_t>> range) {
  if (layer >= pool_.layout().shape().num_layers)
    return invalid_argument(fmt::format("push of request {}: layer {} of a model with {} layers",
                                        request, layer, pool_.layout().shape().num_layers));
  CROSSDOCK_TRY(lease, pool_.lease(request));
  const auto num_pages = static_cast<std::uint32_t>(lease.pages().size());
  const auto [first, count] = range.value_or(std::pair{0u, num_pages});
  if (count == 0 || first >= num_pages || count > num_pages - first)
    return invalid_argument(fmt::format("push of request {}: pages [{}, +{}) of its {}", request,
                                        first, count, num_pages));
  {
    const Lock lock(mutex_);
    if (stopped_) return make_error(Code::kClosed, "the KV sender is closed");
    const OutgoingPtr out = find_or_make(request);
    if (out->error) return *out->error;
    CROSSDOCK_CHECK_OK(take_table(*out, std::move(lease)));
    if (out->finished)
      return invalid_argument(fmt::format("push of request {} after its finish()", request));
    std::uint32_t repeated = 0;
    if (!out->pushed.add({layer, first, count}, repeated))
      return invalid_argument(
          fmt::format("push of request {}: page {} of layer {} was pushed before; it may be in use "
                      "at its destination already",
                      request, repeated, layer));
    out->pushes.push_back({layer, first, count});
  }
  pump();
  return {};
}

// With the mutex held: the first push sets the request's table, later ones must be of the same.
Result<> SenderCore::take_table(Outgoing& out, PageLease lease) {
  if (out.has_table) {
    if (std::ranges::equal(out.pages, lease.pages())) return {};
    return invalid_argument(
        fmt::format("push of request {}: it was admitted again while its earlier use goes on; "
                    "wait for the end of that, or abort it, before using the id again",
                    out.request));
  }
  out.pages.assign(lease.pages().begin(), lease.pages().end());
  out.pushed.reset(pool_.layout().shape().num_layers, static_cast<std::uint32_t>(out.pages.size()));
  out.lease = std::move(lease);
  out.has_table = true;
  out.tickets_due = Deadline::in(options_.ticket_timeout);
  clock_wake_.notify_one();
  return {};
}

Result<> SenderCore::finish(RequestId request) {
  Effects effects;
  {
    const Lock lock(mutex_);
    const auto found = requests_.find(request);
    if (found == requests_.end() || (!found->second->has_table && !found->second->error))
      return make_error(Code::kNotFound, fmt::format("request {} was never pushed", request));
    if (found->second->error) return *found->second->error;
    found->second->finished = true;
    settle(found->second, effects);
  }
  run(std::move(effects));
  pump();
  return {};
}

Result<> SenderCore::wait(RequestId request, Deadline deadline) {
  Lock lock(mutex_);
  const auto found = requests_.find(request);
  if (found == requests_.end())
    return make_error(Code::kNotFound, fmt::format("request {} is not known here", request));
  const OutgoingPtr out = found->second;
  while (out->phase != SendPhase::kDone && !stopped_) {
    if (deadline.passed())
      return make_error(Code::kDeadline,
                        fmt::format("request {} goes on: {} receivers asked for it, {} pushes",
                                    request, out->destinations.size(), out->pushes.size()));
    changed_.wait_until(lock, deadline.when());
  }
  if (out->error) return *out->error;
  return {};
}

void SenderCore::abort(RequestId request, std::string reason) {
  Effects effects;
  {
    const Lock lock(mutex_);
    const auto found = requests_.find(request);
    if (found != requests_.end() && found->second->phase == SendPhase::kDone) return;
    fail(find_or_make(request),
         make_error(Code::kCancelled, fmt::format("request {} was aborted: {}", request, reason)),
         effects);
  }
  run(std::move(effects));
}

Result<> SenderCore::usable() const {
  if (!forked()) return {};
  return make_error(Code::kUnsupported,
                    "this KV sender was created before fork(); its threads are in the parent. "
                    "Create an engine, a pool and a sender in the child");
}

SenderStats SenderCore::stats() const {
  const Lock lock(mutex_);
  SenderStats stats = stats_;
  stats.active_requests = static_cast<std::uint32_t>(active_.size());
  return stats;
}

Result<> SenderCore::close(Deadline deadline) {
  Effects effects;
  {
    const Lock lock(mutex_);
    for (const auto& out : std::vector<OutgoingPtr>(active_.begin(), active_.end()))
      fail(out, make_error(Code::kCancelled, "the KV sender closes"), effects);
  }
  run(std::move(effects));
  Lock lock(mutex_);
  while ((!active_.empty() || messages_ > 0) && !stopped_) {
    if (deadline.passed())
      return make_error(Code::kDeadline,
                        fmt::format("{} requests are not quiesced, {} messages are on their way",
                                    active_.size(), messages_));
    changed_.wait_until(lock, deadline.when());
  }
  lock.unlock();
  shutdown();
  return {};
}

// With the mutex held. The first error wins. Nothing new is submitted for the request; what is in
// flight is cancelled, and settle() goes on when it has ended.
void SenderCore::fail(const OutgoingPtr& out, Error error, Effects& effects) {
  if (out->phase != SendPhase::kActive) return;
  out->phase = SendPhase::kStopping;
  out->error = std::move(error);
  drop_refused(out);
  for (const auto& [rank, to] : out->destinations)
    for (const auto& [token, transfer] : to->inflight)
      if (transfer) effects.cancel.push_back(*transfer);
  settle(out, effects);
}

void SenderCore::drop_refused(const OutgoingPtr& out) {
  for (auto it = refused_.begin(); it != refused_.end();) {
    if (it->out != out) {
      ++it;
      continue;
    }
    inflight_ -= it->to->inflight.erase(it->token);
    it = refused_.erase(it);
  }
}

// With the mutex held: retires the request when nothing is left to do for it.
void SenderCore::settle(const OutgoingPtr& out, Effects& effects) {
  if (out->phase == SendPhase::kDone) return;
  if (out->phase == SendPhase::kActive) {
    const bool all_sent =
        std::all_of(out->destinations.begin(), out->destinations.end(), [&](const auto& entry) {
          const Destination& to = *entry.second;
          return to.complete && to.next_push == out->pushes.size() && to.inflight.empty();
        });
    // Also when every receiver is gone with all it wanted: more may be pushed until finish().
    if (out->finished && all_asked(*out) && all_sent) retire(out, effects);
    return;
  }
  bool quiet = true;
  for (const auto& [rank, to] : out->destinations) {
    quiet = quiet && to->inflight.empty();
    if (!to->inflight.empty() || to->told) continue;
    to->told = true;
    post_stopped(to->peer_name, out->request, to->ticket, *out->error);
  }
  if (quiet) retire(out, effects);
}

// With the mutex held: no transfer reads the request's pages any more.
void SenderCore::retire(const OutgoingPtr& out, Effects& effects) {
  out->phase = SendPhase::kDone;
  out->lease.reset();
  out->pushes.clear();
  out->pushed = {};
  // The outcome is kept for long; what it took is not. (`= {}` would keep the vectors' memory.)
  out->pages = std::vector<PageId>();
  for (const auto& [rank, to] : out->destinations) {
    to->pages = std::vector<PageId>();
    if (to->peer) effects.let_go.push_back(std::move(*to->peer));
    to->peer.reset();
  }
  effects.done.emplace_back(out->request, out->error ? Result<>(*out->error) : Result<>());
  active_.erase(std::remove(active_.begin(), active_.end(), out), active_.end());
  history_.push_back(out);
  if (history_.size() > kHistory) {
    const auto found = requests_.find(history_.front()->request);
    if (found != requests_.end() && found->second == history_.front()) requests_.erase(found);
    history_.pop_front();
  }
  changed_.notify_all();
}

// With the mutex held.
void SenderCore::post_stopped(const std::string& peer_name, RequestId request, std::uint64_t ticket,
                              const Error& why) {
  message::Stopped stopped;
  stopped.request = request;
  stopped.ticket = ticket;
  stopped.sender_rank = pool_.layout().options().tp_rank;
  stopped.code = why.code;
  stopped.reason = why.message;
  ++messages_;
  // A receiver that cannot be told has died, and needs no telling, or will fence this engine.
  links_.post(peer_name, [this, payload = message::encode(stopped)](Link& link) {
    const auto sent = link.send(options_.receiver_mailbox, payload);
    const Lock lock(mutex_);
    static_cast<void>(sent);
    --messages_;
    changed_.notify_all();
  });
}

// Every receiver's ticket is here, and whole, and every receiver said Go.
bool SenderCore::all_asked(const Outgoing& out) {
  return out.num_destinations && out.destinations.size() == *out.num_destinations &&
         std::all_of(out.destinations.begin(), out.destinations.end(),
                     [](const auto& entry) { return entry.second->complete && entry.second->go; });
}

// All that the receiver asked for has arrived or is in a transfer; a page is pushed once.
bool SenderCore::all_taken(const Destination& to) const {
  const std::uint64_t layers = pool_.layout().shape().num_layers;
  return to.complete && to.go && to.pages_taken == layers * to.pages.size();
}

std::optional<Deadline> SenderCore::due_time(const Outgoing& out) const {
  if (out.phase != SendPhase::kActive) return std::nullopt;
  std::optional<Deadline> due;
  const auto consider = [&due](Deadline deadline) {
    due = due ? earlier(*due, deadline) : deadline;
  };
  if (out.tickets_due && !all_asked(out)) consider(*out.tickets_due);
  for (const auto& [rank, to] : out.destinations)
    consider(to->expires);
  return due;
}

void SenderCore::clock() {
  for (;;) {
    Effects effects;
    bool retry = false;
    {
      Lock lock(mutex_);
      auto next = Deadline::in(refused_.empty() ? std::chrono::hours(1) : kRetryAfter);
      for (const auto& out : active_)
        if (const auto due = due_time(*out)) next = earlier(next, *due);
      if (!stopped_) clock_wake_.wait_until(lock, next.when());
      if (stopped_) return;
      tick(Deadline::now(), effects);
      retry = !refused_.empty();
    }
    run(std::move(effects));
    if (retry) pump();
  }
}

// With the mutex held.
void SenderCore::tick(Deadline now, Effects& effects) {
  for (const auto& out : std::vector<OutgoingPtr>(active_.begin(), active_.end())) {
    const auto due = due_time(*out);
    if (!due || *due > now) continue;
    const bool untold = out->tickets_due && *due == *out->tickets_due;
    fail(
        out,
        make_error(
            Code::kDeadline,
            untold ? fmt::format("request {}: {} receivers asked for it within {} ms, "
                                 "{} needed",
                                 out->request, out->destinations.size(),
                                 options_.ticket_timeout.count(), out->num_destinations.value_or(1))
                   : fmt::format("request {} expired with {} pushes, {}finished", out->request,
                                 out->pushes.size(), out->finished ? "" : "not ")),
        effects);
  }
}

void SenderCore::run(Effects effects) {
  for (transfer::Transfer& transfer : effects.cancel)
    transfer.cancel();
  for (const RequestId request : effects.asked)
    if (options_.on_asked) options_.on_asked(request);
  for (const auto& [request, result] : effects.done)
    if (options_.on_done) options_.on_done(request, result);
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
