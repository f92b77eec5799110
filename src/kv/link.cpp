// The threads behind control messages of the KV layer.
// SPDX-License-Identifier: Apache-2.0
#include "kv/link.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

Link::Link(transfer::Engine& engine, std::string peer_name, std::chrono::milliseconds timeout)
    : engine_(engine), peer_name_(std::move(peer_name)), timeout_(timeout) {
  thread_ = std::thread([this] { run(); });
}

Link::~Link() {
  stop();
  thread_.join();
}

void Link::post(Job job) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void Link::stop() {
  std::deque<Job>
      dropped;  // destroyed without the lock: a job may own the last handle of something
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
  }
  wake_.notify_one();
}

void Link::run() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job(*this);
  }
}

Result<transfer::Peer> Link::peer() {
  if (peer_ && peer_->alive()) return *peer_;
  peer_.reset();
  CROSSDOCK_TRY(opened, engine_.open(peer_name_, Deadline::in(timeout_)));
  peer_ = opened;
  instance_ = opened.instance();
  return opened;
}

Result<> Link::send(std::string_view mailbox, std::string payload,
                    std::chrono::milliseconds timeout) {
  CROSSDOCK_TRY(target, peer());
  return engine_.notify(target, {std::string(mailbox), std::move(payload)}, Deadline::in(timeout));
}

Result<> Link::fence(std::chrono::milliseconds timeout) {
  // By instance: the name dialled is not always the one the peer gives itself.
  if (instance_ != 0) return engine_.fence_instance(instance_, Deadline::in(timeout));
  return engine_.fence(peer_name_, Deadline::in(timeout));
}

void LinkSet::post(const std::string& peer_name, Link::Job job) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  auto& link = links_[peer_name];
  if (link == nullptr) link = std::make_unique<Link>(engine_, peer_name, timeout_);
  link->post(std::move(job));
}

void LinkSet::stop() {
  std::map<std::string, std::unique_ptr<Link>> links;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    links.swap(links_);
  }
  for (const auto& [name, link] : links)
    link->stop();
  links.clear();
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
