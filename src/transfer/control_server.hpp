// The control port: listens where it was told, takes every connection through the handshake without
// ever waiting for it, and hands on what was welcomed. A silent or rubbish-talking client costs a
// descriptor until its time is up and delays nobody. Loop thread, except listen() and address().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "base/log.hpp"
#include "base/socket.hpp"
#include "transfer/handshake.hpp"
#include "transfer/settings.hpp"

namespace crossdock::transfer::detail {

class ControlServer {
 public:
  using OnWelcome = ServerHandshake::OnWelcome;

  ControlServer(base::EventLoop& loop, const Identity& self, const Settings& settings,
                base::Logger log, OnWelcome on_welcome);
  // Binds; kBusy names an address in use. Called once, before start().
  Result<> listen();
  Result<> start();
  void stop();
  [[nodiscard]] const base::SocketAddress& address() const noexcept { return listener_.address; }

 private:
  struct Pending {
    std::shared_ptr<ServerHandshake> handshake;
    base::EventLoop::TimerId timer;
  };
  void on_acceptable();
  void admit(base::UniqueFd fd);
  void pause_accepting();
  void forget(std::uint64_t id);

  base::EventLoop& loop_;
  const Identity& self_;
  const Settings& settings_;
  base::Logger log_;
  OnWelcome on_welcome_;
  base::Listener listener_;
  std::map<std::uint64_t, Pending> pending_;  // by age
  std::uint64_t next_id_ = 1;
  std::shared_ptr<int> alive_ = std::make_shared<int>();  // guards timers that outlive stop()
};

}  // namespace crossdock::transfer::detail
