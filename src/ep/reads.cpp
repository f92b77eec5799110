// Core: the input of a small slot that is written again for the same dispatch: peers may still read
// there what the combine before has announced. See core.hpp, device/crossdock/kernel/
// ep_await_reads.cuh and docs/design/ep.md.
//
//   dispatch, reduce_rows, combine                     nobody has read there: nothing is asked
//   reduce_rows, combine: of the same handle again     ep_await_reads first
//
// SPDX-License-Identifier: Apache-2.0
#include "ep/handle.hpp"

namespace crossdock::ep {

// One rank reads in the order of its own stream.
Result<> Core::prepare_reads(Deadline deadline) {
  if (window_.world == 1 || (options_.expert_alignment == 0 && !options_.compressed)) return {};
  CROSSDOCK_TRY(kernel,
                launcher_->prepare(await_reads_kernel(), {.threads = device::kWarpSize}, deadline));
  await_reads_.emplace(std::move(kernel));
  return {};
}

// None in the twin.
Result<std::uint64_t> Core::capture_of(const symm::Rank& rank, StreamPtr stream) const {
  const cuda::Context* const context = rank.device().context();
  if (context == nullptr) return std::uint64_t{0};
  if (stream == nullptr) return rank.device().stream()->capture();
  return cuda::Stream::borrow(*context, static_cast<cuda::StreamHandle>(stream)).capture();
}

// Between the halves of a combine peers read what the first has announced, until this rank's second
// has let them go on.
Result<> Core::check_not_told(const RankState& state, const Handle::State& h) const {
  if (h.placement.slot->kind != SlotKind::kSmall ||
      state.small[h.slot - options_.slots].told != h.ticket)
    return {};
  return invalid_argument(
      "ep reduce_rows: a combine_send() of this handle has told the others to read its rows and "
      "waits for its combine_receive(): call it first");
}

// Before the input of a handle is written by a launch. A block of its own, since the SMs that a
// launch of all of them would hold may be what the peers' other streams wait for.
Result<> Core::await_reads(const RankState& state, const Handle::State& h, StreamPtr stream) {
  if (!await_reads_ || h.placement.slot->kind != SlotKind::kSmall || h.packets) return {};
  const symm::Rank& rank = group_->rank(h.rank);
  bool again = h.announced;
  if (!again) {
    // In a capture that does not have the dispatch in it: replays combine it many times.
    CROSSDOCK_TRY(now, capture_of(rank, stream));
    again = now != 0 && now != h.capture;
  }
  if (!again) return {};
  const SmallSlot& slot = state.small[h.slot - options_.slots];
  device::EpAwaitReadsParams p{};
  p.common = rank.common(device::KernelId::kEpReduceRows, options_.wait);
  p.view = rank.view();
  p.areas = slot.dispatch.areas;
  p.state = slot.combines.as<device::EpState>();
  p.masking = state.combine.masking;
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, 1, stream, kept));
  return launcher_->launch(rank, *await_reads_, launch_shape, p);
}

}  // namespace crossdock::ep
