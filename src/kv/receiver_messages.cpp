// What messages and the death of senders do to expected requests, and how a request is stopped:
// Abort to every sender that has a ticket, then a fence for those that do not answer.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "kv/receiver_core.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

namespace {
constexpr std::size_t kHistory = 4'096;
}

// On the engine's control thread.
void ReceiverCore::on_message(const transfer::Message& message) {
  if (message.kind == transfer::Message::Kind::kPeerLost) {
    on_peer_lost(message);
    return;
  }
  const auto decoded = message::decode(message.payload);
  if (decoded.ok()) {
    if (const auto* parts = std::get_if<message::Parts>(&*decoded)) {
      on_parts(message, *parts);
      return;
    }
    if (const auto* ready = std::get_if<message::Ready>(&*decoded)) {
      on_ready(message, *ready);
      return;
    }
    if (const auto* stopped = std::get_if<message::Stopped>(&*decoded)) {
      on_stopped(message, *stopped);
      return;
    }
  }
  const Lock lock(mutex_);
  ++ignored_;
}

// With the mutex held. Null, and counted, when the message speaks of nothing that is known: another
// ticket, another sender, or an earlier life of the sender.
Source* ReceiverCore::find_source(const transfer::Message& from, RequestId request,
                                  std::uint64_t ticket, std::uint32_t rank, IncomingPtr& in) {
  const auto found = requests_.find(request);
  if (found != requests_.end() && found->second->ticket == ticket) {
    in = found->second;
    for (Source& source : in->sources)
      if (source.rank == rank && source.told && source.instance == from.peer_instance)
        return &source;
  }
  ++ignored_;
  return nullptr;
}

// With the mutex held. From now on it takes proof that the source writes no more. Returns when.
std::uint64_t ReceiverCore::begin(const Incoming& in, Source& source) {
  source.begun_at = ++events_;
  if (!source.begun) keeper_->doubt(in.kept, source.instance);
  source.begun = true;
  return source.begun_at;
}

// With the mutex held: there is proof.
void ReceiverCore::quiesce(const Incoming& in, Source& source) {
  if (source.begun && !source.quiesced) keeper_->clear(in.kept, source.instance);
  source.quiesced = true;
}

// The message came over the connection that the sender would write on; so its end, which is told,
// ends the writing too.
void ReceiverCore::on_ready(const transfer::Message& from, const message::Ready& ready) {
  const Lock lock(mutex_);
  IncomingPtr in;
  Source* source = find_source(from, ready.request, ready.ticket, ready.sender_rank, in);
  if (stopped_ || source == nullptr || in->phase != Phase::kReceiving || source->quiesced) return;
  open_.insert_or_assign(from.peer_instance, begin(*in, *source));
  const auto index = static_cast<std::size_t>(source - in->sources.data());
  links_.post(source->name, [this, in, index](Link& link) { send_go(link, in, index); });
}

// On a thread of the link, which may have done other things since the source asked.
void ReceiverCore::send_go(Link& link, const IncomingPtr& in, std::size_t index) {
  message::Go go{in->request, in->ticket, life_, 0};
  {
    const Lock lock(mutex_);
    if (in->phase != Phase::kReceiving || in->sources[index].quiesced) return;
    go.later = next_ticket_;
  }
  const auto sent = link.send(options_.sender_mailbox, message::encode(go));
  if (sent.ok()) return;
  Effects effects;
  {
    const Lock lock(mutex_);
    Error error = sent.error();
    error.message = fmt::format("request {}: answering sender {} failed: {}", in->request,
                                link.peer_name(), error.message);
    fail(in, std::move(error), effects);
  }
  run(effects);
}

void ReceiverCore::on_parts(const transfer::Message& from, const message::Parts& parts) {
  Effects effects;
  {
    const Lock lock(mutex_);
    IncomingPtr in;
    Source* source = find_source(from, parts.request, parts.ticket, parts.sender_rank, in);
    if (stopped_ || source == nullptr || in->phase != Phase::kReceiving) return;
    for (const message::Part& part : parts.parts)
      take_part(*in, *source, part, effects);
    if (in->layers_left == 0) finish(in, effects);
  }
  changed_.notify_all();
  run(effects);
}

