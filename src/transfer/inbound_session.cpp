// See inbound_session.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/inbound_session.hpp"

#include <fmt/format.h>

#include "transfer/engine_core.hpp"
#include "transfer/verifier.hpp"
#include "wire/segment.hpp"

namespace crossdock::transfer::detail {

InboundSession::InboundSession(EngineCore& engine, std::shared_ptr<ControlLink> link,
                               const wire::Hello& hello, std::uint64_t data_token)
    : engine_(engine),
      link_(std::move(link)),
      peer_name_(hello.engine_name),
      peer_instance_(hello.instance_id),
      data_token_(data_token),
      copies_itself_(hello.instance_id == engine.identity().instance ||
                     ((hello.features & kFeatureCopiesItself) != 0 &&
                      hello.host.boot_id == engine.identity().host.boot_id &&
                      hello.host.pid_namespace == engine.identity().host.pid_namespace)) {}

void InboundSession::start() {
  const auto self = shared_from_this();
  link_->hand_over([self](const wire::Frame& frame) { return self->on_frame(frame); },
                   [self](const Error& why) { self->engine_.sessions().closed(self, why); },
                   wire::kMaxFramePayload);
  link_->keep_alive(engine_.settings().silence);
  if (const auto sent = link_->send(engine_.welcome(data_token_)); !sent.ok())
    return link_->close(sent.error());
  for (auto& frame : engine_.segment_frames())
    if (const auto sent = link_->send(std::move(frame)); !sent.ok())
      return link_->close(sent.error());
}

Result<> InboundSession::on_frame(const wire::Frame& frame) {
  switch (frame.type) {
    case wire::MessageType::kNotify:
      return on_notify(frame);
    case wire::MessageType::kDigestRequest:
      return on_digest_request(frame);
    case wire::MessageType::kRevokeAck: {
      CROSSDOCK_TRY(ack, wire::decode<wire::RevokeAck>(frame.payload));
      engine_.sessions().acknowledged(*this, ack.token);
      return {};
    }
    case wire::MessageType::kPing: {
      CROSSDOCK_TRY(ping, wire::decode<wire::Ping>(frame.payload));
      return link_->send(wire::Pong{.value = ping.value});
    }
    case wire::MessageType::kPong:
      return {};
    case wire::MessageType::kBye: {
      CROSSDOCK_TRY(bye, wire::decode<wire::Bye>(frame.payload));
      left_ = true;
      return make_error(Code::kClosed, fmt::format("peer '{}' left: {}", peer_name_, bye.reason));
    }
    default:
      return Error{
          .code = Code::kCorrupt,
          .scope = Scope::kPeer,
          .message = fmt::format("peer '{}' sent {} where only a client's messages are allowed",
                                 peer_name_, wire::to_string(frame.type))};
  }
}

Result<> InboundSession::on_notify(const wire::Frame& frame) {
  CROSSDOCK_TRY(notify, wire::decode<wire::Notify>(frame.payload));
  // A peer may not fill our memory with mailboxes either: unknown names count against one limit.
  Message message{.peer = peer_name_, .peer_instance = peer_instance_, .payload = notify.payload};
  const auto taken = engine_.mailboxes().deliver(notify.mailbox, std::move(message));
  return link_->send(wire::NotifyAck{.sequence = notify.sequence, .code = taken.code()});
}

// One at a time, so that a peer with many requests takes one turn in a row, as all others do.
Result<> InboundSession::on_digest_request(const wire::Frame& frame) {
  CROSSDOCK_TRY(request, wire::decode<wire::DigestRequest>(frame.payload));
  if (digests_.size() >= kMaxDigests)
    return link_->send(wire::DigestReply{
        .sequence = request.sequence,
        .code = Code::kWouldBlock,
        .message = fmt::format("{} checksums of this peer are waiting already", kMaxDigests)});
  digests_.push_back(std::make_shared<wire::DigestRequest>(std::move(request)));
  if (digests_.size() == 1) next_digest();
  return {};
}

void InboundSession::next_digest() {
  while (!digests_.empty()) {
    const bool posted =
        engine_.hasher().post([self = shared_from_this(), request = digests_.front()] {
          self->answer_digest(*request);
          self->engine_.loop().post([self] {
            self->digests_.pop_front();
            self->next_digest();
          });
        });
    if (posted) return;
    (void)link_->send(wire::DigestReply{.sequence = digests_.front()->sequence,
                                        .code = Code::kNoMemory,
                                        .message = "there is no thread to compute it on"});
    digests_.pop_front();
  }
}

// Hashing thread.
void InboundSession::answer_digest(const wire::DigestRequest& request) {
  const auto digest =
      digest_ranges(request.ranges, engine_, [this] { return ended_.load() || engine_.closing(); });
  wire::DigestReply reply{.sequence = request.sequence};
  if (digest.ok()) {
    reply.digest = *digest;
  } else {
    reply.code = digest.code();
    reply.message = digest.error().message;
  }
  (void)link_->send(reply);
}

}  // namespace crossdock::transfer::detail
