// Mailboxes of one engine: bounded queues of messages by name. Thread-safe; handlers run on the
// thread that delivers (the control thread), with no lock held.
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

#include <crossdock/core/result.hpp>
#include <crossdock/transfer/types.hpp>

namespace crossdock::transfer::detail {

class MailboxCore {
 public:
  MailboxCore(std::string name, std::size_t capacity)
      : name_(std::move(name)), capacity_(capacity) {}

  // kWouldBlock when full. A kPeerLost message is always taken.
  Result<> deliver(Message message);
  Result<Message> receive(Deadline deadline);
  std::optional<Message> try_receive();
  // Queued messages go to `handler` at once, on this thread.
  void set_handler(std::function<void(Message)> handler);
  // Wakes receivers with kClosed and drops the handler; when it returns no handler runs any more,
  // unless this is called from within it.
  void close();

 private:
  void drain_to_handler(std::unique_lock<std::mutex>& lock);

  const std::string name_;
  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> queue_;
  std::shared_ptr<std::function<void(Message)>> handler_;
  std::thread::id draining_;  // the thread inside the handler; keeps messages in order
  bool closed_ = false;
};

class Mailboxes {
 public:
  explicit Mailboxes(std::size_t capacity) : capacity_(capacity) {}
  std::shared_ptr<MailboxCore> get(const std::string& name);
  // What a peer sent. kWouldBlock when the mailbox is full, or when there are kMaxMailboxes and no
  // one here asked for this name: peers must not fill our memory with names.
  Result<> deliver(const std::string& name, Message message);
  // To every mailbox that exists.
  void broadcast(const Message& message);
  void close();

 private:
  static constexpr std::size_t kMaxMailboxes = 4096;
  const std::size_t capacity_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<MailboxCore>> boxes_;
  bool closed_ = false;
};

}  // namespace crossdock::transfer::detail
