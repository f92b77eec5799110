// Streams, events, capture queries. See stream.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream.hpp"

#include <chrono>
#include <fmt/format.h>
#include <thread>
#include <utility>

namespace crossdock::cuda {
namespace {

using namespace std::chrono_literals;

// Polls `done` until true, an error, or the deadline: busy at first, since most waits are short,
// then at most every 200 us. The state is asked once more after the deadline passed, so that what
// was ready in time never fails.
template <class Done>
Result<void> poll(Deadline deadline, std::string_view what, const Done& done) {
  auto pause = 0us;
  const auto start = Deadline::Clock::now();
  for (;;) {
    const bool last = deadline.passed();
    CROSSDOCK_TRY(ready, done());
    if (ready) return {};
    if (last) {
      const auto waited = std::chrono::duration<double>(Deadline::Clock::now() - start).count();
      return make_error(Code::kDeadline,
                        fmt::format("{} did not finish within {:.3f} s", what, waited));
    }
    if (Deadline::Clock::now() - start < 50us) continue;
    pause = std::min<std::chrono::microseconds>(pause + 10us, 200us);
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, deadline.remaining()));
  }
}

}  // namespace

Result<bool> is_capturing(const Driver& driver, StreamHandle stream) {
  CaptureStatus status = CaptureStatus::kNone;
  const Status result = driver.cuStreamIsCapturing(stream, &status);
  if (result == Status::kStreamCaptureImplicit) return true;
  if (result != Status::kSuccess) return driver.error(result, "ask whether a stream is captured");
  return status != CaptureStatus::kNone;
}

Result<std::uint64_t> capture_of(const Driver& driver, StreamHandle stream) {
  CaptureStatus status = CaptureStatus::kNone;
  std::uint64_t id = 0;
  const Status result = driver.cuStreamGetCaptureInfo(stream, &status, &id);
  // Of the legacy stream, whose work no capture takes.
  if (result == Status::kStreamCaptureImplicit) return std::uint64_t{0};
  if (result != Status::kSuccess)
    return driver.error(result, "ask which capture a stream is part of");
  return status == CaptureStatus::kNone ? 0 : id + 1;
}

Result<void> refuse_capture(const Driver& driver, StreamHandle stream, std::string_view what) {
  CROSSDOCK_TRY(capturing, is_capturing(driver, stream));
  if (!capturing) return {};
  return invalid_argument(
      fmt::format("{} is not possible while its stream is being captured into a "
                  "CUDA graph: call it once before the capture begins",
                  what));
}

Result<Stream> Stream::create(const Context& context, const StreamOptions& options) {
  CROSSDOCK_TRY(guard, context.enter());
  const Driver& driver = context.driver();
  int priority = 0;
  if (options.high_priority) {
    int least = 0;
    CROSSDOCK_CUDA(driver, cuCtxGetStreamPriorityRange(&least, &priority),
                   "ask the range of stream priorities");
  }
  StreamHandle handle = nullptr;
  CROSSDOCK_CUDA(
      driver,
      cuStreamCreateWithPriority(&handle, options.non_blocking ? kStreamNonBlocking : 0, priority),
      fmt::format("create a stream on GPU {}", context.ordinal()));
  return Stream(context, handle, true);
}

Stream Stream::borrow(const Context& context, StreamHandle handle) {
  return Stream(context, handle, false);
}

Stream::Stream(Stream&& other) noexcept
    : context_(other.context_),
      handle_(other.handle_),
      owned_(std::exchange(other.owned_, false)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  if (this == &other) return *this;
  destroy();
  context_ = other.context_;
  handle_ = other.handle_;
  owned_ = std::exchange(other.owned_, false);
  return *this;
}

Stream::~Stream() {
  destroy();
}

void Stream::destroy() noexcept {
  if (!std::exchange(owned_, false)) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(driver().cuStreamDestroy(handle_));
}

Result<bool> Stream::idle() const {
  CROSSDOCK_TRY(guard, context_.enter());
  const Status status = driver().cuStreamQuery(handle_);
  if (status == Status::kNotReady) return false;
  CROSSDOCK_CHECK_OK(
      driver().check(status, fmt::format("work on a stream of GPU {}", context_.ordinal())));
  return true;
}

Result<void> Stream::synchronize(Deadline deadline) const {
  CROSSDOCK_CHECK_OK(refuse_capture(driver(), handle_, "waiting for a stream"));
  return poll(deadline, fmt::format("work on a stream of GPU {}", context_.ordinal()),
              [this] { return idle(); });
}

Result<void> Stream::wait(const Event& event) const {
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(driver(), cuStreamWaitEvent(handle_, event.handle(), 0),
                 "make a stream wait for an event");
  return {};
}

Result<Event> Event::create(const Context& context, Timing timing) {
  CROSSDOCK_TRY(guard, context.enter());
  EventHandle handle = nullptr;
  const unsigned flags = timing == Timing::kOn ? 0 : kEventDisableTiming;
  CROSSDOCK_CUDA(context.driver(), cuEventCreate(&handle, flags),
                 fmt::format("create an event on GPU {}", context.ordinal()));
  return Event(context, handle, timing);
}

Event::Event(Event&& other) noexcept
    : context_(other.context_),
      handle_(std::exchange(other.handle_, nullptr)),
      timing_(other.timing_) {}

Event& Event::operator=(Event&& other) noexcept {
  if (this == &other) return *this;
  destroy();
  context_ = other.context_;
  handle_ = std::exchange(other.handle_, nullptr);
  timing_ = other.timing_;
  return *this;
}

Event::~Event() {
  destroy();
}

void Event::destroy() noexcept {
  if (!handle_) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(driver().cuEventDestroy(std::exchange(handle_, nullptr)));
}

Result<void> Event::record(const Stream& stream) const {
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(driver(), cuEventRecord(handle_, stream.handle()), "record an event on a stream");
  return {};
}

Result<bool> Event::reached() const {
  const Status status = driver().cuEventQuery(handle_);
  if (status == Status::kNotReady) return false;
  CROSSDOCK_CHECK_OK(
      driver().check(status, fmt::format("work before an event of GPU {}", context_.ordinal())));
  return true;
}

Result<void> Event::synchronize(Deadline deadline) const {
  return poll(deadline, fmt::format("work before an event of GPU {}", context_.ordinal()),
              [this] { return reached(); });
}

Result<float> elapsed_ms(const Event& start, const Event& end) {
  if (start.timing_ == Timing::kOff || end.timing_ == Timing::kOff)
    return invalid_argument("elapsed_ms() needs two events created with Timing::kOn");
  float ms = 0;
  CROSSDOCK_CUDA(start.driver(), cuEventElapsedTime(&ms, start.handle(), end.handle()),
                 "ask the time between two events");
  return ms;
}

}  // namespace crossdock::cuda
