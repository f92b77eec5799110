// See mailbox.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/mailbox.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "transfer/call_errors.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr std::size_t kMostLosses = 4096;  // waiting in one mailbox

std::size_t bytes_of(const Message& message) {
  return sizeof(Message) + message.peer.size() + message.payload.size();
}

bool is_loss(const Message& message) {
  return message.kind == Message::Kind::kPeerLost;
}

}  // namespace

void MailboxCore::claim() {
  const std::lock_guard lock(mutex_);
  if (claimed_) return;
  claimed_ = true;
  unclaimed_->fetch_sub(bytes_);
}

// With the mutex held.
Result<> MailboxCore::check_room(std::size_t bytes) {
  const auto full = [](std::string what) {
    return Error{.code = Code::kWouldBlock, .retry = Retry::kLater, .message = std::move(what)};
  };
  if (queue_.size() - lost_.size() >= limits_.messages)
    return full(
        fmt::format("mailbox '{}' of the peer is full ({} messages); receive faster "
                    "or raise control.mailbox_messages",
                    name_, limits_.messages));
  if (bytes_ + bytes > limits_.bytes)
    return full(
        fmt::format("mailbox '{}' of the peer is full ({} bytes); receive faster or raise "
                    "control.mailbox_bytes",
                    name_, bytes_));
  if (!claimed_ && unclaimed_->load() + bytes > limits_.bytes)
    return full(
        fmt::format("mailbox '{}' of the peer is not in use, and those that are not hold "
                    "control.mailbox_bytes together",
                    name_));
  return {};
}

// With the mutex held.
void MailboxCore::push(Message message) {
  const std::size_t bytes = bytes_of(message);
  bytes_ += bytes;
  if (!claimed_) unclaimed_->fetch_add(bytes);
  if (is_loss(message))
    lost_.insert(message.peer_instance);
  else
    ++sent_by_[message.peer_instance];
  queue_.push_back(std::move(message));
}

// With the mutex held; the queue is not empty.
Message MailboxCore::pop() {
  Message message = std::move(queue_.front());
  queue_.pop_front();
  const std::size_t bytes = bytes_of(message);
  bytes_ -= bytes;
  if (!claimed_) unclaimed_->fetch_sub(bytes);
  if (is_loss(message)) {
    lost_.erase(message.peer_instance);
  } else if (const auto sent = sent_by_.find(message.peer_instance); --sent->second == 0) {
    sent_by_.erase(sent);
  }
  return message;
}

void MailboxCore::drop_loss(std::deque<Message>::iterator loss) {
  const std::size_t bytes = bytes_of(*loss);
  bytes_ -= bytes;
  if (!claimed_) unclaimed_->fetch_sub(bytes);
  lost_.erase(loss->peer_instance);
  queue_.erase(loss);
}

Result<> MailboxCore::deliver(Message message) {
  Lock lock(mutex_);
  if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name_));
  CROSSDOCK_CHECK_OK(check_room(bytes_of(message)));
  push(std::move(message));
  handler_ ? drain_to_handler(lock) : changed_.notify_one();
  return {};
}

void MailboxCore::deliver_loss(Message message) {
  Lock lock(mutex_);
  if (closed_ || (!claimed_ && !sent_by_.contains(message.peer_instance))) return;
  if (lost_.contains(message.peer_instance))
    drop_loss(std::find_if(queue_.begin(), queue_.end(), [&](const Message& queued) {
      return is_loss(queued) && queued.peer_instance == message.peer_instance;
    }));
  else if (lost_.size() >= kMostLosses)
    drop_loss(std::find_if(queue_.begin(), queue_.end(), is_loss));
  push(std::move(message));
  handler_ ? drain_to_handler(lock) : changed_.notify_one();
}

// One thread at a time hands messages to the handler; others leave theirs in the queue for it.
void MailboxCore::drain_to_handler(Lock& lock) {
  if (draining_ != std::thread::id{}) return;
  draining_ = std::this_thread::get_id();
  while (handler_ && !queue_.empty()) {
    auto handler = handler_;
    Message message = pop();
    lock.unlock();
    (*handler)(std::move(message));
    handler.reset();  // it may own what must not be destroyed under the lock
    lock.lock();
  }
  draining_ = {};
  changed_.notify_all();
}

// The caller may free what a handler used: waits until it has returned.
void MailboxCore::wait_for_handler(Lock& lock) {
  changed_.wait(lock, [&] {
    return draining_ == std::thread::id{} || draining_ == std::this_thread::get_id();
  });
}

