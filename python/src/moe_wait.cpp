// Layer: waiting, faults, the end. See moe_layer.hpp. SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include "cuda/stream.hpp"
#include "ep/core.hpp"
#include "errors.hpp"
#include "moe_layer.hpp"

namespace crossdock::python {

void Layer::synchronize(double timeout, nb::handle stream) {
  const auto layer = open();
  Shared& s = *shared_;
  const Deadline deadline = deadline_in(timeout);
  std::vector<cuda::Stream> streams;
  for (const LocalRank& local : s.ranks) {
    const moe::StreamPtr of_rank = stream_of(stream, s.framework, local.device);
    if (of_rank == nullptr) continue;
    streams.push_back(cuda::Stream::borrow(*s.box->ranks().rank(local.rank).device().context(),
                                           static_cast<cuda::StreamHandle>(of_rank)));
  }
  // In the twin waiting is running, which is a call; on GPUs others may launch meanwhile.
  std::unique_lock<std::mutex> lock;
  if (s.twin) lock = enter(s.ranks.front().rank).lock;
  const Copies copies = std::exchange(s.copies, {});
  const auto wait = [&]() -> Result<> {
    const nb::gil_scoped_release release;
    for (const cuda::Stream& on : streams)
      CROSSDOCK_CHECK_OK(on.synchronize(deadline));
    return layer->synchronize(deadline);
  };
  const Result<> done = wait();
  copies.copy_back();
  value_or_raise(done);
}

void Layer::check() {
  value_or_raise(open()->check());
}

void Layer::reset(double timeout) {
  const auto layer = open();
  const Deadline deadline = deadline_in(timeout);
  const auto reset = [&] {
    const nb::gil_scoped_release release;
    const auto locks = shared_->box->enter_all();
    return layer->reset(deadline);
  };
  const Result<> done = reset();
  shared_->copies = {};
  value_or_raise(done);
}

ep::Statistics Layer::statistics(uint32_t rank, double timeout) {
  const auto layer = open();
  const Deadline deadline = deadline_in(timeout);
  const auto read = [&] {
    const nb::gil_scoped_release release;
    const auto locks = shared_->box->enter_all();
    return layer->statistics(rank, deadline);
  };
  return value_or_raise(read());
}

void Layer::close() {
  layer_.reset();
}

}  // namespace crossdock::python
