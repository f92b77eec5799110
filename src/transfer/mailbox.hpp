// Mailboxes of one engine: bounded queues of messages by name, and watchers of what becomes of
// peers. Thread-safe; handlers run on the thread that delivers (the control thread), with no lock
// held.
//
// Memory is bounded whatever peers send: a mailbox by messages and by bytes, all mailboxes that no
// one here asked for by the bytes of one, and of peers lost while nobody reads the newest are kept.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/transfer/types.hpp>

#include "base/fork_check.hpp"

namespace crossdock::transfer::detail {

struct MailboxLimits {
  std::size_t messages = 65536;
  std::size_t bytes = 64 << 20;
};

class MailboxCore {
 public:
  using Handler = std::function<void(Message)>;

  // `unclaimed` counts the bytes in all mailboxes of the engine that are not claimed; `control` is
  // the thread that delivers, which must not wait for itself.
  MailboxCore(std::string name, MailboxLimits limits,
              std::shared_ptr<std::atomic<std::size_t>> unclaimed, std::thread::id control)
      : name_(std::move(name)),
        limits_(limits),
        unclaimed_(std::move(unclaimed)),
        control_(control) {}

  // Local code asked for it: it has its own bounds from now on, and hears of every lost peer.
  void claim();
  // kWouldBlock when full.
  Result<> deliver(Message message);
  // At most one of an instance waits, behind everything that it sent; an unclaimed mailbox takes it
  // only when it holds something of that instance.
  void deliver_loss(Message message);
  // This and the next two take nothing in a forked child; so says who can, with kUnsupported.
  Result<Message> receive(Deadline deadline);
  std::optional<Message> try_receive();
  // Queued messages go to `handler` at once, on this thread. kBusy while there is another one. The
  // number is for clear_handler().
  Result<std::uint64_t> set_handler(Handler handler);
  // When it returns that handler does not run any more, unless this is called from within it. Does
  // nothing to a handler set by somebody else, and nothing in a forked child.
  void clear_handler(std::uint64_t token);
  // Wakes receivers with kClosed and drops the handler; when it returns no handler runs any more,
  // unless this is called from within it.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  Result<> check_room(std::size_t bytes);
  void push(Message message);
  Message pop();
  void drop_loss(std::deque<Message>::iterator loss);
  void drain_to_handler(Lock& lock);
  void wait_for_handler(Lock& lock);

  const std::string name_;
  const MailboxLimits limits_;
  const std::shared_ptr<std::atomic<std::size_t>> unclaimed_;
  const std::thread::id control_;
  const base::ForkCheck fork_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> queue_;
  std::unordered_map<std::uint64_t, std::size_t> sent_by_;  // messages in the queue by instance
  std::unordered_set<std::uint64_t> lost_;                  // instances whose loss is in the queue
  std::size_t bytes_ = 0;                                   // of the messages in the queue
  bool claimed_ = false;
  std::shared_ptr<Handler> handler_;
  std::uint64_t handler_token_ = 0;
  std::thread::id draining_;  // the thread inside the handler; keeps messages in order
  bool closed_ = false;
};

class Mailboxes {
 public:
  explicit Mailboxes(MailboxLimits limits, std::thread::id control = {})
      : limits_(limits), control_(control) {}
  // For local code: the mailbox is claimed.
  std::shared_ptr<MailboxCore> get(const std::string& name);
  // What a peer sent. kWouldBlock when the mailbox is full, or when there are kMaxMailboxes and no
  // one here asked for this name: peers must not fill our memory with names.
  Result<> deliver(const std::string& name, Message message);
  // A mailbox without a name that gets what broadcast() and tell_watchers() are given. It watches
  // as long as it lives.
  std::shared_ptr<MailboxCore> watch();
  // The loss of a peer, to every mailbox and then to the watchers.
  void broadcast(const Message& loss);
  void tell_watchers(const Message& message);
  void close();

 private:
  static constexpr std::size_t kMaxMailboxes = 4096;
  std::vector<std::shared_ptr<MailboxCore>> watchers();

  const MailboxLimits limits_;
  const std::thread::id control_;
  const std::shared_ptr<std::atomic<std::size_t>> unclaimed_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<MailboxCore>> boxes_;
  std::vector<std::weak_ptr<MailboxCore>> watchers_;
  bool closed_ = false;
};

}  // namespace crossdock::transfer::detail
