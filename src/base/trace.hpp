// Tracer: events for Chrome's and Perfetto's trace viewers. Each thread writes into a ring of its
// own; flush(), on any thread, writes the file. Engines of one process that name one file have one
// tracer, so that none replaces what another wrote; nothing is written at exit. When off, an event
// costs one relaxed load. Thread-safe.
//
// Names, categories and argument names must live as long as the tracer: literals, or intern().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <crossdock/core/result.hpp>

#include "base/clock.hpp"

namespace crossdock::base {

struct TracerOptions {
  std::string file;  // "%p" becomes the process id; empty: off
  std::size_t events_per_thread = 65536;
  std::string process_name = "crossdock";
};

// One whole number shown with an event.
struct TraceArg {
  const char* name = nullptr;
  std::uint64_t value = 0;
};

// Where an event is shown: on the row of its thread, or on a row made by Tracer::track().
struct TraceTrack {
  std::uint32_t id = 0;
};

class Tracer {
 public:
  explicit Tracer(TracerOptions options);
  // The tracer of this process for that file. It is kept for the life of the process: an engine
  // that is created after another was closed goes on with its timeline. The options of the first
  // count. The rings of its threads are kept as long: 48 bytes an event that fits in, also when a
  // thread has ended, of 1,024 threads at most.
  static std::shared_ptr<Tracer> of_process(TracerOptions options);
  ~Tracer();  // flushes; failures are silent there, so flush() first where they matter
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  [[nodiscard]] const std::string& file() const noexcept;

  // A stretch of time; both ends from now_ns(). TraceSpan does it by scope.
  void span(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns, TraceArg arg = {},
            TraceTrack track = {}) noexcept;
  // As span(), where several may be under way at once on one row: viewers drop spans of a row that
  // overlap and do not nest, so each of these is shown on a row of its own.
  void overlapping(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns,
                   TraceArg arg = {}) noexcept;
  void instant(const char* name, TraceArg arg = {}, TraceTrack track = {}) noexcept;
  // A value over time, drawn as a curve.
  void counter(const char* name, std::int64_t value) noexcept;
  // An arrow between spans, over threads and processes: the same name and id at each end, each
  // called inside the span it binds to.
  void flow_begin(const char* name, std::uint64_t id) noexcept;
  void flow_step(const char* name, std::uint64_t id) noexcept;
  void flow_end(const char* name, std::uint64_t id) noexcept;

  // A row of its own, as for a request or a rail. Takes a lock; not for hot paths.
  [[nodiscard]] TraceTrack track(std::string_view name);
  // A copy of `text` that lives as long as the tracer. Takes a lock.
  [[nodiscard]] const char* intern(std::string_view text);
  // Names the row of the calling thread.
  void name_thread(std::string_view name);

  // Writes the newest events of every thread, to a temporary file that then replaces file().
  // Threads may go on tracing meanwhile. Does nothing when off.
  Result<> flush();
  // Whether flush() could write the file now; leaves nothing behind. Ok when off.
  Result<> check_writable() const;

 private:
  struct Impl;
  struct Event;
  void record(const Event& event) noexcept;

  std::atomic<bool> on_{false};
  std::unique_ptr<Impl> impl_;
};

// A span from construction to destruction.
class TraceSpan {
 public:
  TraceSpan(Tracer& tracer, const char* name, TraceArg arg = {}, TraceTrack track = {}) noexcept
      : tracer_(tracer.on() ? &tracer : nullptr), name_(name), arg_(arg), track_(track) {
    if (tracer_ != nullptr) begin_ns_ = now_ns();
  }
  ~TraceSpan() {
    if (tracer_ != nullptr) tracer_->span(name_, begin_ns_, now_ns(), arg_, track_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  // For values known only at the end, as bytes moved.
  void set_arg(TraceArg arg) noexcept { arg_ = arg; }

 private:
  Tracer* tracer_;
  const char* name_;
  TraceArg arg_;
  TraceTrack track_;
  std::uint64_t begin_ns_ = 0;
};

}  // namespace crossdock::base
