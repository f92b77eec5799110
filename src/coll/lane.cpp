// Both kinds of lanes. See lane.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/lane.hpp"

#include <chrono>
#include <cstring>
#include <fmt/format.h>
#include <utility>

#include "base/worker_thread.hpp"

namespace crossdock::coll {

using namespace std::chrono_literals;

Result<std::unique_ptr<CpuLane>> CpuLane::create(u32 rank) {
  std::unique_ptr<CpuLane> lane(new CpuLane);
  CROSSDOCK_TRY(thread, base::start_worker(fmt::format("xd-lane-{}", rank),
                                           [self = lane.get()] { self->loop(); }));
  lane->thread_ = std::move(thread);
  return lane;
}

CpuLane::~CpuLane() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    work_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CpuLane::post(std::function<void()> work) {
  {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void CpuLane::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !work_.empty(); });
    if (stopping_) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    running_ = true;
    lock.unlock();
    work();
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

bool CpuLane::stopping() const {
  const std::scoped_lock lock(mutex_);
  return stopping_;
}

// Busy at first, then with pauses, since lanes may be more than cores. Acquire: pairs with the
// release of the lane that writes the word.
void CpuLane::wait_word(const u64* word, u64 value) const {
  for (u32 turn = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) != value; ++turn) {
    if (turn < 64) {
      std::this_thread::yield();
      continue;
    }
    if (stopping()) return;
    std::this_thread::sleep_for(50us);
  }
}

Result<> CpuLane::drain(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const bool done =
      changed_.wait_until(lock, deadline.when(), [&] { return work_.empty() && !running_; });
  if (done) return {};
  return make_error(Code::kDeadline, "work on the lane of a rank did not finish in time");
}

Result<> Lane::copy(void* to, const void* from, u64 bytes) const {
  if (bytes == 0 || to == from) return {};
  if (cpu_ == nullptr)
    return cuda::copy_async(cuda::device_ptr(to), cuda::device_ptr(from), bytes, *stream());
  cpu_->post([=] { std::memcpy(to, from, bytes); });
  return {};
}

// Release: pairs with the acquire of wait_word().
Result<> Lane::words(std::vector<WordOp> ops) const {
  if (ops.empty()) return {};
  if (cpu_ == nullptr) return cuda::words_async(*stream(), ops);
  cpu_->post([cpu = cpu_, ops = std::move(ops)] {
    for (const WordOp& op : ops)
      if (op.kind == WordOp::Kind::kWait) {
        cpu->wait_word(static_cast<const u64*>(op.word), op.value);
      } else {
        __atomic_store_n(static_cast<u64*>(op.word), u64{op.value}, __ATOMIC_RELEASE);
      }
  });
  return {};
}

}  // namespace crossdock::coll
