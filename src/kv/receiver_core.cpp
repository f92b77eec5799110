// Expectations, waits and the clock of the receiver; what messages do is in receiver_messages.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "kv/receiver_core.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>

#include "base/clock.hpp"
#include "base/worker_thread.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

using Kind = transfer::Message::Kind;

ReceiverCore::ReceiverCore(transfer::Engine& engine, PagePool pool, ReceiverOptions options)
    : engine_(engine),
      pool_(std::move(pool)),
      options_(std::move(options)),
      // Tickets of an earlier life of this process must not look like ours.
      life_(base::now_ns() ^ (engine.instance() << 1)),
      next_ticket_(life_ >> 1),  // ascending without an end in sight
      links_(engine, options_.send_timeout) {}

namespace {

// Senders dial the receiver back; one they cannot reach would wait for its deadline.
Result<> check_address(const std::string& address) {
  for (const std::string_view everywhere : {"0.0.0.0:", "[::]:"})
    if (address.starts_with(everywhere))
      return invalid_argument(
          fmt::format("the engine of a KV receiver needs an address that senders can dial; {} is "
                      "none. Set EngineOptions::advertise",
                      address));
  return {};
}

}  // namespace

Result<> ReceiverCore::start(const std::shared_ptr<ReceiverCore>& self) {
  CROSSDOCK_CHECK_OK(check_address(engine_.address()));
  CROSSDOCK_TRY(keeper, Keeper::create(engine_, pool_));
  keeper_ = std::move(keeper);
  CROSSDOCK_CHECK_OK(links_.start());
  CROSSDOCK_TRY(clock_thread, base::start_worker("xd-kv-clock", [this] { clock(); }));
  clock_ = std::move(clock_thread);
  const auto weak = std::weak_ptr(self);
  CROSSDOCK_TRY(peers, engine_.watch_peers([weak](const transfer::Message& message) {
    if (const auto core = weak.lock(); core && message.kind == Kind::kLinkLost)
      core->on_link_lost(message);
  }));
  peers_ = std::move(peers);
  CROSSDOCK_TRY(mailbox, engine_.mailbox(options_.mailbox));
  CROSSDOCK_TRY(messages, mailbox.on_message([weak](const transfer::Message& message) {
    if (const auto core = weak.lock()) core->on_message(message);
  }));
  messages_ = std::move(messages);
  return {};
}

void ReceiverCore::shutdown() {
  if (forked()) return;  // its threads are the parent's
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
  }
  changed_.notify_all();
  clock_wake_.notify_all();
  messages_.end();
  peers_.end();
  links_.stop();
  if (clock_.joinable()) clock_.join();
  if (keeper_) keeper_->abandon(engine_);
}

Result<> ReceiverCore::expect(const Expectation& expectation) {
  CROSSDOCK_TRY(in, make_incoming(expectation));
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return make_error(Code::kClosed, "the KV receiver is closed");
    const auto found = requests_.find(in->request);
    if (found != requests_.end() && found->second->phase != Phase::kDone)
      return invalid_argument(
          fmt::format("request {} is expected already; wait for its end before using the id again",
                      in->request));
    in->ticket = next_ticket_++;
    in->kept = keeper_->keep(std::move(in->lease));
    requests_[in->request] = in;
    untold_ += in->sources.size();  // their tickets
    if (in->layers_left == 0) finish(in, effects);
  }
  clock_wake_.notify_one();
  send_tickets(in);
  run(effects);
  return {};
}

Result<ReceiverCore::IncomingPtr> ReceiverCore::make_incoming(const Expectation& expectation) {
  CROSSDOCK_TRY(lease, pool_.lease(expectation.request));
  const auto pages = lease.pages();
  if (expectation.first_page > pages.size())
    return invalid_argument(fmt::format("request {}: first_page = {} is past its {} pages",
                                        expectation.request, expectation.first_page, pages.size()));
  auto in = std::make_shared<Incoming>();
  in->request = expectation.request;
  in->first_page = expectation.first_page;
  in->sender_tp = static_cast<std::uint32_t>(expectation.senders.size());
  in->expires = in->next_step = expectation.deadline;
  in->pages.assign(pages.begin() + expectation.first_page, pages.end());
  CROSSDOCK_CHECK_OK(add_sources(expectation, *in));
  in->lease = std::move(lease);
  return in;
}

