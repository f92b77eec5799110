// A relay between engines and the control port of another: it passes on what both sides say until a
// test has it cut a connection or leave one unread. Its name is what peers open.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <poll.h>
#include <thread>
#include <vector>

#include "base/socket.hpp"
#include "support/engines.hpp"

namespace crossdock::testing {

class Relay {
 public:
  // `cut_after` connections were answered: the first of them, the control connection, is cut
  // `pause` later. 0: never.
  explicit Relay(const Engine& target, std::size_t cut_after = 0,
                 std::chrono::nanoseconds pause = {})
      : target_(base::parse_host_port(target.address()).value()),
        cut_after_(cut_after),
        pause_(pause),
        listener_(base::listen_tcp(base::HostPort{"127.0.0.1", 0}, soon()).value()),
        thread_([this] { run(); }) {}
  ~Relay() {
    stop_.store(true);
    thread_.join();
  }
  [[nodiscard]] std::string name() const { return listener_.address.to_string(); }
  // Nothing is read any more that the opener of the first connection says.
  void leave_unread() {
    unread_.store(true);
    const Deadline until = soon();
    while (!deaf_.load() && !until.passed())
      std::this_thread::yield();
  }
  // Who connects from now on is left waiting, until go_on().
  void hold() { held_.store(true); }
  void go_on() { held_.store(false); }
  // Connections after the first end at once.
  void take_one_only() { one_only_.store(true); }

 private:
  struct Connection {
    base::UniqueFd from, to;
    bool answered = false;
  };

  void run() {
    while (!stop_.load()) {
      deaf_.store(unread_.load());
      std::vector<pollfd> ready{{held_.load() ? -1 : listener_.fd.get(), POLLIN, 0}};
      for (std::size_t i = 0; i < connections_.size(); ++i) {
        const auto& connection = connections_[i];
        const bool deaf = i == 0 && deaf_.load();
        ready.push_back({deaf || !connection.from ? -1 : connection.from.get(), POLLIN, 0});
        ready.push_back({connection.to ? connection.to.get() : -1, POLLIN, 0});
      }
      (void)::poll(ready.data(), ready.size(), 5);
      for (std::size_t i = 1; i < ready.size(); ++i)
        if (ready[i].revents != 0) pass_on((i - 1) / 2, i % 2 == 0);
      if (ready[0].revents != 0 && !held_.load()) accept();
    }
  }

  void accept() {
    auto fd = base::accept_tcp(listener_.fd.get());
    if (!fd.ok() || !fd->has_value()) return;
    if (one_only_.load() && !connections_.empty()) return;
    auto to = base::connect_tcp(target_, soon());
    if (to.ok()) connections_.push_back({std::move(**fd), std::move(*to)});
  }

  void pass_on(std::size_t index, bool back) {
    auto& connection = connections_[index];
    if (!connection.from) return;  // ended since
    auto& in = back ? connection.to : connection.from;
    auto& out = back ? connection.from : connection.to;
    const auto got = base::recv_now(in.get(), chunk_);
    if (got.ok() && !got->has_value()) return;
    const bool over = !got.ok() || **got == 0 ||
                      !base::send_all(out.get(), std::span(chunk_).first(**got), soon()).ok();
    if (over) return end(connection);
    if (!back || connection.answered) return;
    connection.answered = true;
    if (++answered_ != cut_after_) return;
    const auto until = std::chrono::steady_clock::now() + pause_;
    while (std::chrono::steady_clock::now() < until)
      ;
    end(connections_.front());
  }

  static void end(Connection& connection) {
    connection.from.reset();
    connection.to.reset();
  }

  const base::HostPort target_;
  const std::size_t cut_after_;
  const std::chrono::nanoseconds pause_;
  base::Listener listener_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> held_{false};
  std::atomic<bool> one_only_{false};
  std::atomic<bool> unread_{false};
  std::atomic<bool> deaf_{false};  // the thread has seen it
  // The thread's:
  std::array<std::byte, 64 * 1024> chunk_;
  std::vector<Connection> connections_;
  std::size_t answered_ = 0;
  std::thread thread_;
};

}  // namespace crossdock::testing