// Marks pages as arrived. A page that is announced twice counts once, so a layer is never complete
// too early; what lies outside of the expectation is ignored.
void ReceiverCore::take_part(Incoming& in, Source& source, const message::Part& part,
                             Effects& effects) {
  if (source.heads.count == 0) return;  // an idle sender
  const auto pages = static_cast<std::uint32_t>(in.pages.size());
  const auto layers = static_cast<std::uint32_t>(in.missing.size());
  const std::uint64_t last_layer =
      std::min<std::uint64_t>(std::uint64_t{part.first_layer} + part.num_layers, layers);
  const std::uint64_t begin = std::max(part.first_page, in.first_page) - in.first_page;
  const std::uint64_t end_page = std::uint64_t{part.first_page} + part.num_pages;
  if (end_page <= in.first_page) return;
  const std::uint64_t end = std::min<std::uint64_t>(end_page - in.first_page, pages);
  const std::size_t bytes = pool_.layout().cell_bytes() / pool_.layout().heads().count *
                            source.heads.count * pool_.layout().shape().num_planes();
  for (std::uint64_t layer = part.first_layer; layer < last_layer; ++layer) {
    std::uint32_t fresh = 0;
    for (std::uint64_t page = begin; page < end; ++page) {
      auto arrived = source.arrived[layer * pages + page];
      fresh += !arrived;
      arrived = true;
    }
    bytes_received_ += bytes * fresh;
    source.missing[layer] -= fresh;
    in.missing[layer] -= fresh;
    if (fresh == 0 || in.missing[layer] > 0) continue;
    --in.layers_left;
    effects.layers.emplace_back(in.request, static_cast<std::uint32_t>(layer));
  }
}

void ReceiverCore::on_stopped(const transfer::Message& from, const message::Stopped& stopped) {
  Effects effects;
  {
    const Lock lock(mutex_);
    IncomingPtr in;
    Source* source = find_source(from, stopped.request, stopped.ticket, stopped.sender_rank, in);
    if (stopped_ || source == nullptr || in->phase == Phase::kDone) return;
    quiesce(*in, *source);
    Error error = make_error(stopped.code,
                             fmt::format("request {}: sender {} (rank {}) stopped: {}", in->request,
                                         source->name, source->rank, stopped.reason));
    error.scope = Scope::kTransfer;
    fail(in, std::move(error), effects);
    settle(in, effects);
  }
  run(effects);
}

namespace {

bool all_arrived(const Source& source) {
  return std::all_of(source.missing.begin(), source.missing.end(),
                     [](std::uint32_t pages) { return pages == 0; });
}

Error lost_error(const Incoming& in, const Source& source, const std::string& progress) {
  Error error =
      make_error(Code::kPeerLost, fmt::format("request {}: sender {} (rank {}) was lost: {}",
                                              in.request, source.name, source.rank, progress));
  error.scope = Scope::kPeer;
  error.retry = Retry::kAfterReconnect;
  return error;
}

}  // namespace

// With the mutex held: the sources, by `predicate`, of requests that are not done.
std::vector<std::pair<ReceiverCore::IncomingPtr, Source*>> ReceiverCore::sources_where(
    const std::function<bool(const Source&)>& predicate) {
  std::vector<std::pair<IncomingPtr, Source*>> found;
  for (const auto& [id, in] : requests_)
    for (Source& source : in->sources)
      if (in->phase != Phase::kDone && source.told && predicate(source))
        found.emplace_back(in, &source);
  return found;
}

// The dead touch nothing: every request that waits for this sender fails now, every request that
// waits for its confirmation has it.
void ReceiverCore::on_peer_lost(const transfer::Message& from) {
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    open_.erase(from.peer_instance);
    next_fence_.erase(from.peer_instance);
    for (const auto& [in, source] : sources_where(
             [&](const Source& source) { return source.instance == from.peer_instance; })) {
      quiesce(*in, *source);
      if (!all_arrived(*source)) fail(in, lost_error(*in, *source, progress_of(*in)), effects);
      settle(in, effects);
    }
  }
  run(effects);
}

// The connection to a sender ended, perhaps with the sender: it may have died before it opened this
// engine, and then nothing else tells. On the engine's control thread.
void ReceiverCore::on_link_lost(const transfer::Message& from) {
  const Lock lock(mutex_);
  if (stopped_) return;
  std::set<std::string> names;
  for (const auto& [in, source] : sources_where([&](const Source& source) {
         return source.instance == from.peer_instance && !all_arrived(source);
       }))
    if (in->phase == Phase::kReceiving) names.insert(source->name);
  for (const std::string& name : names)
    links_.post(name,
                [this, instance = from.peer_instance](Link& link) { look_for(link, instance); });
}

// On a thread of the link: requests of a sender that cannot be reached any more fail.
void ReceiverCore::look_for(Link& link, std::uint64_t instance) {
  if (const auto peer = link.peer(); peer.ok() && peer->instance() == instance) return;
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    for (const auto& [in, source] : sources_where([&](const Source& source) {
           return source.instance == instance && !all_arrived(source);
         }))
      fail(in, lost_error(*in, *source, progress_of(*in)), effects);
  }
  run(effects);
}

// With the mutex held. The first error wins; later calls only matter for a request still receiving.
void ReceiverCore::fail(const IncomingPtr& in, Error error, Effects& effects) {
  if (in->phase != Phase::kReceiving) return;
  in->phase = Phase::kStopping;
  in->error = std::move(error);
  in->next_step = Deadline::in(options_.stop_timeout);
  for (std::size_t i = 0; i < in->sources.size(); ++i) {
    Source& source = in->sources[i];
    if (source.told && source.quiesced) continue;
    // It touches nothing before Go, which it does not get any more; the Abort spares it the wait.
    if (!source.begun) source.quiesced = true;
    if (!source.unreachable) post_abort(in, i);
  }
  changed_.notify_all();
  clock_wake_.notify_one();
  settle(in, effects);
}

