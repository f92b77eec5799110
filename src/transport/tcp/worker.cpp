// See worker.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/worker.hpp"

#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "base/clock.hpp"
#include "base/worker_thread.hpp"

namespace crossdock::transport::tcp {
namespace {

constexpr Worker::Token kWakeToken = 0;

}  // namespace

struct Worker::Events {
  std::array<epoll_event, kMaxEvents> list{};
};

Result<std::unique_ptr<Worker>> Worker::start(unsigned index) {
  std::unique_ptr<Worker> worker(new Worker());
  worker->events_ = std::make_unique<Events>();
  worker->epoll_ = base::UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!worker->epoll_) return errno_error(errno, "make an epoll set for a tcp worker");
  worker->wake_ = base::UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!worker->wake_) return errno_error(errno, "make an eventfd for a tcp worker");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeToken;
  if (::epoll_ctl(worker->epoll_.get(), EPOLL_CTL_ADD, worker->wake_.get(), &event) != 0)
    return errno_error(errno, "watch the eventfd of a tcp worker");
  CROSSDOCK_TRY(thread, base::start_worker(fmt::format("xd-tcp-{}", index),
                                           [w = worker.get()] { w->run(); }));
  worker->thread_ = std::move(thread);
  return worker;
}

Worker::~Worker() {
  stop();
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
  turn_.clear();
  again_.clear();
  std::vector<Slot> dropped;  // lanes are destroyed without the lock
  const std::lock_guard lock(mutex_);
  dropped.swap(slots_);
}

Worker::Slot* Worker::find(Token token) noexcept {
  const auto index = static_cast<std::uint32_t>(token);
  const auto generation = static_cast<std::uint32_t>(token >> 32);
  if (index >= slots_.size() || slots_[index].generation != generation) return nullptr;
  return slots_[index].lane ? &slots_[index] : nullptr;
}

Result<Worker::Token> Worker::add(std::shared_ptr<Pollable> lane, int fd) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const std::uint32_t index = free_.back();
  Slot& slot = slots_[index];
  const Token token = Token{slot.generation} << 32 | index;
  epoll_event event{};
  // Edges: nothing has to be changed between sending and receiving, and a turn ends at EAGAIN.
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return errno_error(errno, "watch a data lane");
  slot.lane = std::move(lane);
  slot.kicked = false;
  free_.pop_back();
  return token;
}

void Worker::remove(Token token) {
  std::shared_ptr<Pollable> last;  // its destructor runs without the lock
  const std::lock_guard lock(mutex_);
  Slot* slot = find(token);
  if (slot == nullptr) return;
  last = std::move(slot->lane);
  slot->lane = nullptr;
  if (++slot->generation == 0) slot->generation = 1;
  free_.push_back(static_cast<std::uint32_t>(token));
}

void Worker::kick(Token token) {
  {
    const std::lock_guard lock(mutex_);
    Slot* slot = find(token);
    if (slot == nullptr || slot->kicked) return;
    slot->kicked = true;
    kicked_.push_back(token);
    if (!sleeping_) return;
    sleeping_ = false;
  }
  ::eventfd_write(wake_.get(), 1);
}

void Worker::spin_for(std::chrono::nanoseconds ns) noexcept {
  spin_until_ns_ = base::now_ns() + static_cast<std::uint64_t>(ns.count());
}

// How long epoll_wait() may sleep. Whoever kicks after this sees `sleeping_` and wakes it.
int Worker::prepare_sleep() {
  if (!again_.empty()) return 0;
  if (spin_until_ns_ != 0) {
    if (base::now_ns() < spin_until_ns_) return 0;
    spin_until_ns_ = 0;
  }
  const std::lock_guard lock(mutex_);
  if (!kicked_.empty()) return 0;
  sleeping_ = true;
  return -1;
}

// Collects whose turn it is.
void Worker::pick(int events) {
  turn_.clear();
  turn_.swap(again_);
  const std::lock_guard lock(mutex_);
  sleeping_ = false;
  for (int i = 0; i < events; ++i) {
    const Token token = events_->list[static_cast<std::size_t>(i)].data.u64;
    if (token == kWakeToken) {
      eventfd_t count = 0;
      ::eventfd_read(wake_.get(), &count);
    } else if (Slot* slot = find(token)) {
      turn_.push_back(slot->lane);
    }
  }
  for (const Token token : kicked_) {
    Slot* slot = find(token);
    if (slot == nullptr) continue;
    slot->kicked = false;
    turn_.push_back(slot->lane);
  }
  kicked_.clear();
}

void Worker::run() {
  while (!stopping_.load(std::memory_order_relaxed)) {
    const int n = ::epoll_wait(epoll_.get(), events_->list.data(), kMaxEvents, prepare_sleep());
    pick(n > 0 ? n : 0);
    for (auto& lane : turn_)
      if (lane->on_ready() == Turn::kMore) again_.push_back(std::move(lane));
    turn_.clear();
  }
}

Result<Worker*> WorkerPool::next() {
  const std::lock_guard lock(mutex_);
  const unsigned index = next_++ % threads_;
  if (index >= workers_.size()) {
    CROSSDOCK_TRY(worker, Worker::start(index));
    workers_.push_back(std::move(worker));
  }
  return workers_[std::min<std::size_t>(index, workers_.size() - 1)].get();
}

// A turn may end a transfer that holds the last reference to lanes of other workers, so that all of
// them have come to rest before the first one goes.
void WorkerPool::stop() {
  const std::lock_guard lock(mutex_);
  for (const auto& worker : workers_)
    worker->stop();
  workers_.clear();
}

}  // namespace crossdock::transport::tcp
