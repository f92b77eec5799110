// A GPU as a RankDevice. Copies and fills go through a stream of the rank's own and are waited for.
// Copies of memory that the driver does not know are staged in pinned memory: it might return only
// when they are done, whatever the deadline.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fmt/format.h>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "symm/gpu.hpp"

namespace crossdock::symm {
namespace {

// Waits for the zeroing of a fresh block: nothing is in front of it.
constexpr std::chrono::seconds kZeroing{30};
constexpr u64 kStageBytes = 1 << 20;

class GpuDevice final : public RankDevice {
 public:
  GpuDevice(cuda::Context context, cuda::Stream stream, cuda::PinnedMemory stage)
      : context_(std::move(context)), stream_(std::move(stream)), stage_(std::move(stage)) {}

  std::string describe() const override {
    const cuda::Device& d = context_.device();
    return fmt::format("GPU {} ({}, {})", d.ordinal, d.name, d.uuid);
  }
  Result<LocalMemory> allocate(u64 bytes) override {
    CROSSDOCK_TRY(memory, cuda::DeviceMemory::allocate(context_, bytes));
    CROSSDOCK_CHECK_OK(zero(memory.as<void>(), bytes, Deadline::in(kZeroing)));
    void* const address = memory.as<void>();
    return LocalMemory(address, bytes,
                       std::make_shared<const cuda::DeviceMemory>(std::move(memory)));
  }
  Result<LocalMemory> allocate_in_order(u64 bytes, const cuda::Stream* stream) override {
    CROSSDOCK_TRY(memory, cuda::DeviceMemory::allocate_in_order(stream ? *stream : stream_, bytes));
    void* const address = memory.as<void>();
    return LocalMemory(address, bytes,
                       std::make_shared<const cuda::DeviceMemory>(std::move(memory)));
  }
  Result<HostMemory> allocate_host(u64 bytes) override {
    CROSSDOCK_TRY(memory, cuda::PinnedMemory::allocate(context_, bytes));
    void* const host = memory.host();
    void* const device = reinterpret_cast<void*>(memory.device());
    return HostMemory(host, device, bytes,
                      std::make_shared<const cuda::PinnedMemory>(std::move(memory)));
  }
  Result<> zero(void* target, u64 bytes, Deadline deadline) override {
    CROSSDOCK_CHECK_OK(cuda::fill_bytes_async(cuda::device_ptr(target), 0, bytes, stream_));
    return stream_.synchronize(deadline);
  }
  Result<> write(void* target, const void* source, u64 bytes, Deadline deadline) override {
    if (is_known(source)) return copy(target, source, bytes, deadline);
    return in_parts(Stage::kWrites, bytes, deadline,
                    [&](void* stage, u64 at, u64 part) -> Result<> {
                      std::memcpy(stage, static_cast<const u8*>(source) + at, part);
                      return copy(static_cast<u8*>(target) + at, stage, part, deadline);
                    });
  }
  Result<> read(void* target, const void* source, u64 bytes, Deadline deadline) override {
    if (is_known(target)) return copy(target, source, bytes, deadline);
    return in_parts(Stage::kReads, bytes, deadline, [&](void* stage, u64 at, u64 part) -> Result<> {
      CROSSDOCK_CHECK_OK(copy(stage, static_cast<const u8*>(source) + at, part, deadline));
      std::memcpy(static_cast<u8*>(target) + at, stage, part);
      return {};
    });
  }
  const cuda::Context* context() const override { return &context_; }
  const cuda::Stream* stream() const override { return &stream_; }

 private:
  enum class Stage { kReads, kWrites };
  // One caller after the other has the stage.
  template <class Part>
  Result<> in_parts(Stage use, u64 bytes, Deadline deadline, const Part& part) {
    {
      std::unique_lock lock(stage_mutex_);
      if (!stage_free_.wait_until(lock, deadline.when(), [&] { return !stage_taken_; }))
        return make_error(Code::kDeadline, "a copy from or to GPU memory waits for another one");
      stage_taken_ = true;
    }
    Result<> done = through_stage(use, bytes, deadline, part);
    {
      const std::lock_guard lock(stage_mutex_);
      stage_taken_ = false;
    }
    stage_free_.notify_one();
    return done;
  }
  // By the caller that has the stage. After a failure a copy may still be under way in it: reads
  // come after that one anyway, writes wait for it.
  template <class Part>
  Result<> through_stage(Stage use, u64 bytes, Deadline deadline, const Part& part) {
    if (stage_busy_ && use == Stage::kWrites) CROSSDOCK_CHECK_OK(stream_.synchronize(deadline));
    for (u64 at = 0; at < bytes; at += kStageBytes) {
      stage_busy_ = true;
      CROSSDOCK_CHECK_OK(part(stage_.host(), at, std::min(kStageBytes, bytes - at)));
      stage_busy_ = false;
    }
    return {};
  }
  // Memory of a GPU, or pinned: copied as it is.
  [[nodiscard]] bool is_known(const void* p) const {
    int ordinal = -1;
    return context_.driver().cuPointerGetAttribute(&ordinal, cuda::PointerAttribute::kDeviceOrdinal,
                                                   cuda::device_ptr(p)) == cuda::Status::kSuccess;
  }
  Result<> copy(void* target, const void* source, u64 bytes, Deadline deadline) {
    CROSSDOCK_CHECK_OK(
        cuda::copy_async(cuda::device_ptr(target), cuda::device_ptr(source), bytes, stream_));
    return stream_.synchronize(deadline);
  }

  cuda::Context context_;
  cuda::Stream stream_;
  cuda::PinnedMemory stage_;
  bool stage_busy_ = false;  // a copy may be under way in it
  // Not a std::timed_mutex: ThreadSanitizer does not know how that one is locked.
  std::mutex stage_mutex_;
  std::condition_variable stage_free_;
  bool stage_taken_ = false;
};

}  // namespace

Result<std::unique_ptr<RankDevice>> make_gpu_device(const cuda::Driver& driver, int ordinal) {
  CROSSDOCK_TRY(context, cuda::Context::primary(driver, ordinal));
  {
    // Allocations would end the capture of any stream that the legacy default stream waits for.
    CROSSDOCK_TRY(guard, context.enter());
    CROSSDOCK_CHECK_OK(cuda::refuse_capture(driver, nullptr, "making a group of ranks"));
  }
  CROSSDOCK_TRY(stream, cuda::Stream::create(context));
  CROSSDOCK_TRY(stage, cuda::PinnedMemory::allocate(context, kStageBytes));
  return std::unique_ptr<RankDevice>(
      std::make_unique<GpuDevice>(std::move(context), std::move(stream), std::move(stage)));
}

}  // namespace crossdock::symm
