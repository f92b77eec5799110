// Core: combines of few tokens whose rows travel compressed: which may, what makes such rows, and
// the kernels. See core.hpp, device/crossdock/layout/ep_payload.cuh and docs/design/ep.md.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {
namespace {

using device::EpPayload;

// Of a combine whose SMs nobody has chosen, times those of a plain one: it takes rows apart, which
// bounds it before the wire does.
constexpr u32 kMoreBlocks = 3;

}  // namespace

Result<> Core::prepare_compressed(Deadline deadline) {
  if (!options_.compressed) return {};
  const device::EpCombineConfig combine = combine_variant(false);
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kLogFmt10}) {
    CROSSDOCK_TRY(kernel,
                  launcher_->prepare(small_combine_kernel(payload),
                                     {.threads = combine.threads(),
                                      .shared_bytes = device::ep_combine_shared(combine).bytes},
                                     deadline));
    packed_combines_[static_cast<u32>(payload)].emplace(std::move(kernel));
  }
  CROSSDOCK_TRY(pack, launcher_->prepare(reduce_rows_kernel(true),
                                         {.threads = kReduceWarps * device::kWarpSize}, deadline));
  pack_rows_.emplace(std::move(pack));
  return {};
}

u32 Core::packed_blocks(u32 rank) const {
  const bool chosen = options_.combine_sms != 0 || !options_.combine_sms_of.empty();
  return combine_blocks_[rank] * (chosen ? 1 : kMoreBlocks);
}

EpPayload Core::payload_of(const Handle::State& h, Payload wanted) {
  return h.packets ? EpPayload::kBf16 : static_cast<EpPayload>(wanted);
}

Result<> Core::check_payload(const Handle::State& h, Payload payload, const char* call) const {
  if (payload == Payload::kBf16) return {};
  if (static_cast<u32>(payload) >= device::kEpPayloads)
    return invalid_argument(fmt::format("ep {}: payload = {} must be one of ep::Payload", call,
                                        static_cast<u32>(payload)));
  if (!options_.compressed)
    return invalid_argument(fmt::format(
        "ep {}: a compressed payload in a group made with compressed = false: make it with true",
        call));
  if (h.placement.slot->kind != SlotKind::kSmall)
    return invalid_argument(
        fmt::format("ep {}: compressed payloads are of the path for few tokens, and the dispatch "
                    "took the other: use Payload::kBf16",
                    call));
  return {};
}

Result<> Core::check_how(const Handle::State& h, const CombineOptions& how) const {
  CROSSDOCK_CHECK_OK(check_payload(h, how.payload, "combine"));
  if (!how.packed || (how.payload != Payload::kBf16 && how.payload == h.packed)) return {};
  return invalid_argument(
      "ep combine: packed = true, and no reduce_rows() of this handle has written rows of that "
      "payload, or they are no longer there since a combine has compressed expert_input(): give "
      "ByPlace the same payload again, or leave packed false");
}

u8* Core::packed_rows(const RankState& state, const Handle::State& h) const {
  const device::EpInputLayout& layout = state.small[h.slot - options_.slots].combine.input;
  return group_->rank(h.rank).at<u8>(h.placement.input_offset + layout.packed);
}

Result<> Core::pack_input(RankState& state, Handle::State& h, EpPayload payload, StreamPtr stream) {
  const symm::Rank& rank = group_->rank(h.rank);
  device::EpReduceRowsParams p{};
  p.common = rank.common(device::KernelId::kEpReduceRows, options_.wait);
  p.arrived = arrived_of(h);
  p.view = rank.view();
  p.outputs = static_cast<const u8*>(h.input.rows);
  p.output_stride = u64{options_.hidden} * 2;
  p.input = packed_rows(state, h);
  p.payload = payload;
  p.row_bytes = options_.hidden * 2;
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, launcher_->num_sms(rank), stream, kept));
  CROSSDOCK_CHECK_OK(await_reads(state, h, stream));
  // All formats share the packed rows of a slot: those of a reduce_rows() are gone.
  h.packed = Payload::kBf16;
  return launcher_->launch(rank, *pack_rows_, launch_shape, p);
}

}  // namespace crossdock::ep
