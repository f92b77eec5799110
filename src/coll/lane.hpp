// Lane: where the calls of one rank put their work, in order: a CUDA stream, whose copy engines and
// word operations need no SM, or on the CPU a thread that does the same. Work is posted and runs
// later; waits for words have no deadline here, watch.hpp bounds them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include <crossdock/core/deadline.hpp>

#include "coll/window.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"

namespace crossdock::coll {

using cuda::WordOp;

// The lane of a rank on the CPU: a thread, started by create(). Thread-safe.
class CpuLane {
 public:
  static Result<std::unique_ptr<CpuLane>> create(u32 rank);
  ~CpuLane();  // ends the wait that runs, drops the rest
  CpuLane(const CpuLane&) = delete;
  CpuLane& operator=(const CpuLane&) = delete;

  void post(std::function<void()> work);
  // By the lane's own thread: until the word has the value, or the lane ends.
  void wait_word(const u64* word, u64 value) const;
  // Until all posted work has run.
  Result<> drain(Deadline deadline);

 private:
  CpuLane() = default;
  void loop();
  [[nodiscard]] bool stopping() const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// One of both, for the duration of a call or of a session. Single-owner.
class Lane {
 public:
  explicit Lane(CpuLane* cpu) : cpu_(cpu) {}
  explicit Lane(const cuda::Stream* stream) : stream_(stream) {}
  // A stream of the caller.
  explicit Lane(cuda::Stream&& borrowed) : kept_(std::move(borrowed)) {}

  Result<> copy(void* to, const void* from, u64 bytes) const;
  Result<> words(std::vector<WordOp> ops) const;
  [[nodiscard]] CpuLane* cpu() const { return cpu_; }
  // Null on the CPU.
  [[nodiscard]] const cuda::Stream* stream() const { return kept_ ? &*kept_ : stream_; }

 private:
  CpuLane* cpu_ = nullptr;
  const cuda::Stream* stream_ = nullptr;
  std::optional<cuda::Stream> kept_;
};

}  // namespace crossdock::coll
