// Link: the control messages to one peer, in order, on a thread of their own, so that a peer that
// hangs delays nobody else. LinkSet makes links on first use and joins them at the end.
// A link thread may wait on its peer (bounded by the timeouts); it never holds a lock of its owner
// while it does, and calls the owner back without any lock held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <crossdock/transfer/engine.hpp>

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

class Link {
 public:
  // Called on the link's thread with the opened peer, or why it could not be opened.
  using Job = std::function<void(Link&)>;

  Link(transfer::Engine& engine, std::string peer_name, std::chrono::milliseconds timeout);
  ~Link();
  Link(const Link&) = delete;

  void post(Job job);
  // Jobs not started yet are dropped; the one under way ends within the timeout.
  void stop();

  // For jobs, on the link's thread.
  [[nodiscard]] const std::string& peer_name() const noexcept { return peer_name_; }
  // The peer as it lives now; opened anew when the one known died.
  Result<transfer::Peer> peer();
  Result<> send(std::string_view mailbox, std::string payload) {
    return send(mailbox, std::move(payload), timeout_);
  }
  Result<> send(std::string_view mailbox, std::string payload, std::chrono::milliseconds timeout);
  Result<> fence(std::chrono::milliseconds timeout);

 private:
  void run();

  transfer::Engine& engine_;
  const std::string peer_name_;
  const std::chrono::milliseconds timeout_;
  std::optional<transfer::Peer> peer_;  // link thread only
  std::uint64_t instance_ = 0;          // link thread only: of the last peer opened, 0 for none
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

class LinkSet {
 public:
  LinkSet(transfer::Engine& engine, std::chrono::milliseconds timeout)
      : engine_(engine), timeout_(timeout) {}
  // Never waits. After stop() the job is dropped.
  void post(const std::string& peer_name, Link::Job job);
  void stop();

 private:
  transfer::Engine& engine_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Link>> links_;
  bool stopped_ = false;
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
