// Tickets, aborts and the death of receivers, as the sender sees them. A ticket is answered with
// Stopped when it cannot be served, so that its receiver fails at once instead of waiting.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "kv/sender_core.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

namespace {
// Both ends watch the deadline of a request. The receiver should end it: only it knows which pages
// of which layer are missing. Its Abort stops the sender at once.
constexpr std::chrono::milliseconds kReceiverFirst{1'000};
}  // namespace

// On the engine's control thread.
void SenderCore::on_message(const transfer::Message& message) {
  if (message.kind == transfer::Message::Kind::kPeerLost) {
    on_peer_lost(message);
    return;
  }
  auto decoded = message::decode(message.payload);
  if (!decoded.ok()) return;  // not a KV message, or of another version: nobody we could answer
  if (auto* ticket = std::get_if<message::Ticket>(&*decoded))
    on_ticket(message, std::move(*ticket));
  else if (const auto* abort = std::get_if<message::Abort>(&*decoded))
    on_abort(message, *abort);
  else if (const auto* go = std::get_if<message::Go>(&*decoded))
    on_go(message, *go);
}

// Opening the receiver may wait on it, so the rest happens on the thread of its link.
void SenderCore::on_ticket(const transfer::Message& from, message::Ticket ticket) {
  links_.post(from.peer, [this, instance = from.peer_instance, ticket = std::move(ticket)](
                             Link& link) { accept_ticket(link, instance, ticket); });
}

void SenderCore::accept_ticket(Link& link, std::uint64_t instance, const message::Ticket& ticket) {
  const auto peer = link.peer(instance, ticket.address);
  Effects effects;
  bool ask = false;
  // One that wants no pages need not be reached: others may have given it everything already.
  if (!peer.ok() && ticket.total_pages > 0) {
    lose_ticket(link.peer_name(), ticket, peer.error().message, effects);
  } else {
    const Lock lock(mutex_);
    if (stopped_) return;
    const auto added = add_ticket(link, instance, peer, ticket, effects);
    if (!added.ok()) post_stopped(link.peer_name(), ticket.request, ticket.ticket, added.error());
    ask = added.ok() && *added;
  }
  if (ask) ask_for_go(link, ticket);
  run(std::move(effects));
  pump();
}

// The question goes over the connection that the transfers would take; so it tells the receiver
// whose end to watch. Without an answer the request expires as any other.
void SenderCore::ask_for_go(Link& link, const message::Ticket& ticket) {
  const message::Ready ready{ticket.request, ticket.ticket, ticket.sender_rank};
  const auto sent = link.send(options_.receiver_mailbox, message::encode(ready));
  if (sent.ok()) return;
  Effects effects;
  lose_ticket(link.peer_name(), ticket, sent.error().message, effects);
  run(std::move(effects));
}

// On the engine's control thread.
void SenderCore::on_go(const transfer::Message& from, const message::Go& go) {
  Effects effects;
  {
    const Lock lock(mutex_);
    const auto found = requests_.find(go.request);
    if (stopped_ || found == requests_.end()) return;
    const OutgoingPtr out = found->second;
    for (const auto& [rank, to] : out->destinations) {
      if (to->ticket != go.ticket || to->instance != from.peer_instance || to->go) continue;
      to->go = true;
      standing_.insert_or_assign(to->peer_name,
                                 Standing{to->instance, to->epoch, go.life, go.later});
      if (all_asked(*out)) effects.asked.push_back(out->request);
    }
    settle(out, effects);
  }
  run(std::move(effects));
  pump();
}

// Who sent this ticket died, or cannot be reached, before it became a destination; so its loss,
// which may have been reported already, stopped nothing. The request ends now instead of waiting
// for tickets until they are overdue.
void SenderCore::lose_ticket(const std::string& receiver, const message::Ticket& ticket,
                             const std::string& why, Effects& effects) {
  const Lock lock(mutex_);
  if (stopped_) return;
  const OutgoingPtr out = find_or_make(ticket.request);
  const auto served = out->destinations.find(ticket.layout.tp_rank);
  if (served != out->destinations.end() && served->second->ticket != ticket.ticket)
    return;  // a late ticket; another life of the receiver has asked since
  Error error =
      make_error(Code::kPeerLost,
                 fmt::format("request {}: receiver {} (rank {}) asked for it and was lost: {}",
                             ticket.request, receiver, ticket.layout.tp_rank, why));
  error.scope = Scope::kPeer;
  error.retry = Retry::kAfterReconnect;
  fail(out, std::move(error), effects);
}

// With the mutex held. True when the receiver must be asked for Go.
Result<bool> SenderCore::add_ticket(const Link& link, std::uint64_t instance,
                                    const Result<transfer::Peer>& peer,
                                    const message::Ticket& ticket, Effects& effects) {
  const auto known = requests_.find(ticket.request);
  const OutgoingPtr before = known == requests_.end() ? nullptr : known->second;
  const OutgoingPtr out = find_or_make(ticket.request);
  if (out->error) return *out->error;
  auto added = add_chunk(*out, ticket);
  if (!added.ok()) {
    if (out != before) undo_make(out, before);
    return std::move(added).error();
  }
  const DestinationPtr& to = *added;
  if (!to->peer) {
    if (peer.ok()) to->peer = *peer;
    to->peer_name = link.peer_name();
    to->instance = instance;
    to->epoch = link.epoch();
  }
  to->complete = to->pages.size() == to->total_pages;
  const auto standing = standing_.find(to->peer_name);
  // Where nothing is written there is nothing to ask for.
  to->go = to->heads.count == 0 || to->total_pages == 0 ||
           (standing != standing_.end() && standing->second.epoch == to->epoch &&
            standing->second.life == ticket.life && standing->second.later <= ticket.ticket);
  if (all_asked(*out)) effects.asked.push_back(out->request);
  clock_wake_.notify_one();
  settle(out, effects);
  return to->complete && !to->go;
}

// The destination, longer by the ticket's pages.
Result<SenderCore::DestinationPtr> SenderCore::add_chunk(Outgoing& out,
                                                         const message::Ticket& ticket) {
  const auto found = out.destinations.find(ticket.layout.tp_rank);
  const bool known = found != out.destinations.end();
  if (known && (found->second->ticket != ticket.ticket || found->second->complete))
    return make_error(Code::kBusy,
                      fmt::format("receiver rank {} of request {} is served already, "
                                  "for {}",
                                  ticket.layout.tp_rank, ticket.request, found->second->peer_name));
  const std::size_t here = known ? found->second->pages.size() : 0;
  if (ticket.chunk_first != here)
    return invalid_argument(fmt::format("ticket of request {}: pages [{}, ..) after {} pages",
                                        ticket.request, ticket.chunk_first, here));
  DestinationPtr to = known ? found->second : nullptr;
  if (!known) {
    CROSSDOCK_TRY(made, new_destination(out, ticket));
    to = std::move(made);
  }
  to->pages.insert(to->pages.end(), ticket.pages.begin(), ticket.pages.end());
  return to;
}

Result<SenderCore::DestinationPtr> SenderCore::new_destination(Outgoing& out,
                                                               const message::Ticket& ticket) {
  const PageLayout& own = pool_.layout();
  const LayoutOptions& mine = own.options();
  CROSSDOCK_TRY(layout, PageLayout::create(ticket.shape, ticket.layout));
  CROSSDOCK_CHECK_OK(check_compatible(own, layout));
  if (ticket.sender_tp != mine.tp_size || ticket.sender_rank != mine.tp_rank)
    return make_error(Code::kIncompatible,
                      fmt::format("request {} was asked of sender rank {} of {}; this is rank {} "
                                  "of {}",
                                  ticket.request, ticket.sender_rank, ticket.sender_tp,
                                  mine.tp_rank, mine.tp_size));
  CROSSDOCK_TRY(
      plan, plan_shards(ticket.shape, mine.tp_size, ticket.layout.tp_size, ticket.layout.tp_rank));
  const auto part = std::find_if(plan.begin(), plan.end(),
                                 [&](const ShardPart& p) { return p.source_rank == mine.tp_rank; });
  CROSSDOCK_TRY(ranks,
                destinations_of(ticket.shape, mine.tp_size, mine.tp_rank, ticket.layout.tp_size));
  // When other ranks send these heads, receiver rank 0 says so with a ticket for no pages.
  const bool idle = ranks.empty() && ticket.layout.tp_rank == 0 && ticket.total_pages == 0;
  if (idle) ranks.push_back(0);
  if (part == plan.end() && !idle)
    return invalid_argument(fmt::format(
        "request {}: receiver rank {} of {} needs nothing of "
        "sender rank {} of {}",
        ticket.request, ticket.layout.tp_rank, ticket.layout.tp_size, mine.tp_rank, mine.tp_size));
  if (out.num_destinations && *out.num_destinations != ranks.size())
    return invalid_argument(
        fmt::format("request {}: its receivers disagree on their tensor "
                    "parallel size",
                    ticket.request));
  out.num_destinations = ranks.size();
  auto to = std::make_shared<Destination>(layout);
  to->ticket = ticket.ticket;
  if (!idle) to->heads = part->heads;
  to->base = ticket.base;
  to->first_page = ticket.first_page;
  to->total_pages = ticket.total_pages;
  to->expires = Deadline::in(std::chrono::milliseconds(ticket.expires_ms) + kReceiverFirst);
  out.destinations.emplace(ticket.layout.tp_rank, to);
  return to;
}

namespace {

// False when the ticket is of an earlier use of the id, or of none: its receiver asked for this use
// by another one. An Abort may come before its ticket was looked at.
bool may_name(const Outgoing& out, std::uint64_t instance, std::uint64_t ticket) {
  return !out.earlier.contains({instance, ticket}) &&
         std::none_of(out.destinations.begin(), out.destinations.end(), [&](const auto& entry) {
           return entry.second->instance == instance && entry.second->ticket != ticket;
         });
}

}  // namespace

// On the engine's control thread: stops the whole request, since a receiver without its shard makes
// the others useless. The answer follows when nothing is in flight.
void SenderCore::on_abort(const transfer::Message& from, const message::Abort& abort) {
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    const auto found = requests_.find(abort.request);
    const bool delivered = found != requests_.end() && found->second->phase == SendPhase::kDone &&
                           !found->second->error;
    const OutgoingPtr out = delivered ? found->second : find_or_make(abort.request);
    const Error why = make_error(
        Code::kCancelled, fmt::format("receiver {} gave it up: {}", from.peer, abort.reason));
    if (may_name(*out, from.peer_instance, abort.ticket)) fail(out, why, effects);
    const bool pending =
        std::any_of(out->destinations.begin(), out->destinations.end(), [&](const auto& entry) {
          return entry.second->instance == from.peer_instance &&
                 entry.second->ticket == abort.ticket && !entry.second->inflight.empty();
        });
    if (!pending) post_stopped(from.peer, abort.request, abort.ticket, why);
  }
  run(std::move(effects));
}

void SenderCore::on_peer_lost(const transfer::Message& from) {
  Effects effects;
  {
    const Lock lock(mutex_);
    std::erase_if(standing_,
                  [&](const auto& entry) { return entry.second.instance == from.peer_instance; });
    for (const auto& out : std::vector<OutgoingPtr>(active_.begin(), active_.end())) {
      for (const auto& [rank, to] : out->destinations) {
        if (to->instance != from.peer_instance) continue;
        to->told = true;
        // It may have closed because it has everything; the transfers know, for they end here.
        if (all_taken(*to)) continue;
        Error error = make_error(Code::kPeerLost, fmt::format("request {}: receiver {} (rank {}) "
                                                              "was lost",
                                                              out->request, to->peer_name, rank));
        error.scope = Scope::kPeer;
        error.retry = Retry::kAfterReconnect;
        fail(out, std::move(error), effects);
      }
    }
  }
  run(std::move(effects));
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
