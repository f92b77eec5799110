// Group: making it, and waiting. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "ep_group.hpp"

#include <fmt/format.h>
#include <utility>

#include "cuda/stream.hpp"
#include "ep/core.hpp"
#include "errors.hpp"

namespace crossdock::python {

Group::Group(ep::Group group, const ep::Options& options)
    : box_(std::make_shared<GroupBox>(std::move(group))), options_(options) {
  const symm::Group& symmetric = box_->group().core().group();
  world_ = symmetric.world();
  twin_ = symmetric.backend() == symm::Backend::kCpu;
  memory_ = box_->group().memory();
  for (const uint32_t rank : symmetric.local_ranks()) {
    const cuda::Context* const context = symmetric.rank(rank).device().context();
    ranks_.push_back({rank, context == nullptr ? kHost : context->ordinal()});
  }
}

std::shared_ptr<GroupBox> Group::open() const {
  if (box_ == nullptr) raise(make_error(Code::kClosed, "ep: the group is closed: make a new one"));
  return box_;
}

Group::Call Group::enter(uint32_t rank) const {
  const auto box = open();
  std::unique_lock<std::mutex> lock = box->enter(rank);
  // Somebody may have closed the group while this call waited for its turn.
  return {open(), std::move(lock)};
}

int Group::device_of(uint32_t rank) const {
  for (const LocalRank& local : ranks_)
    if (local.rank == rank) return local.device;
  raise(
      invalid_argument(fmt::format("ep: rank {} is not one of the {} ranks of this process: see "
                                   "Group.local_ranks",
                                   rank, ranks_.size())));
}

// ---- memory ------------------------------------------------------------------------------------

bool Group::in_heap(const Tensor& t, uint32_t rank) const {
  return in_twin_heap(*box_, t, rank);
}
const void* Group::readable(Tensor& t, uint32_t rank) {
  return copies_.readable(box_, t, rank);
}
void* Group::writable(const Tensor& t, uint32_t rank) {
  return copies_.writable(box_, t, rank);
}

Array Group::empty(uint32_t rank, ArrayType type, int64_t rows, int64_t columns) {
  const auto [box, lock] = enter(rank);
  (void)device_of(rank);
  const auto bytes = static_cast<uint64_t>(rows * columns) * type.bytes;
  auto memory = value_or_raise(twin_memory(box_, rank, bytes));
  void* const address = memory->address();
  return matrix(std::move(memory), address, type, rows, columns);
}

// ---- waiting -----------------------------------------------------------------------------------

void Group::synchronize(double timeout, nb::handle stream) {
  const auto box = open();
  const Deadline deadline = deadline_in(timeout);
  std::vector<cuda::Stream> streams;
  for (const LocalRank& local : ranks_) {
    const ep::StreamPtr of_rank = stream_of(stream, framework(), local.device);
    if (of_rank == nullptr) continue;
    streams.push_back(
        cuda::Stream::borrow(*box->group().core().group().rank(local.rank).device().context(),
                             static_cast<cuda::StreamHandle>(of_rank)));
  }
  // In the twin waiting is running, which is a call; on GPUs others may launch meanwhile.
  std::unique_lock<std::mutex> lock;
  if (twin_) lock = enter(ranks_.front().rank).lock;
  const Copies copies = std::exchange(copies_, {});
  const auto wait = [&]() -> Result<> {
    const nb::gil_scoped_release release;
    for (const cuda::Stream& on : streams)
      CROSSDOCK_CHECK_OK(on.synchronize(deadline));
    return box->group().synchronize(deadline);
  };
  const Result<> done = wait();
  copies.copy_back();
  value_or_raise(done);
}

void Group::check() {
  value_or_raise(open()->group().check());
}

void Group::begin_anew(double timeout, Result<> (ep::Group::*call)(Deadline)) {
  const auto box = open();
  const Deadline deadline = deadline_in(timeout);
  const auto run = [&] {
    const nb::gil_scoped_release release;
    const auto locks = box->enter_all();
    return (box->group().*call)(deadline);
  };
  const Result<> done = run();
  copies_ = {};
  value_or_raise(done);
}

void Group::reset(double timeout) {
  begin_anew(timeout, &ep::Group::reset);
}

// ---- elastic groups ----------------------------------------------------------------------------

void Group::reform(double timeout) {
  begin_anew(timeout, &ep::Group::reform);
}

std::vector<uint32_t> Group::vacant_ranks() {
  const auto box = open();
  const nb::gil_scoped_release release;
  const auto locks = box->enter_all();
  const auto ranks = box->group().vacant_ranks();
  return {ranks.begin(), ranks.end()};
}

std::vector<uint32_t> Group::waiting_ranks(double timeout) {
  const auto box = open();
  const Deadline deadline = deadline_in(timeout);
  const auto ask = [&] {
    const nb::gil_scoped_release release;
    const auto locks = box->enter_all();
    return box->group().waiting_ranks(deadline);
  };
  return value_or_raise(ask());
}

ep::Statistics Group::statistics(uint32_t rank, double timeout) {
  const auto box = open();
  const Deadline deadline = deadline_in(timeout);
  const auto read = [&] {
    const nb::gil_scoped_release release;
    const auto locks = box->enter_all();
    return box->group().statistics(rank, deadline);
  };
  return value_or_raise(read());
}

void Group::close() {
  const auto box = box_;
  if (box == nullptr) return;
  copies_ = {};
  box_.reset();
}

}  // namespace crossdock::python
