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
  run(std::move(effects));
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
    source->quiesced = true;
    Error error = make_error(stopped.code,
                             fmt::format("request {}: sender {} (rank {}) stopped: {}", in->request,
                                         source->name, source->rank, stopped.reason));
    error.scope = Scope::kTransfer;
    fail(in, std::move(error), effects);
    settle(in, effects);
  }
  run(std::move(effects));
}

// The dead touch nothing: every request that waits for this sender fails now, every request that
// waits for its confirmation has it.
void ReceiverCore::on_peer_lost(const transfer::Message& from) {
  Effects effects;
  {
    const Lock lock(mutex_);
    if (stopped_) return;
    std::vector<std::pair<IncomingPtr, Source*>> hit;
    for (const auto& [id, in] : requests_)
      for (Source& source : in->sources)
        if (in->phase != Phase::kDone && source.told && source.instance == from.peer_instance)
          hit.emplace_back(in, &source);
    for (const auto& [in, source] : hit) {
      source->quiesced = true;
      const bool complete = std::all_of(source->missing.begin(), source->missing.end(),
                                        [](std::uint32_t pages) { return pages == 0; });
      if (!complete) {
        Error error =
            make_error(Code::kPeerLost,
                       fmt::format("request {}: sender {} (rank {}) was lost: {}", in->request,
                                   source->name, source->rank, progress_of(*in)));
        error.scope = Scope::kPeer;
        error.retry = Retry::kAfterReconnect;
        fail(in, std::move(error), effects);
      }
      settle(in, effects);
    }
  }
  run(std::move(effects));
}

// With the mutex held. The first error wins; later calls only matter for a request still receiving.
void ReceiverCore::fail(const IncomingPtr& in, Error error, Effects& effects) {
  if (in->phase != Phase::kReceiving) return;
  in->phase = Phase::kStopping;
  in->error = std::move(error);
  in->next_step = Deadline::in(options_.stop_timeout);
  for (std::size_t i = 0; i < in->sources.size(); ++i) {
    Source& source = in->sources[i];
    if (source.unreachable || (source.told && source.quiesced)) continue;
    // Without a ticket it touches nothing, and gets none any more; the Abort spares it the wait.
    if (!source.told) source.quiesced = true;
    post_abort(in, i);
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
  in->lease.reset();
  for (Source& source : in->sources)
    source.arrived = {};
  history_.push_back(in);
  if (history_.size() > kHistory) {
    const auto found = requests_.find(history_.front()->request);
    if (found != requests_.end() && found->second == history_.front()) requests_.erase(found);
    history_.pop_front();
  }
  changed_.notify_all();
}

void ReceiverCore::post_abort(const IncomingPtr& in, std::size_t source) {
  links_.post(in->sources[source].name,
              [this, in, source](Link& link) { stop_source(link, in, source); });
}

// On the link's thread. An Abort that cannot be delivered is followed by a fence at once.
void ReceiverCore::stop_source(Link& link, const IncomingPtr& in, std::size_t index) {
  message::Abort abort;
  {
    const Lock lock(mutex_);
    const Source& source = in->sources[index];
    if (source.told && source.quiesced) return;
    if (in->phase == Phase::kQuarantined) return;  // it does not answer; the clock tries again
    abort = {in->request, in->ticket, in->error->message};
  }
  if (!link.send(options_.sender_mailbox, message::encode(abort), options_.stop_timeout).ok())
    try_fence(link, in, index);
}

// On the link's thread. A fence speaks for everything its sender does, so that many requests of one
// sender that hangs cost one wait, not one each.
void ReceiverCore::try_fence(Link& link, const IncomingPtr& in, std::size_t index) {
  {
    const Lock lock(mutex_);
    const auto next = next_fence_.find(link.peer_name());
    const bool too_soon = next != next_fence_.end() && !next->second.passed();
    if (in->sources[index].quiesced || too_soon) return;
  }
  const auto fenced = link.fence(options_.fence_timeout);
  Effects effects;
  {
    const Lock lock(mutex_);
    next_fence_.insert_or_assign(link.peer_name(), Deadline::in(options_.fence_timeout));
    apply_fence(link.peer_name(), fenced, effects);
  }
  changed_.notify_all();
  run(std::move(effects));
}

// With the mutex held. With proof, every request of the sender is quiesced, and those that still
// waited for it fail; without, those being stopped go to quarantine.
void ReceiverCore::apply_fence(const std::string& sender, const Result<>& fenced,
                               Effects& effects) {
  std::vector<std::pair<IncomingPtr, Source*>> hit;
  for (const auto& [id, in] : requests_)
    for (Source& source : in->sources)
      if (in->phase != Phase::kDone && source.name == sender && source.told && !source.quiesced)
        hit.emplace_back(in, &source);
  for (const auto& [in, source] : hit) {
    if (fenced.ok()) {
      source->quiesced = true;
      fail(
          in,
          make_error(Code::kPeerLost,
                     fmt::format("request {}: sender {} (rank {}) was fenced off, since it did not "
                                 "answer: {}",
                                 in->request, sender, source->rank, progress_of(*in))),
          effects);
      settle(in, effects);
    } else if (in->phase == Phase::kStopping) {
      in->phase = Phase::kQuarantined;
      in->error->message +=
          fmt::format("; no proof that {} stopped writing ({}), so its pages stay in quarantine",
                      sender, fenced.error().message);
      effects.done.emplace_back(in->request, *in->error);
    }
  }
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
