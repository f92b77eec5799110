// See link.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "kv/link.hpp"

#include <iterator>

#include "base/worker_thread.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

Result<transfer::Peer> Link::peer() {
  if (peer_ && peer_->alive()) return *peer_;
  peer_.reset();
  CROSSDOCK_TRY(opened, engine_.open(peer_name_, Deadline::in(timeout_)));
  peer_ = opened;
  epoch_ = ++last_epoch_;
  return opened;
}

Result<transfer::Peer> Link::peer(std::uint64_t instance, const std::string& address) {
  auto named = peer();
  if (named.ok() && named->instance() == instance) return named;
  if (!address.empty() && address != peer_name_) {
    auto opened = engine_.open(address, Deadline::in(timeout_));
    if (opened.ok() && opened->instance() == instance) {
      peer_ = *opened;
      epoch_ = ++last_epoch_;
      return opened;
    }
  }
  if (!named.ok()) return named;
  return make_error(Code::kPeerLost, "another process answers at its address");
}

Result<> Link::send(std::string_view mailbox, std::string payload,
                    std::chrono::milliseconds timeout) {
  CROSSDOCK_TRY(target, peer());
  return engine_.notify(target, {std::string(mailbox), std::move(payload)}, Deadline::in(timeout));
}

Result<> Link::fence(std::uint64_t instance, std::chrono::milliseconds timeout) {
  return engine_.fence_instance(instance, Deadline::in(timeout));
}

Result<> LinkSet::start() {
  const Lock lock(mutex_);
  return add_thread();
}

// With the mutex held.
Result<> LinkSet::add_thread() {
  const auto self = threads_.emplace(threads_.end());
  auto made = base::start_worker("xd-kv-link", [this, self] { work(self); });
  if (!made.ok()) {
    threads_.erase(self);
    return std::move(made).error();
  }
  *self = std::move(*made);
  return {};
}

void LinkSet::post(const std::string& peer_name, Link::Job job) {
  std::vector<std::unique_ptr<Link>> gone;  // destroyed without the lock, as all peers are
  Threads ended;
  {
    const Lock lock(mutex_);
    if (stopping_) return;
    if (!links_.contains(peer_name)) sweep(gone);
    auto& link = links_[peer_name];
    if (link == nullptr) link = std::make_unique<Link>(engine_, peer_name, timeout_, last_epoch_);
    link->jobs_.push_back(std::move(job));
    if (!link->busy_) {
      link->busy_ = true;
      ready_.push_back(link.get());
    }
    ended.swap(ended_);
    // When no more threads are to be had, the job waits for one of those there are.
    if (ready_.size() > waiting_ && threads_.size() < kMostThreads) static_cast<void>(add_thread());
  }
  wake_.notify_one();
  for (std::thread& thread : ended)
    thread.join();
}

// With the mutex held: takes out the links that have nothing to do and reach nobody.
void LinkSet::sweep(std::vector<std::unique_ptr<Link>>& gone) {
  for (auto it = links_.begin(); it != links_.end();) {
    if (it->second->busy_ || !it->second->reaches_nobody()) {
      ++it;
      continue;
    }
    gone.push_back(std::move(it->second));
    it = links_.erase(it);
  }
}

void LinkSet::work(Threads::iterator self) {
  Lock lock(mutex_);
  while (wait_for_work(lock))
    run_one(lock);
  if (stopping_) return;
  ended_.splice(ended_.end(), threads_, self);
  std::vector<std::unique_ptr<Link>> gone;
  sweep(gone);
  lock.unlock();
}

// False when this thread shall end: the set stops, or there is too little to do. One always stays.
bool LinkSet::wait_for_work(Lock& lock) {
  const auto wanted = [this] { return stopping_ || !ready_.empty(); };
  while (!wanted()) {
    ++waiting_;
    const bool last = threads_.size() == 1;
    const bool idle = !last && !wake_.wait_for(lock, kIdle, wanted);
    if (last) wake_.wait(lock, wanted);
    --waiting_;
    if (idle && threads_.size() > 1) return false;
  }
  return !stopping_;
}

// Runs the first job of the link that has waited longest.
void LinkSet::run_one(Lock& lock) {
  Link* const link = ready_.front();
  ready_.pop_front();
  auto job = std::move(link->jobs_.front());
  link->jobs_.pop_front();
  lock.unlock();
  job(*link);
  job = nullptr;
  lock.lock();
  if (!link->jobs_.empty() && !stopping_) {
    ready_.push_back(link);
    return;
  }
  link->busy_ = false;
  if (stopping_ || !link->reaches_nobody()) return;
  const auto found = links_.find(link->peer_name());
  auto gone = std::move(found->second);
  links_.erase(found);
  lock.unlock();  // destroyed without it
  gone.reset();
  lock.lock();
}

void LinkSet::stop() {
  std::vector<std::deque<Link::Job>> dropped;  // a job may own the last handle of something
  std::map<std::string, std::unique_ptr<Link>> links;
  Threads threads;
  {
    const Lock lock(mutex_);
    stopping_ = true;
    ready_.clear();
    for (const auto& [name, link] : links_)
      dropped.push_back(std::exchange(link->jobs_, {}));
    threads.swap(threads_);
    threads.splice(threads.end(), ended_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads)
    thread.join();
  const Lock lock(mutex_);
  links.swap(links_);
}

LinkSet::Size LinkSet::size() const {
  const Lock lock(mutex_);
  return {links_.size(), threads_.size()};
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
