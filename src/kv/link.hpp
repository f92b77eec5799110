// Link: the control messages to one peer, in order. LinkSet runs the links on threads that it makes
// when all others are busy and ends when they are idle, so that a peer that hangs delays nobody
// else and a peer that is gone costs nothing. A link lives while it has jobs or its peer does.
// A job may wait on its peer (bounded by the timeouts); no lock is held while it does.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <crossdock/transfer/engine.hpp>

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

class Link {
 public:
  using Job = std::function<void(Link&)>;

  Link(transfer::Engine& engine, std::string peer_name, std::chrono::milliseconds timeout,
       std::atomic<std::uint64_t>& last_epoch)
      : engine_(engine),
        peer_name_(std::move(peer_name)),
        timeout_(timeout),
        last_epoch_(last_epoch) {}
  Link(const Link&) = delete;

  // For jobs, on the thread that runs them.
  [[nodiscard]] const std::string& peer_name() const noexcept { return peer_name_; }
  // The peer as it lives now; opened anew when the one known died.
  Result<transfer::Peer> peer();
  // The same, which must be this instance: by its name or, when that leads nowhere or to another,
  // at `address`.
  Result<transfer::Peer> peer(std::uint64_t instance, const std::string& address);
  // Another number for each connection that peer() of any link of the set returned.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  Result<> send(std::string_view mailbox, std::string payload) {
    return send(mailbox, std::move(payload), timeout_);
  }
  Result<> send(std::string_view mailbox, std::string payload, std::chrono::milliseconds timeout);
  Result<> fence(std::uint64_t instance, std::chrono::milliseconds timeout);

 private:
  friend class LinkSet;
  [[nodiscard]] bool reaches_nobody() const { return !peer_ || !peer_->alive(); }

  transfer::Engine& engine_;
  const std::string peer_name_;
  const std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t>& last_epoch_;  // of the set
  std::optional<transfer::Peer> peer_;  // of the thread that runs a job; of LinkSet when none does
  std::uint64_t epoch_ = 0;             // likewise
  std::deque<Job> jobs_;                // guarded by LinkSet
  bool busy_ = false;                   // guarded by LinkSet: in line or running
};

class LinkSet {
 public:
  LinkSet(transfer::Engine& engine, std::chrono::milliseconds timeout)
      : engine_(engine), timeout_(timeout) {}
  ~LinkSet() { stop(); }

  // Makes the one thread that stays; kNoMemory when there is none to be had.
  Result<> start();
  // Jobs of one peer run one after the other. Never waits. After stop() the job is dropped.
  void post(const std::string& peer_name, Link::Job job);
  // Jobs not started yet are dropped; those under way end within the timeout. Not from a job.
  void stop();

  struct Size {
    std::size_t links = 0, threads = 0;
  };
  [[nodiscard]] Size size() const;

  static constexpr std::size_t kMostThreads = 64;
  static constexpr std::chrono::milliseconds kIdle{2'000};  // of a thread that is not needed

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Threads = std::list<std::thread>;
  Result<> add_thread();
  void work(Threads::iterator self);
  bool wait_for_work(Lock& lock);
  void run_one(Lock& lock);
  void sweep(std::vector<std::unique_ptr<Link>>& gone);

  transfer::Engine& engine_;
  const std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> last_epoch_{0};
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, std::unique_ptr<Link>> links_;
  std::deque<Link*> ready_;  // with a job and not running
  Threads threads_;
  Threads ended_;  // to be joined
  std::size_t waiting_ = 0;
  bool stopping_ = false;
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
