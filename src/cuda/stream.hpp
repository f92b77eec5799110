// Streams and events, owned or borrowed from a framework, and what one has to know about a stream
// before touching it: whether it is being captured into a graph. Handles are thread-safe as the
// driver's are; the objects are single-owner. Waits poll with a deadline and never block in the
// driver, which has no deadlines.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "cuda/device.hpp"

namespace crossdock::cuda {

// Whether work put on `stream` now would be recorded into a graph. A legacy stream that cannot be
// asked because another stream of the context is being captured counts as capturing.
Result<bool> is_capturing(const Driver& driver, StreamHandle stream);
// Which capture the stream is part of, a number that no other capture of this process has; 0: none.
Result<std::uint64_t> capture_of(const Driver& driver, StreamHandle stream);

// Refuses with kInvalidArgument while the stream is being captured; `what` names the call:
// "prepare() of kernel fill".
Result<void> refuse_capture(const Driver& driver, StreamHandle stream, std::string_view what);

class Event;

struct StreamOptions {
  bool high_priority = false;
  bool non_blocking = true;  // false: waits for the legacy default stream
};

class Stream {
 public:
  static Result<Stream> create(const Context& context, const StreamOptions& options = {});
  // A stream of somebody else, who keeps it alive; null is the legacy default stream.
  static Stream borrow(const Context& context, StreamHandle handle);
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  [[nodiscard]] StreamHandle handle() const { return handle_; }
  [[nodiscard]] const Context& context() const { return context_; }
  [[nodiscard]] const Driver& driver() const { return context_.driver(); }

  // True when all work put on it so far has finished; also reports errors of that work.
  Result<bool> idle() const;
  Result<void> synchronize(Deadline deadline) const;
  Result<bool> capturing() const { return is_capturing(driver(), handle_); }
  Result<std::uint64_t> capture() const { return capture_of(driver(), handle_); }
  // Later work on this stream waits for the event, on the GPU.
  Result<void> wait(const Event& event) const;

 private:
  Stream(Context context, StreamHandle handle, bool owned)
      : context_(std::move(context)), handle_(handle), owned_(owned) {}
  void destroy() noexcept;
  Context context_;
  StreamHandle handle_;
  bool owned_;
};

enum class Timing : bool { kOff, kOn };

class Event {
 public:
  static Result<Event> create(const Context& context, Timing timing = Timing::kOff);
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  [[nodiscard]] EventHandle handle() const { return handle_; }
  [[nodiscard]] const Driver& driver() const { return context_.driver(); }
  Result<void> record(const Stream& stream) const;
  // True when the work before the last record has finished.
  Result<bool> reached() const;
  Result<void> synchronize(Deadline deadline) const;

 private:
  friend Result<float> elapsed_ms(const Event& start, const Event& end);
  Event(Context context, EventHandle handle, Timing timing)
      : context_(std::move(context)), handle_(handle), timing_(timing) {}
  void destroy() noexcept;
  Context context_;
  EventHandle handle_;
  Timing timing_;
};

// Milliseconds on the GPU between two reached events made with Timing::kOn.
Result<float> elapsed_ms(const Event& start, const Event& end);

}  // namespace crossdock::cuda
