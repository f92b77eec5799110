// Capture of a stream's work into a CUDA graph, and its replay. Single-owner; the capturing thread
// begins and ends its own capture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <crossdock/core/result.hpp>

#include "cuda/stream.hpp"

namespace crossdock::cuda {

// A graph ready to be launched any number of times.
class Graph {
 public:
  Graph(Graph&& other) noexcept
      : context_(other.context_), exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept;
  ~Graph() { destroy(); }
  Result<void> launch(const Stream& stream) const;

 private:
  friend class Capture;
  Graph(Context context, GraphExecHandle exec) : context_(std::move(context)), exec_(exec) {}
  void destroy() noexcept;
  Context context_;
  GraphExecHandle exec_;
};

// From begin() until finish() work put on the stream is recorded, not run. A capture that is
// dropped unfinished is ended and thrown away, so that the stream is usable again. The stream
// outlives it.
class Capture {
 public:
  static Result<Capture> begin(const Stream& stream, CaptureMode mode = CaptureMode::kThreadLocal);
  Capture(Capture&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Capture& operator=(Capture&&) = delete;
  ~Capture();
  Result<Graph> finish();

 private:
  explicit Capture(const Stream* stream) : stream_(stream) {}
  const Stream* stream_;
};

}  // namespace crossdock::cuda