Result<Message> MailboxCore::receive(Deadline deadline) {
  if (fork_.forked()) return forked_error();
  Lock lock(mutex_);
  const auto ready = [&] { return closed_ || !queue_.empty(); };
  if (!ready() && !deadline.passed() && std::this_thread::get_id() == control_)
    return control_thread_error("Mailbox::receive()");
  if (changed_.wait_until(lock, deadline.when(), ready) && !queue_.empty()) return pop();
  if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name_));
  return make_error(Code::kDeadline, fmt::format("no message in mailbox '{}'", name_));
}

std::optional<Message> MailboxCore::try_receive() {
  if (fork_.forked()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return std::nullopt;
  return pop();
}

Result<std::uint64_t> MailboxCore::set_handler(Handler handler) {
  if (fork_.forked()) return forked_error();
  auto fresh = std::make_shared<Handler>(std::move(handler));
  Lock lock(mutex_);
  if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name_));
  if (handler_)
    return make_error(Code::kBusy, fmt::format("the messages of mailbox '{}' go elsewhere already; "
                                               "end that subscription first, or use another "
                                               "mailbox",
                                               name_));
  handler_ = std::move(fresh);
  const std::uint64_t token = ++handler_token_;
  drain_to_handler(lock);
  return token;
}

void MailboxCore::clear_handler(std::uint64_t token) {
  if (fork_.forked()) return;
  std::shared_ptr<Handler> old;  // destroyed without the lock
  Lock lock(mutex_);
  if (!handler_ || handler_token_ != token) return;
  old = std::move(handler_);
  wait_for_handler(lock);
  lock.unlock();
}

void MailboxCore::close() {
  std::shared_ptr<Handler> old;  // destroyed without the lock
  std::deque<Message> dropped;
  Lock lock(mutex_);
  closed_ = true;
  old = std::move(handler_);
  dropped.swap(queue_);
  if (!claimed_) unclaimed_->fetch_sub(bytes_);
  bytes_ = 0;
  sent_by_.clear();
  lost_.clear();
  changed_.notify_all();
  wait_for_handler(lock);
  lock.unlock();
}

std::shared_ptr<MailboxCore> Mailboxes::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto& box = boxes_[name];
  if (!box) {
    box = std::make_shared<MailboxCore>(name, limits_, unclaimed_, control_);
    if (closed_) box->close();
  }
  box->claim();
  return box;
}

Result<> Mailboxes::deliver(const std::string& name, Message message) {
  std::shared_ptr<MailboxCore> box;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return make_error(Code::kClosed, fmt::format("mailbox '{}' is closed", name));
    const auto found = boxes_.find(name);
    if (found != boxes_.end()) {
      box = found->second;
    } else if (boxes_.size() >= kMaxMailboxes) {
      return make_error(Code::kWouldBlock,
                        fmt::format("there are {} mailboxes already", kMaxMailboxes));
    } else {
      box = std::make_shared<MailboxCore>(name, limits_, unclaimed_, control_);
      boxes_.emplace(name, box);
    }
  }
  return box->deliver(std::move(message));
}

std::shared_ptr<MailboxCore> Mailboxes::watch() {
  auto box = std::make_shared<MailboxCore>("", limits_, unclaimed_, control_);
  box->claim();
  const std::lock_guard lock(mutex_);
  if (closed_) box->close();
  std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
  watchers_.push_back(box);
  return box;
}

// With the mutex held.
std::vector<std::shared_ptr<MailboxCore>> Mailboxes::watchers() {
  std::vector<std::shared_ptr<MailboxCore>> alive;
  for (const auto& weak : watchers_)
    if (auto watcher = weak.lock()) alive.push_back(std::move(watcher));
  return alive;
}

void Mailboxes::broadcast(const Message& loss) {
  std::vector<std::shared_ptr<MailboxCore>> boxes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, box] : boxes_)
      boxes.push_back(box);
    for (auto& watcher : watchers())
      boxes.push_back(std::move(watcher));
  }
  for (const auto& box : boxes)
    box->deliver_loss(loss);
}

void Mailboxes::tell_watchers(const Message& message) {
  std::vector<std::shared_ptr<MailboxCore>> boxes;
  {
    const std::lock_guard lock(mutex_);
    boxes = watchers();
  }
  for (const auto& box : boxes)
    (void)box->deliver(message);
}

void Mailboxes::close() {
  std::vector<std::shared_ptr<MailboxCore>> boxes;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    boxes = watchers();
    for (const auto& [name, box] : boxes_)
      boxes.push_back(box);
  }
  for (const auto& box : boxes)
    box->close();
}

}  // namespace crossdock::transfer::detail