// The senders that the shard plan names, each with everything still missing.
Result<> ReceiverCore::add_sources(const Expectation& expectation, Incoming& in) {
  const PageLayout& layout = pool_.layout();
  const auto& names = expectation.senders;
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size())
    return invalid_argument(
        fmt::format("request {}: the same sender is listed twice", expectation.request));
  CROSSDOCK_TRY(plan, plan_shards(layout.shape(), static_cast<std::uint32_t>(names.size()),
                                  layout.options().tp_size, layout.options().tp_rank));
  const std::uint32_t layers = layout.shape().num_layers;
  const auto pages = static_cast<std::uint32_t>(in.pages.size());
  for (const ShardPart& part : plan) {
    Source source;
    source.name = names[part.source_rank];
    source.rank = part.source_rank;
    source.heads = part.heads;
    source.arrived.assign(std::size_t{layers} * pages, false);
    source.missing.assign(layers, pages);
    in.sources.push_back(std::move(source));
  }
  in.missing.assign(layers, pages * static_cast<std::uint32_t>(in.sources.size()));
  if (layout.options().tp_rank == 0) CROSSDOCK_CHECK_OK(add_idle_sources(names, in));
  in.layers_left = pages == 0 ? 0 : layers;
  return {};
}

// Senders whose heads others send, since more ranks hold them than are needed. Rank 0 tells them
// so, with a ticket for no pages; they would wait for one.
Result<> ReceiverCore::add_idle_sources(const std::vector<std::string>& names, Incoming& in) {
  const PageLayout& layout = pool_.layout();
  for (std::uint32_t rank = 0; rank < names.size(); ++rank) {
    CROSSDOCK_TRY(ranks,
                  destinations_of(layout.shape(), in.sender_tp, rank, layout.options().tp_size));
    if (!ranks.empty()) continue;
    Source source;
    source.name = names[rank];
    source.rank = rank;
    source.missing.assign(in.missing.size(), 0);
    in.sources.push_back(std::move(source));
  }
  return {};
}

void ReceiverCore::send_tickets(const IncomingPtr& in) {
  for (std::size_t i = 0; i < in->sources.size(); ++i)
    links_.post(in->sources[i].name,
                counted([this, in, i](Link& link) { send_ticket(link, in, i); }));
}

// A job that close() waits for; who posts it has added it to untold_.
Link::Job ReceiverCore::counted(Link::Job job) {
  return [this, job = std::move(job)](Link& link) {
    job(link);
    const Lock lock(mutex_);
    --untold_;
    changed_.notify_all();
  };
}

message::Ticket ReceiverCore::ticket_for(const Incoming& in, std::size_t source) const {
  message::Ticket ticket;
  ticket.request = in.request;
  ticket.ticket = in.ticket;
  ticket.life = life_;
  ticket.shape = pool_.layout().shape();
  ticket.layout = pool_.layout().options();
  ticket.base = reinterpret_cast<std::uint64_t>(pool_.base());
  ticket.sender_tp = in.sender_tp;
  ticket.sender_rank = in.sources[source].rank;
  ticket.expires_ms = static_cast<std::uint32_t>(in.expires.remaining_ms());
  ticket.address = engine_.address();
  ticket.first_page = in.first_page;
  if (in.sources[source].heads.count == 0) return ticket;  // nothing is needed of it
  ticket.total_pages = static_cast<std::uint32_t>(in.pages.size());
  ticket.pages = in.pages;
  return ticket;
}

// On the link's thread.
void ReceiverCore::send_ticket(Link& link, const IncomingPtr& in, std::size_t index) {
  const auto peer = link.peer();
  Effects effects;
  message::Ticket ticket;
  {
    const Lock lock(mutex_);
    Source& source = in->sources[index];
    if (in->phase == Phase::kStopping || in->phase == Phase::kQuarantined || source.quiesced ||
        stopped_)
      return;
    if (!peer.ok()) {
      source.unreachable = true;
      Error error = peer.error();
      error.message = fmt::format("request {}: sender {} (rank {}) cannot be reached: {}",
                                  in->request, source.name, source.rank, error.message);
      fail(in, std::move(error), effects);
    } else {
      source.told = true;
      source.instance = peer->instance();
      if (open_.contains(source.instance)) begin(*in, source);
      ticket = ticket_for(*in, index);
    }
  }
  Result<> sent;
  if (peer.ok())
    for (const auto& chunk : message::chunks_of(ticket))
      if (sent.ok()) sent = link.send(options_.sender_mailbox, message::encode(chunk));
  if (!sent.ok()) {
    const Lock lock(mutex_);
    Error error = sent.error();
    error.message = fmt::format("request {}: asking sender {} for it failed: {}", in->request,
                                link.peer_name(), error.message);
    fail(in, std::move(error), effects);
  }
  run(effects);
}

Result<> ReceiverCore::wait(RequestId request, std::optional<std::uint32_t> layer,
                            Deadline deadline) {
  Lock lock(mutex_);
  const auto found = requests_.find(request);
  if (found == requests_.end())
    return make_error(Code::kNotFound, fmt::format("request {} is not expected here", request));
  const IncomingPtr in = found->second;
  if (layer && *layer >= pool_.layout().shape().num_layers)
    return invalid_argument(fmt::format("request {}: layer {} of a model with {} layers", request,
                                        *layer, pool_.layout().shape().num_layers));
  const auto over = [&] {
    return in->phase == Phase::kDone || in->phase == Phase::kQuarantined || stopped_;
  };
  const auto layer_here = [&] { return layer && !in->error && in->missing[*layer] == 0; };
  while (!over() && !layer_here()) {
    if (deadline.passed())
      return make_error(Code::kDeadline,
                        fmt::format("request {} goes on: {}", request, progress_of(*in)));
    changed_.wait_until(lock, deadline.when());
  }
  if (in->error) return *in->error;
  if (in->phase != Phase::kDone && !layer_here())
    return make_error(Code::kClosed, "the KV receiver was closed");
  return {};
}