// With the mutex held: the request is done when no source is in doubt any more.
void ReceiverCore::settle(const IncomingPtr& in, Effects& effects) {
  const bool all = std::all_of(in->sources.begin(), in->sources.end(),
                               [](const Source& source) { return source.quiesced; });
  const bool stopping = in->phase == Phase::kStopping || in->phase == Phase::kQuarantined;
  if (all && stopping) finish(in, effects);
}

// With the mutex held: nobody will write to the request's pages any more.
void ReceiverCore::finish(const IncomingPtr& in, Effects& effects) {
  // A quarantined request was reported when it went there.
  if (in->phase != Phase::kQuarantined)
    effects.done.emplace_back(in->request, in->error ? Result<>(*in->error) : Result<>());
  in->phase = Phase::kDone;
  keeper_->end(in->kept);
  // The outcome is kept for long; what it took is not. (`= {}` would keep the vectors' memory.)
  in->pages = std::vector<PageId>();
  for (Source& source : in->sources)
    source.arrived = std::vector<bool>();
  history_.push_back(in);
  if (history_.size() > kHistory) {
    const auto found = requests_.find(history_.front()->request);
    if (found != requests_.end() && found->second == history_.front()) requests_.erase(found);
    history_.pop_front();
  }
  changed_.notify_all();
}

// With the mutex held.
void ReceiverCore::post_abort(const IncomingPtr& in, std::size_t source) {
  ++untold_;
  links_.post(in->sources[source].name,
              counted([this, in, source](Link& link) { stop_source(link, in, source); }));
}

// On a thread of the link. An Abort that cannot be delivered is followed by a fence at once.
void ReceiverCore::stop_source(Link& link, const IncomingPtr& in, std::size_t index) {
  message::Abort abort;
  {
    const Lock lock(mutex_);
    const Source& source = in->sources[index];
    if (source.begun && source.quiesced) return;
    if (in->phase == Phase::kQuarantined) return;  // it does not answer; the clock tries again
    abort = {in->request, in->ticket, in->error->message};
  }
  if (!link.send(options_.sender_mailbox, message::encode(abort), options_.stop_timeout).ok())
    try_fence(link, in, index);
}

// On a thread of the link. A fence speaks for everything its sender does, so that many requests of
// one sender that hangs cost one wait, not one each.
void ReceiverCore::try_fence(Link& link, const IncomingPtr& in, std::size_t index) {
  std::uint64_t instance = 0;
  std::uint64_t began = 0;
  {
    const Lock lock(mutex_);
    instance = in->sources[index].instance;
    const auto next = next_fence_.find(instance);
    const bool too_soon = next != next_fence_.end() && !next->second.passed();
    if (in->sources[index].quiesced || too_soon || stopped_) return;
    began = ++events_;
  }
  // Ok also when it has no connection to this engine: it writes nothing, and needs another Go.
  const auto fenced = link.fence(instance, options_.fence_timeout);
  Effects effects;
  {
    const Lock lock(mutex_);
    if (fenced.ok())
      next_fence_.erase(instance);
    else
      next_fence_.insert_or_assign(instance, Deadline::in(options_.fence_timeout));
    apply_fence(instance, began, fenced, effects);
  }
  changed_.notify_all();
  run(effects);
}

// With the mutex held. With proof, every request of the sender that began before the fence is
// quiesced, and those that still waited for it fail; without, those being stopped go to quarantine.
void ReceiverCore::apply_fence(std::uint64_t instance, std::uint64_t began, const Result<>& fenced,
                               Effects& effects) {
  const auto open = open_.find(instance);
  if (fenced.ok() && open != open_.end() && open->second < began) open_.erase(open);
  for (const auto& [in, source] : sources_where([&](const Source& source) {
         const bool spoken_for = !fenced.ok() || source.begun_at < began;
         return source.instance == instance && source.begun && !source.quiesced && spoken_for;
       })) {
    if (fenced.ok()) {
      quiesce(*in, *source);
      fail(
          in,
          make_error(Code::kPeerLost,
                     fmt::format("request {}: sender {} (rank {}) was fenced off, since it did not "
                                 "answer: {}",
                                 in->request, source->name, source->rank, progress_of(*in))),
          effects);
      settle(in, effects);
    } else if (in->phase == Phase::kStopping) {
      in->phase = Phase::kQuarantined;
      in->error->message +=
          fmt::format("; no proof that {} stopped writing ({}), so its pages stay in quarantine",
                      source->name, fenced.error().message);
      effects.done.emplace_back(in->request, *in->error);
    }
  }
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
