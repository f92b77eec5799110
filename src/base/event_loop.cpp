// See event_loop.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "base/event_loop.hpp"

#include <array>
#include <cerrno>
#include <condition_variable>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/worker_thread.hpp"

namespace crossdock::base {
namespace {

constexpr std::uint64_t kWakeTag = 0;

std::uint64_t tag_of(int fd, std::uint32_t generation) {
  return (std::uint64_t{generation} << 32) | static_cast<std::uint32_t>(fd);
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::create(const std::string& name) {
  std::unique_ptr<EventLoop> loop(new EventLoop);
  loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_) return errno_error(errno, "epoll_create1 for the control loop");
  loop->wakeup_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->wakeup_) return errno_error(errno, "eventfd for the control loop");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeTag;
  if (::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wakeup_.get(), &event) != 0)
    return errno_error(errno, "epoll_ctl for the control loop");
  CROSSDOCK_TRY(thread, start_worker(name, [raw = loop.get()] { raw->loop(); }));
  loop->thread_ = std::move(thread);
  return loop;
}

EventLoop::~EventLoop() {
  stop_and_join();
}

void EventLoop::stop_and_join() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void EventLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    accepting_ = false;
  }
  stopping_.store(true);
  wake();
}

bool EventLoop::on_loop_thread() const noexcept {
  return std::this_thread::get_id() == thread_.get_id();
}

void EventLoop::wake() {
  const std::uint64_t one = 1;
  // EAGAIN means the counter is full: the loop is awake already.
  [[maybe_unused]] const auto written = ::write(wakeup_.get(), &one, sizeof one);
}

bool EventLoop::post(Task task) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    if (!accepting_) return false;
    first = posted_.empty();
    posted_.push_back(std::move(task));
  }
  if (first) wake();
  return true;
}

bool EventLoop::run(const Task& task) {
  if (on_loop_thread()) return task(), true;
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool ran = false;
    bool over = false;
  };
  auto done = std::make_shared<Done>();
  // Set when the task is destroyed, run or not: a stopping loop drops what it did not run.
  std::shared_ptr<void> guard(nullptr, [done](void*) {
    const std::lock_guard lock(done->mutex);
    done->over = true;
    done->changed.notify_all();
  });
  if (!post([done, guard, &task] {
        task();
        const std::lock_guard lock(done->mutex);
        done->ran = true;
      }))
    return false;
  guard.reset();
  std::unique_lock lock(done->mutex);
  done->changed.wait(lock, [&] { return done->over; });
  return done->ran;
}

Result<> EventLoop::watch(int fd, std::uint32_t events, FdCallback callback) {
  auto watch = std::make_shared<Watch>();
  watch->generation = next_generation_++;
  watch->callback = std::move(callback);
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag_of(fd, watch->generation);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return errno_error(errno, "epoll_ctl: watch a descriptor");
  watches_[fd] = std::move(watch);
  return {};
}

void EventLoop::change(int fd, std::uint32_t events) {
  const auto found = watches_.find(fd);
  if (found == watches_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag_of(fd, found->second->generation);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::unwatch(int fd) {
  if (watches_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::call_at(Deadline when, Task task) {
  const TimerId id{when, next_timer_++};
  timers_.emplace(id, std::move(task));
  return id;
}

void EventLoop::cancel(TimerId timer) {
  timers_.erase(timer);
}

int EventLoop::wait_ms() const {
  if (timers_.empty()) return -1;
  return timers_.begin()->first.first.remaining_ms(60'000);
}

void EventLoop::run_posted() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (auto& task : tasks) {
    task();
    task = nullptr;
  }
}

void EventLoop::run_due_timers() {
  while (!timers_.empty() && timers_.begin()->first.first.passed()) {
    auto node = timers_.extract(timers_.begin());
    node.mapped()();
  }
}

void EventLoop::dispatch(std::uint64_t tag, std::uint32_t events) {
  if (tag == kWakeTag) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto drained = ::read(wakeup_.get(), &count, sizeof count);
    return;
  }
  const auto found = watches_.find(static_cast<int>(tag & 0xffffffffu));
  // An event of a descriptor that an earlier callback of this round closed and perhaps reused.
  if (found == watches_.end() || found->second->generation != (tag >> 32)) return;
  const auto watch = found->second;  // the callback may unwatch itself
  watch->callback(events);
}

void EventLoop::loop() {
  std::array<epoll_event, 64> events;
  while (!stopping_.load()) {
    const int n =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms());
    for (int i = 0; i < n; ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      dispatch(event.data.u64, event.events);
    }
    run_posted();
    run_due_timers();
  }
  {
    const std::lock_guard lock(mutex_);
    posted_.clear();
  }
  watches_.clear();
  timers_.clear();
}

}  // namespace crossdock::base
