// A client of the control port that does only what a test tells it: the handshake, then frames.
// Failures are gtest failures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>

#include "base/socket.hpp"
#include "support/engines.hpp"
#include "transfer/handshake.hpp"
#include "transfer/host_identity.hpp"
#include "transfer/inbound_session.hpp"
#include "wire/control.hpp"

namespace crossdock::testing {

class RawClient {
 public:
  // Opens `engine` as an engine of that name and instance. `copies`: it says that it writes into
  // the memory of others by itself.
  RawClient(const Engine& engine, std::string name, std::uint64_t instance, bool copies = false) {
    auto greeted = greet(engine, std::move(name), instance, copies);
    if (!greeted.ok()) ADD_FAILURE() << greeted.error().describe();
    greeting_.emplace(std::move(greeted).value());
  }
  // The handshake alone, which the engine may refuse.
  static Result<transfer::detail::Greeting> greet(const Engine& engine, std::string name,
                                                  std::uint64_t instance, bool copies) {
    using namespace transfer::detail;
    const Identity self{.name = std::move(name),
                        .instance = instance,
                        .host = read_host_identity(),
                        .secret = {},
                        .features = copies ? kFeatureCopiesItself : 0};
    return dial(base::parse_host_port(engine.address()).value(), self, {}, soon());
  }

  template <class M>
  void send(const M& message) {
    const auto frame = wire::encode_frame(message).value();
    const auto sent = base::send_all(greeting_->fd.get(), frame, soon());
    if (!sent.ok()) ADD_FAILURE() << sent.error().describe();
  }
  // The next message of that type; others are passed over. Nothing when the engine hung up.
  template <class M>
  std::optional<M> receive() {
    while (true) {
      auto frame = greeting_->reader.next();
      if (!frame.ok()) return std::nullopt;
      if (frame->has_value()) {
        if ((*frame)->type == M::kType) return wire::decode<M>((*frame)->payload).value();
        continue;
      }
      std::array<std::byte, 4096> chunk;
      const auto got = base::recv_some(greeting_->fd.get(), chunk, soon());
      if (!got.ok() || *got == 0) return std::nullopt;
      greeting_->reader.feed(std::span(chunk).first(*got));
    }
  }
  // Waits until the engine has ended its side.
  void await_end() {
    while (receive<wire::Hello>())
      ;
  }
  void close() { greeting_->fd.reset(); }

 private:
  std::optional<transfer::detail::Greeting> greeting_;
};

}  // namespace crossdock::testing
