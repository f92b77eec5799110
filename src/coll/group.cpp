// The facade: Group and Session pass calls on to Core. See <crossdock/coll/group.hpp>.
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <crossdock/coll/group.hpp>

#include "coll/core.hpp"

namespace crossdock::coll {
inline namespace v1 {

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}
Session::~Session() {
  if (state_ != nullptr) (void)end();
}
Result<void*> Session::input(std::uint64_t bytes) {
  return state_->core->input(*state_, bytes);
}
Result<> Session::all_gather(const void* input, void* output, std::uint64_t bytes) {
  return state_->core->all_gather(*state_, input, output, bytes);
}
Result<> Session::reduce_scatter(const void* input, void* output, std::uint64_t count,
                                 DataType type) {
  return state_->core->reduce_scatter(
      *state_, {.input = input, .output = output, .count = count, .type = type});
}
Result<> Session::end() {
  return state_->core->end(*state_);
}

Result<Group> Group::create(const GroupOptions& options) {
  CROSSDOCK_TRY(core, Core::create(options));
  return Group(std::move(core));
}
Group::Group(std::shared_ptr<Core> core) : core_(std::move(core)) {}
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(Group&&) noexcept = default;
Group::~Group() = default;

std::uint32_t Group::world() const noexcept {
  return core_->group().world();
}
std::span<const std::uint32_t> Group::local_ranks() const noexcept {
  return core_->group().local_ranks();
}
const Sizes& Group::memory() const noexcept {
  return core_->memory();
}
Result<Session> Group::begin(std::uint32_t rank, StreamPtr stream) {
  return core_->begin(rank, stream);
}
Result<> Group::send(std::uint32_t rank, std::uint32_t to, const void* tensor, std::uint64_t bytes,
                     StreamPtr stream) {
  return core_->send(rank, to, tensor, bytes, stream);
}
Result<> Group::receive(std::uint32_t rank, std::uint32_t from, void* tensor, std::uint64_t bytes,
                        StreamPtr stream) {
  return core_->receive(rank, from, tensor, bytes, stream);
}
Result<std::span<std::byte>> Group::shard(std::uint32_t rank) const {
  return core_->shard(rank);
}
Result<> Group::write_rows(std::uint32_t rank, std::uint64_t first, const void* rows,
                           std::uint64_t count, StreamPtr stream) {
  return core_->write_rows(rank, {.first = first, .rows = rows, .count = count}, stream);
}
Result<> Group::fetch_rows(std::uint32_t rank, const void* numbers, std::uint32_t count,
                           void* output, StreamPtr stream) {
  return core_->fetch_rows(rank, {.numbers = numbers, .count = count, .output = output}, stream);
}
Result<> Group::barrier(std::uint32_t rank, StreamPtr stream) {
  return core_->barrier(rank, stream);
}
Result<> Group::synchronize(Deadline deadline) {
  return core_->synchronize(deadline);
}
Result<> Group::check() const {
  return core_->check();
}
Result<> Group::reset(Deadline deadline) {
  return core_->reset(deadline);
}

}  // namespace v1
}  // namespace crossdock::coll
