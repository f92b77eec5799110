// Graph capture and replay. See graph.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/graph.hpp"

namespace crossdock::cuda {

Graph& Graph::operator=(Graph&& other) noexcept {
  if (this == &other) return *this;
  destroy();
  context_ = other.context_;
  exec_ = std::exchange(other.exec_, nullptr);
  return *this;
}

void Graph::destroy() noexcept {
  if (!exec_) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuGraphExecDestroy(std::exchange(exec_, nullptr)));
}

Result<void> Graph::launch(const Stream& stream) const {
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(), cuGraphLaunch(exec_, stream.handle()), "launch a CUDA graph");
  return {};
}

Result<Capture> Capture::begin(const Stream& stream, CaptureMode mode) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(), cuStreamBeginCapture(stream.handle(), mode),
                 "begin the capture of a stream");
  return Capture(&stream);
}

Capture::~Capture() {
  if (!stream_) return;
  const auto guard = stream_->context().enter_quietly();
  GraphHandle graph = nullptr;
  const Driver& driver = stream_->driver();
  if (driver.cuStreamEndCapture(stream_->handle(), &graph) == Status::kSuccess && graph)
    static_cast<void>(driver.cuGraphDestroy(graph));
}

Result<Graph> Capture::finish() {
  if (!stream_) return make_error(Code::kClosed, "this capture was finished before");
  const Stream& stream = *std::exchange(stream_, nullptr);
  const Driver& driver = stream.driver();
  CROSSDOCK_TRY(guard, stream.context().enter());
  GraphHandle graph = nullptr;
  CROSSDOCK_CUDA(driver, cuStreamEndCapture(stream.handle(), &graph),
                 "end the capture of a stream");
  GraphExecHandle exec = nullptr;
  const Status status = driver.cuGraphInstantiateWithFlags(&exec, graph, 0);
  static_cast<void>(driver.cuGraphDestroy(graph));
  CROSSDOCK_CHECK_OK(driver.check(status, "instantiate a captured graph"));
  return Graph(stream.context(), exec);
}

}  // namespace crossdock::cuda