void ReceiverCore::abort(RequestId request, std::string reason) {
  Effects effects;
  {
    const Lock lock(mutex_);
    const auto found = requests_.find(request);
    if (found == requests_.end()) return;
    fail(found->second,
         make_error(Code::kCancelled, fmt::format("request {} was aborted: {}", request, reason)),
         effects);
  }
  run(effects);
}

Result<> ReceiverCore::usable() const {
  if (!forked()) return {};
  return make_error(Code::kUnsupported,
                    "this KV receiver was created before fork(); its threads are in the parent. "
                    "Create an engine, a pool and a receiver in the child");
}

ReceiverStats ReceiverCore::stats() const {
  const Lock lock(mutex_);
  ReceiverStats stats;
  stats.bytes_received = bytes_received_;
  stats.ignored_messages = ignored_;
  for (const auto& [id, in] : requests_) {
    stats.active_requests += in->phase == Phase::kReceiving;
    stats.stopping_requests += in->phase == Phase::kStopping || in->phase == Phase::kQuarantined;
  }
  return stats;
}

Result<> ReceiverCore::close(Deadline deadline) {
  Effects effects;
  {
    const Lock lock(mutex_);
    std::vector<IncomingPtr> all;  // fail() may drop entries of the map
    all.reserve(requests_.size());
    for (const auto& [id, in] : requests_)
      all.push_back(in);
    for (const auto& in : all)
      fail(in, make_error(Code::kCancelled, "the KV receiver closes"), effects);
  }
  run(effects);
  Lock lock(mutex_);
  const auto busy = [&] {
    return std::count_if(requests_.begin(), requests_.end(),
                         [](const auto& entry) { return entry.second->phase != Phase::kDone; });
  };
  // Senders that are not told in time learn of it by the loss of this engine, or by a timeout.
  while ((busy() > 0 || untold_ > 0) && !stopped_ && !deadline.passed())
    changed_.wait_until(lock, deadline.when());
  if (busy() > 0 && !stopped_)
    return make_error(
        Code::kDeadline,
        fmt::format("{} requests are not quiesced; their pages stay in quarantine", busy()));
  lock.unlock();
  shutdown();
  return {};
}

// "layer 13 of 48 has 12 of 512 pages from 10.0.0.1:7000 (rank 0)": the first thing that is
// missing.
std::string ReceiverCore::progress_of(const Incoming& in) const {
  for (std::size_t layer = 0; layer < in.missing.size(); ++layer)
    for (const Source& source : in.sources)
      if (layer < source.missing.size() && source.missing[layer] > 0)
        return fmt::format("layer {} of {} has {} of {} pages from {} (rank {})", layer,
                           in.missing.size(), in.pages.size() - source.missing[layer],
                           in.pages.size(), source.name, source.rank);
  return "all layers are here";
}

void ReceiverCore::clock() {
  for (;;) {
    Effects effects;
    {
      Lock lock(mutex_);
      auto next = Deadline::in(std::chrono::hours(1));
      for (const auto& [id, in] : requests_)
        if (in->phase != Phase::kDone) next = earlier(next, in->next_step);
      if (!stopped_) clock_wake_.wait_until(lock, next.when());
      if (stopped_) return;
      tick(Deadline::now(), effects);
    }
    run(effects);
  }
}

// With the mutex held: the requests whose time has come expire, or their silent senders are fenced.
void ReceiverCore::tick(Deadline now, Effects& effects) {
  std::vector<IncomingPtr> due;
  for (const auto& [id, in] : requests_)
    if (in->phase != Phase::kDone && in->next_step <= now) due.push_back(in);
  for (const IncomingPtr& in : due) {
    if (in->phase == Phase::kReceiving) {
      fail(in,
           make_error(Code::kDeadline,
                      fmt::format("request {} expired: {}", in->request, progress_of(*in))),
           effects);
      continue;
    }
    in->next_step = Deadline::in(5 * options_.fence_timeout + options_.stop_timeout);
    for (std::size_t i = 0; i < in->sources.size(); ++i)
      if (!in->sources[i].quiesced)
        links_.post(in->sources[i].name, [this, in, i](Link& link) { try_fence(link, in, i); });
  }
}

void ReceiverCore::run(const Effects& effects) {
  for (const auto& [request, layer] : effects.layers)
    if (options_.on_layer) options_.on_layer(request, layer);
  for (const auto& [request, result] : effects.done)
    if (options_.on_done) options_.on_done(request, result);
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
