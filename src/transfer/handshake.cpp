// See handshake.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/handshake.hpp"

#include <array>
#include <fmt/format.h>

#include "base/socket.hpp"

namespace crossdock::transfer::detail {
namespace {

// What ends a wait.
struct Limits {
  Deadline deadline;
  int interrupt;
};

// A frame by blocking reads; `what` for messages.
Result<wire::Frame> read_frame(int fd, wire::FrameReader& reader, const Limits& limits) {
  std::array<std::byte, 16 * 1024> chunk;
  while (true) {
    CROSSDOCK_TRY(frame, reader.next());
    if (frame) return *frame;
    CROSSDOCK_TRY(got, base::recv_some(fd, chunk, limits.deadline, limits.interrupt));
    if (got == 0)
      return Error{.code = Code::kUnreachable,
                   .scope = Scope::kPeer,
                   .retry = Retry::kLater,
                   .message = fmt::format("{} closed the connection during the handshake; is it a "
                                          "crossdock engine that is not overloaded?",
                                          base::peer_name(fd))};
    reader.feed(std::span(chunk).first(got));
  }
}

template <class M>
Result<> write_message(int fd, const M& message, const Limits& limits) {
  CROSSDOCK_TRY(frame, wire::encode_frame(message));
  return base::send_all(fd, frame, limits.deadline, limits.interrupt);
}

// The client's half of the authentication; returns the Welcome's frame.
Result<wire::Frame> authenticate(int fd, wire::FrameReader& reader, const Identity& self,
                                 const wire::Hello& hello, const Limits& limits) {
  CROSSDOCK_TRY(first, read_frame(fd, reader, limits));
  if (first.type != wire::MessageType::kChallenge) {
    if (self.secret.empty() || first.type == wire::MessageType::kRefused) return first;
    return make_error(Code::kDenied,
                      "this engine has a key (control.secret) and the peer does not "
                      "ask for it; give both the same key");
  }
  if (self.secret.empty())
    return make_error(Code::kDenied,
                      "the peer asks for a key; set control.secret to the one it has");
  CROSSDOCK_TRY(challenge, wire::decode<wire::Challenge>(first.payload));
  const auto key = wire::as_bytes(self.secret);
  CROSSDOCK_TRY(proof, wire::prove(key, wire::AuthRole::kClient, hello, challenge));
  CROSSDOCK_CHECK_OK(write_message(fd, proof, limits));
  CROSSDOCK_TRY(second, read_frame(fd, reader, limits));
  CROSSDOCK_TRY(theirs, wire::expect<wire::AuthProof>(second));
  CROSSDOCK_CHECK_OK(wire::verify(key, wire::AuthRole::kServer, hello, challenge, theirs));
  return read_frame(fd, reader, limits);
}

}  // namespace

Result<Greeting> dial(const base::HostPort& address, const Identity& self,
                      const DialOptions& options, Deadline deadline) {
  const Limits limits{deadline, options.interrupt};
  CROSSDOCK_TRY(fd, base::connect_tcp(address, deadline, options.interrupt));
  CROSSDOCK_TRY(nonce, wire::random_nonce());
  const wire::Hello hello{.engine_name = self.name,
                          .instance_id = self.instance,
                          .features = self.features,
                          .nonce = nonce,
                          .purpose = options.purpose,
                          .rail = options.rail,
                          .token = options.token,
                          .host = self.host};
  CROSSDOCK_CHECK_OK(write_message(fd.get(), hello, limits));
  wire::FrameReader reader;
  CROSSDOCK_TRY(frame, authenticate(fd.get(), reader, self, hello, limits));
  CROSSDOCK_TRY(welcome, wire::expect<wire::Welcome>(frame));
  return Greeting{std::move(fd), std::move(reader), std::move(welcome)};
}

ServerHandshake::ServerHandshake(std::shared_ptr<ControlLink> link, const Identity& self,
                                 OnWelcome on_welcome, OnRefused on_refused)
    : link_(std::move(link)),
      self_(self),
      on_welcome_(std::move(on_welcome)),
      on_refused_(std::move(on_refused)) {}

void ServerHandshake::start() {
  link_->start([self = shared_from_this()](const wire::Frame& f) { return self->on_frame(f); },
               [self = shared_from_this()](const Error& why) { self->on_refused_(why); });
}

void ServerHandshake::expire() {
  link_->close(make_error(Code::kDeadline,
                          fmt::format("{} did not finish the handshake in time", link_->remote())));
}

Error ServerHandshake::refuse(Error why) {
  (void)link_->send(wire::Refused{.code = why.code, .message = why.message});
  return why;
}

Result<> ServerHandshake::on_frame(const wire::Frame& frame) {
  return hello_ ? on_proof(frame) : on_hello(frame);
}

Result<> ServerHandshake::on_hello(const wire::Frame& frame) {
  CROSSDOCK_TRY(hello, wire::expect<wire::Hello>(frame));
  hello_ = std::move(hello);
  if (self_.secret.empty()) {
    on_welcome_(link_, *hello_);
    return {};
  }
  CROSSDOCK_TRY(nonce, wire::random_nonce());
  challenge_ = {.nonce = nonce, .instance_id = self_.instance};
  return link_->send(challenge_);
}

Result<> ServerHandshake::on_proof(const wire::Frame& frame) {
  CROSSDOCK_TRY(proof, wire::expect<wire::AuthProof>(frame));
  const auto key = wire::as_bytes(self_.secret);
  if (const auto held = wire::verify(key, wire::AuthRole::kClient, *hello_, challenge_, proof);
      !held.ok())
    return refuse(make_error(Code::kDenied, "the keys (control.secret) differ"));
  CROSSDOCK_TRY(mine, wire::prove(key, wire::AuthRole::kServer, *hello_, challenge_));
  CROSSDOCK_CHECK_OK(link_->send(mine));
  on_welcome_(link_, *hello_);
  return {};
}

}  // namespace crossdock::transfer::detail
