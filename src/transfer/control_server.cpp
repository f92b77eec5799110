// See control_server.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/control_server.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>

namespace crossdock::transfer::detail {

ControlServer::ControlServer(base::EventLoop& loop, const Identity& self, const Settings& settings,
                             base::Logger log, OnWelcome on_welcome)
    : loop_(loop),
      self_(self),
      settings_(settings),
      log_(std::move(log)),
      on_welcome_(std::move(on_welcome)) {}

Result<> ControlServer::listen() {
  CROSSDOCK_TRY(where, base::parse_host_port(settings_.listen));
  CROSSDOCK_TRY(listener, base::listen_tcp(where, Deadline::in(settings_.connect_timeout)));
  listener_ = std::move(listener);
  return {};
}

Result<> ControlServer::start() {
  return loop_.watch(listener_.fd.get(), EPOLLIN, [this](std::uint32_t) { on_acceptable(); });
}

void ControlServer::stop() {
  alive_.reset();
  if (listener_.fd) loop_.unwatch(listener_.fd.get());
  listener_.fd.reset();
  const auto pending = std::move(pending_);
  pending_.clear();
  for (const auto& [id, entry] : pending) {
    loop_.cancel(entry.timer);
    entry.handshake->expire();
  }
}

void ControlServer::on_acceptable() {
  // A few at a time: a flood of connections must not starve the sessions.
  for (int i = 0; i < 16; ++i) {
    auto fd = base::accept_tcp(listener_.fd.get());
    if (!fd.ok()) return pause_accepting();
    if (!fd->has_value()) return;
    admit(std::move(**fd));
  }
}

// Out of descriptors: the connection stays in the backlog, and the level-triggered event would
// spin.
void ControlServer::pause_accepting() {
  CROSSDOCK_LOG_ONCE(log_, kWarn, "control.accept",
                     "cannot accept connections: out of file descriptors; raise `ulimit -n`");
  loop_.change(listener_.fd.get(), 0);
  loop_.call_at(Deadline::in(std::chrono::milliseconds(50)), [this, weak = std::weak_ptr(alive_)] {
    if (!weak.expired()) loop_.change(listener_.fd.get(), EPOLLIN);
  });
}

void ControlServer::admit(base::UniqueFd fd) {
  if (pending_.size() >= settings_.max_handshakes) {
    // The oldest has had the most time; a slow-loris crowd displaces itself.
    const auto oldest = pending_.begin()->second.handshake;
    oldest->expire();
  }
  const std::uint64_t id = next_id_++;
  auto link = std::make_shared<ControlLink>(loop_, std::move(fd),
                                            wire::FrameReader(wire::kMaxGreetingPayload));
  auto handshake = std::make_shared<ServerHandshake>(
      std::move(link), self_,
      [this, id](std::shared_ptr<ControlLink> welcomed, const wire::Hello& hello) {
        forget(id);
        on_welcome_(std::move(welcomed), hello);
      },
      [this, id, weak = std::weak_ptr(alive_)](const Error& why) {
        if (weak.expired()) return;
        CROSSDOCK_LOG_ONCE(log_, kInfo, "control.refused", "refused a connection: {}", why.message);
        forget(id);
      });
  const auto timer =
      loop_.call_at(Deadline::in(settings_.handshake_timeout), [weak = std::weak_ptr(handshake)] {
        if (const auto self = weak.lock()) self->expire();
      });
  pending_.emplace(id, Pending{handshake, timer});
  handshake->start();
}

void ControlServer::forget(std::uint64_t id) {
  const auto found = pending_.find(id);
  if (found == pending_.end()) return;
  loop_.cancel(found->second.timer);
  pending_.erase(found);
}

}  // namespace crossdock::transfer::detail
