// The handshake that opens every connection, both ends: version, authentication, identity.
//
//   client (blocking, caller's thread)       server (control loop, one object a connection)
//     connect, Hello              ─────────>  version checked by the frame header
//                                 <─────────  Challenge            (only when a key is set)
//     AuthProof                   ─────────>  verify; else Refused
//                                 <─────────  AuthProof, Welcome
//
// A server with a key reveals nothing before the proof holds. A client with a key refuses a server
// that does not ask for it: it may not be who it seems.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/address.hpp"
#include "transfer/control_link.hpp"
#include "transport/transport.hpp"
#include "wire/auth.hpp"

namespace crossdock::transfer::detail {

// What an engine says of itself.
struct Identity {
  std::string name;
  std::uint64_t instance = 0;
  transport::HostIdentity host;
  std::string secret;          // empty: no authentication
  std::uint64_t features = 0;  // told in Hello and Welcome
};

struct DialOptions {
  wire::Purpose purpose = wire::Purpose::kControl;
  std::uint16_t rail = 0;
  std::uint64_t token = 0;
  int interrupt = -1;  // readable: give up with kClosed
};

struct Greeting {
  base::UniqueFd fd;         // non-blocking
  wire::FrameReader reader;  // holds what came after the Welcome
  wire::Welcome welcome;
};

// Connects and greets. kUnreachable, kDeadline, kIncompatible (both versions named), kDenied.
Result<Greeting> dial(const base::HostPort& address, const Identity& self,
                      const DialOptions& options, Deadline deadline);

// One connection at the server until it is welcomed or refused. Loop thread.
class ServerHandshake : public std::enable_shared_from_this<ServerHandshake> {
 public:
  // Exactly one of them is called, once. After `on_welcome` the link belongs to its callee, which
  // sends the Welcome; its handlers must be replaced there.
  using OnWelcome = std::function<void(std::shared_ptr<ControlLink>, const wire::Hello&)>;
  using OnRefused = std::function<void(const Error&)>;

  ServerHandshake(std::shared_ptr<ControlLink> link, const Identity& self, OnWelcome on_welcome,
                  OnRefused on_refused);
  void start();
  void expire();

 private:
  Result<> on_frame(const wire::Frame& frame);
  Result<> on_hello(const wire::Frame& frame);
  Result<> on_proof(const wire::Frame& frame);
  Error refuse(Error why);

  std::shared_ptr<ControlLink> link_;
  const Identity& self_;
  OnWelcome on_welcome_;
  OnRefused on_refused_;
  std::optional<wire::Hello> hello_;
  wire::Challenge challenge_;
};

}  // namespace crossdock::transfer::detail
