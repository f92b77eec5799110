// See mailbox.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/mailbox.hpp"

#include <fmt/format.h>

namespace crossdock::transfer::detail {

Result<> MailboxCore::deliver(Message message) {
  std::unique_lock lock(mutex_);
  if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name_));
  if (queue_.size() >= capacity_ && message.kind == Message::Kind::kNotification)
    return Error{
        .code = Code::kWouldBlock,
        .retry = Retry::kLater,
        .message = fmt::format("mailbox '{}' of the peer is full ({} messages); receive faster "
                               "or raise control.mailbox_messages",
                               name_, capacity_)};
  queue_.push_back(std::move(message));
  if (handler_) {
    drain_to_handler(lock);
  } else {
    changed_.notify_one();
  }
  return {};
}

// One thread at a time hands messages to the handler; others leave theirs in the queue for it.
void MailboxCore::drain_to_handler(std::unique_lock<std::mutex>& lock) {
  if (draining_ != std::thread::id{}) return;
  draining_ = std::this_thread::get_id();
  while (handler_ && !queue_.empty()) {
    const auto handler = handler_;
    Message message = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    (*handler)(std::move(message));
    lock.lock();
  }
  draining_ = {};
  changed_.notify_all();
}

Result<Message> MailboxCore::receive(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const bool ready =
      changed_.wait_until(lock, deadline.when(), [&] { return closed_ || !queue_.empty(); });
  if (ready && !queue_.empty()) {
    Message message = std::move(queue_.front());
    queue_.pop_front();
    return message;
  }
  if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name_));
  return make_error(Code::kDeadline, fmt::format("no message in mailbox '{}'", name_));
}

std::optional<Message> MailboxCore::try_receive() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return std::nullopt;
  Message message = std::move(queue_.front());
  queue_.pop_front();
  return message;
}

void MailboxCore::set_handler(std::function<void(Message)> handler) {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  handler_ = handler ? std::make_shared<std::function<void(Message)>>(std::move(handler)) : nullptr;
  if (handler_) return drain_to_handler(lock);
  // The caller may free what the old handler used: wait until it has returned.
  changed_.wait(lock, [&] {
    return draining_ == std::thread::id{} || draining_ == std::this_thread::get_id();
  });
}

void MailboxCore::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  handler_ = nullptr;
  queue_.clear();
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return draining_ == std::thread::id{} || draining_ == std::this_thread::get_id();
  });
}

std::shared_ptr<MailboxCore> Mailboxes::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto& box = boxes_[name];
  if (!box) {
    box = std::make_shared<MailboxCore>(name, capacity_);
    if (closed_) box->close();
  }
  return box;
}

Result<> Mailboxes::deliver(const std::string& name, Message message) {
  {
    const std::lock_guard lock(mutex_);
    if (boxes_.size() >= kMaxMailboxes && !boxes_.contains(name))
      return make_error(Code::kWouldBlock,
                        fmt::format("there are {} mailboxes already", kMaxMailboxes));
  }
  return get(name)->deliver(std::move(message));
}

void Mailboxes::broadcast(const Message& message) {
  std::vector<std::shared_ptr<MailboxCore>> boxes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, box] : boxes_)
      boxes.push_back(box);
  }
  for (const auto& box : boxes)
    (void)box->deliver(message);
}

void Mailboxes::close() {
  std::map<std::string, std::shared_ptr<MailboxCore>> boxes;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    boxes = boxes_;
  }
  for (const auto& [name, box] : boxes)
    box->close();
}

}  // namespace crossdock::transfer::detail
