// The public face: Group and Handle over Core. See crossdock/ep/group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <thread>
#include <utility>

#include <crossdock/ep/group.hpp>

#include "ep/handle.hpp"

namespace crossdock::ep {
inline namespace v1 {
namespace {

// Waits for a word {ticket, value} that a kernel stores in host memory.
Result<u32> wait_word(const Core& core, const u64* word, u32 ticket, const char* what,
                      Deadline deadline) {
  if (!core.options().host_counts)
    return invalid_argument(fmt::format(
        "ep: {} are not told to the host: the group was made with host_counts = false", what));
  for (;;) {
    const u64 seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (seen >> 32 == ticket) return static_cast<u32>(seen);
    CROSSDOCK_CHECK_OK(core.group().check());
    if (deadline.passed())
      return make_error(Code::kDeadline,
                        fmt::format("ep: {} have not come: is the dispatch still waiting in its "
                                    "stream, or was it captured?",
                                    what));
    std::this_thread::yield();
  }
}

}  // namespace

Handle::Handle(std::unique_ptr<State> state) : state_(std::move(state)) {}
Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;
Handle::~Handle() = default;

std::uint32_t Handle::rank() const noexcept {
  return state_->rank;
}
const Received& Handle::received() const noexcept {
  return state_->received;
}
const ExpertInput& Handle::expert_input() const noexcept {
  return state_->input;
}
bool Handle::copied() const noexcept {
  return state_->copied();
}
Result<std::uint32_t> Handle::rows(Deadline deadline) const {
  return wait_word(*state_->core, state_->host_rows, state_->ticket, "the rows' number", deadline);
}
Result<std::vector<std::uint32_t>> Handle::expert_counts(Deadline deadline) const {
  std::vector<std::uint32_t> counts;
  for (u32 i = 0; i < state_->experts; ++i) {
    CROSSDOCK_TRY(count, wait_word(*state_->core, state_->host_experts + i, state_->ticket,
                                   "the experts' counts", deadline));
    counts.push_back(count);
  }
  return counts;
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
Result<Handle> Group::dispatch(std::uint32_t rank, const Tokens& tokens, StreamPtr stream) {
  return core_->dispatch(rank, tokens, {}, stream);
}
Result<Handle> Group::dispatch(std::uint32_t rank, const Tokens& tokens, const DispatchOptions& how,
                               StreamPtr stream) {
  return core_->dispatch(rank, tokens, how, stream);
}
Result<> Group::reserve_copies(std::uint32_t rank, std::uint32_t copies) {
  return core_->reserve_copies(rank, copies);
}
Result<std::span<std::byte>> Group::user_memory(std::uint32_t rank) const {
  return core_->user_memory(rank);
}
Result<std::uint64_t> Group::output_bytes(const Tokens& tokens) const {
  return core_->output_bytes(tokens);
}
Result<Grouped> Group::group_rows(const Handle& handle, StreamPtr stream) {
  return core_->group_rows(handle, stream);
}
Result<Grouped> Group::grouped(const Handle& handle) const {
  return core_->grouped(handle);
}
Result<> Group::reduce_rows(const Handle& handle, const void* by_place, std::uint64_t stride,
                            bool weighted, StreamPtr stream) {
  return core_->reduce_rows(handle, {.rows = by_place, .row_stride = stride, .weighted = weighted},
                            stream);
}
Result<> Group::reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream) {
  return core_->reduce_rows(handle, outputs, stream);
}
Result<> Group::expand_rows(const Handle& handle, const Expanded& to, StreamPtr stream) {
  return core_->expand_rows(handle, to, stream);
}
Result<> Group::combine(const Handle& handle, const Combined& combined, StreamPtr stream) {
  return core_->combine(handle, combined, {}, stream);
}
Result<> Group::combine(const Handle& handle, const Combined& combined, const CombineOptions& how,
                        StreamPtr stream) {
  return core_->combine(handle, combined, how, stream);
}
Result<Handle> Group::dispatch_send(std::uint32_t rank, const Tokens& tokens,
                                    const DispatchOptions& how, StreamPtr stream) {
  return core_->dispatch_send(rank, tokens, how, stream);
}
Result<> Group::dispatch_receive(const Handle& handle, StreamPtr stream) {
  return core_->dispatch_receive(handle, nullptr, stream);
}
Result<> Group::dispatch_receive(const Handle& handle, const Expanded& to, StreamPtr stream) {
  return core_->dispatch_receive(handle, &to, stream);
}
Result<> Group::combine_send(const Handle& handle, StreamPtr stream) {
  return core_->combine_send(handle, {}, stream);
}
Result<> Group::combine_send(const Handle& handle, const CombineOptions& how, StreamPtr stream) {
  return core_->combine_send(handle, how, stream);
}
Result<> Group::combine_receive(const Handle& handle, const Combined& combined, StreamPtr stream) {
  return core_->combine_receive(handle, combined, stream);
}
Result<> Group::mask(std::uint32_t rank, std::uint32_t peer, bool masked, StreamPtr stream) {
  return core_->mask(rank, peer, masked, stream);
}
Result<> Group::clear_mask(std::uint32_t rank, StreamPtr stream) {
  return core_->change_mask(rank, {.clear = ~0u}, stream);
}
Result<> Group::read_mask(std::uint32_t rank, std::int32_t* told, StreamPtr stream) {
  return core_->read_mask(rank, told, stream);
}
Result<std::uint32_t*> Group::mask_memory(std::uint32_t rank) const {
  return core_->mask_memory(rank);
}
Result<std::uint32_t> Group::masked(std::uint32_t rank, Deadline deadline) const {
  return core_->masked(rank, deadline);
}
Result<> Group::synchronize(Deadline deadline) {
  return core_->launcher().synchronize(deadline);
}
Result<> Group::check() const {
  return core_->group().check();
}
Result<> Group::reset(Deadline deadline) {
  return core_->reset(deadline);
}
Result<> Group::reform(Deadline deadline) {
  return core_->reform(deadline);
}
std::span<const std::uint32_t> Group::vacant_ranks() const noexcept {
  return core_->group().vacant_ranks();
}
Result<std::vector<std::uint32_t>> Group::waiting_ranks(Deadline deadline) const {
  return core_->group().waiting_ranks(deadline);
}
Result<Statistics> Group::statistics(std::uint32_t rank, Deadline deadline) const {
  return core_->statistics(rank, deadline);
}
Result<StatisticsMemory> Group::statistics_memory(std::uint32_t rank) const {
  return core_->statistics_memory(rank);
}

}  // namespace v1
}  // namespace crossdock::ep
