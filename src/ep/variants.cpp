// Instantiates dispatch and combine for the twin, each beside its text for the JIT. See
// variants.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "ep/variants.hpp"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <utility>

#include <crossdock/kernel/ep_await_reads.cuh>
#include <crossdock/kernel/ep_combine.cuh>
#include <crossdock/kernel/ep_copy_rows.cuh>
#include <crossdock/kernel/ep_dispatch.cuh>
#include <crossdock/kernel/ep_dispatch_expanded.cuh>
#include <crossdock/kernel/ep_expand_rows.cuh>
#include <crossdock/kernel/ep_group_rows.cuh>
#include <crossdock/kernel/ep_mask.cuh>
#include <crossdock/kernel/ep_packet_combine.cuh>
#include <crossdock/kernel/ep_packet_dispatch.cuh>
#include <crossdock/kernel/ep_reduce_rows.cuh>
#include <crossdock/kernel/ep_small_dispatch.cuh>
#include <crossdock/kernel/ep_small_expanded.cuh>

namespace crossdock::ep {

using namespace crossdock::device;  // NOLINT: everything here is about device types
using symm::KernelRef;
using symm::make_kernel;
using symm::Member;

namespace {

// In order of preference; measured on H200: rows of 7 KiB go best through eight warps with three
// stages, rows of 14 KiB through six with two. With a cast the warps compute too, and more of them
// hide what each waits for.
constexpr std::array<EpDispatchConfig, 12> kDispatches = {{
    {.dispatch_warps = 8, .stages = 3, .notify_warps = 2, .cast = false, .wide_ids = false},
    {.dispatch_warps = 6, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = false},
    {.dispatch_warps = 3, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = false},
    {.dispatch_warps = 10, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = false},
    {.dispatch_warps = 8, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = false},
    {.dispatch_warps = 4, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = false},
    {.dispatch_warps = 8, .stages = 3, .notify_warps = 2, .cast = false, .wide_ids = true},
    {.dispatch_warps = 6, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = true},
    {.dispatch_warps = 3, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = true},
    {.dispatch_warps = 10, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = true},
    {.dispatch_warps = 8, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = true},
    {.dispatch_warps = 4, .stages = 1, .notify_warps = 2, .cast = true, .wide_ids = true},
}};
// The same with flags of rows, and blocks that copy.
constexpr auto kFlagged = [] {
  auto all = kDispatches;
  for (EpDispatchConfig& config : all) {
    config.flag_warps = 1;
    config.copy_stages = 2;
    config.copy_stage_bytes = 7168;
  }
  return all;
}();
constexpr EpExpandRowsConfig kExpand{.warps = 8, .stages = 3, .stage_bytes = 7168};
constexpr EpCombineConfig kPull{.warps = 8,
                                .stages = 2,
                                .stage_bytes = 14336,
                                .send_warps = 0,
                                .send_stages = 0,
                                .send_stage_bytes = 0,
                                .send_notes = 0};
constexpr EpCombineConfig kPush{.warps = 8,
                                .stages = 2,
                                .stage_bytes = 14336,
                                .send_warps = 5,
                                .send_stages = 3,
                                .send_stage_bytes = 14336,
                                .send_notes = 32};

constexpr EpCombineConfig kSmallPull{.warps = 8,
                                     .stages = 2,
                                     .stage_bytes = 14336,
                                     .send_warps = 0,
                                     .send_stages = 0,
                                     .send_stage_bytes = 0,
                                     .send_notes = 0,
                                     .small = true};
constexpr EpCombineConfig packed_pull(EpPayload payload) {
  EpCombineConfig config = kSmallPull;
  config.payload = static_cast<u32>(payload);
  return config;
}
// Eight warps for rows of up to 14 KiB, fewer for larger ones.
constexpr std::array<EpSmallConfig, 4> kSmalls = {{{.warps = 8, .cast = false},
                                                   {.warps = 4, .cast = false},
                                                   {.warps = 8, .cast = true},
                                                   {.warps = 4, .cast = true}}};

template <EpSmallConfig kConfig>
KernelRef<EpSmallParams> small_dispatch() {
  using C = EpSmallConfig;
  return make_kernel<kConfig>(KernelId::kEpSmallDispatch, "ep_small_dispatch", "EpSmallConfig",
                              &kernel::ep_small_dispatch<kConfig>, Member{"warps", &C::warps},
                              Member{"cast", &C::cast});
}

template <EpSmallConfig kConfig>
KernelRef<EpSmallExpandedParams> small_expanded() {
  using C = EpSmallConfig;
  return make_kernel<kConfig>(KernelId::kEpSmallDispatch, "ep_small_expanded", "EpSmallConfig",
                              &kernel::ep_small_expanded<kConfig>, Member{"warps", &C::warps},
                              Member{"cast", &C::cast});
}

template <EpCombineConfig kConfig>
KernelRef<EpCombineParams> combine() {
  using C = EpCombineConfig;
  return make_kernel<kConfig>(
      KernelId::kEpCombine, "ep_combine", "EpCombineConfig", &kernel::ep_combine<kConfig>,
      Member{"warps", &C::warps}, Member{"stages", &C::stages},
      Member{"stage_bytes", &C::stage_bytes}, Member{"send_warps", &C::send_warps},
      Member{"send_stages", &C::send_stages}, Member{"send_stage_bytes", &C::send_stage_bytes},
      Member{"send_notes", &C::send_notes}, Member{"small", &C::small},
      Member{"payload", &C::payload});
}

template <EpDispatchConfig kConfig, class Params>
KernelRef<Params> dispatch_of(const char* name, void (*twin)(const Params&)) {
  using C = EpDispatchConfig;
  return make_kernel<kConfig>(
      KernelId::kEpDispatch, name, "EpDispatchConfig", twin,
      Member{"dispatch_warps", &C::dispatch_warps}, Member{"stages", &C::stages},
      Member{"notify_warps", &C::notify_warps}, Member{"cast", &C::cast},
      Member{"wide_ids", &C::wide_ids}, Member{"flag_warps", &C::flag_warps},
      Member{"copy_stages", &C::copy_stages}, Member{"copy_stage_bytes", &C::copy_stage_bytes});
}

template <EpDispatchConfig kConfig>
KernelRef<EpDispatchParams> dispatch() {
  return dispatch_of<kConfig>("ep_dispatch", &kernel::ep_dispatch<kConfig>);
}

template <EpDispatchConfig kConfig>
KernelRef<EpExpandedDispatchParams> expanded_dispatch() {
  return dispatch_of<kConfig>("ep_dispatch_expanded", &kernel::ep_dispatch_expanded<kConfig>);
}

bool same(const EpDispatchConfig& a, const EpDispatchConfig& b) {
  return a.dispatch_warps == b.dispatch_warps && a.stages == b.stages &&
         a.notify_warps == b.notify_warps && a.cast == b.cast && a.wide_ids == b.wide_ids;
}

template <std::size_t... kIndex>
KernelRef<EpDispatchParams> find(const EpDispatchConfig& config, std::index_sequence<kIndex...>) {
  KernelRef<EpDispatchParams> found;
  ((same(kDispatches[kIndex], config) ? void(found = dispatch<kDispatches[kIndex]>()) : void()),
   ...);
  return found;
}
template <std::size_t... kIndex>
KernelRef<EpExpandedDispatchParams> find_expanded(const EpDispatchConfig& config,
                                                  std::index_sequence<kIndex...>) {
  KernelRef<EpExpandedDispatchParams> found;
  ((same(kFlagged[kIndex], config) ? void(found = expanded_dispatch<kFlagged[kIndex]>()) : void()),
   ...);
  return found;
}

}  // namespace

std::vector<EpDispatchConfig> dispatch_variants(bool flags) {
  const auto& all = flags ? kFlagged : kDispatches;
  return {all.begin(), all.end()};
}

u32 dispatch_shared_bytes(const EpDispatchConfig& config, const DispatchShape& shape) {
  const u32 sends =
      ep_dispatch_shared(config, shape.input_row_bytes, shape.world, shape.experts, shape.groups)
          .bytes;
  if (config.flag_warps == 0) return sends;
  const u32 experts = EpExperts::make(shape.experts, shape.world).most();
  return std::max(sends, ep_copy_shared(config, shape.world, experts).bytes);
}

Result<EpDispatchConfig> choose_dispatch(const DispatchShape& shape) {
  for (const EpDispatchConfig& config : shape.flags ? kFlagged : kDispatches)
    if (config.cast == shape.cast && config.wide_ids == shape.wide_ids &&
        dispatch_shared_bytes(config, shape) <= kMaxSharedBytes)
      return config;
  return make_error(
      Code::kUnsupported,
      fmt::format("ep: no dispatch kernel has room for rows of {} bytes, {} experts and {} groups "
                  "of 32 tokens a block in {} bytes of shared memory: give dispatch more SMs",
                  shape.input_row_bytes, shape.experts, shape.groups, kMaxSharedBytes));
}

Result<KernelRef<EpDispatchParams>> dispatch_kernel(const EpDispatchConfig& config) {
  auto found = find(config, std::make_index_sequence<kDispatches.size()>());
  if (found.twin == nullptr)
    return invalid_argument("ep: this configuration of ep_dispatch is not in the list");
  return found;
}

Result<KernelRef<EpExpandedDispatchParams>> expanded_dispatch_kernel(
    const EpDispatchConfig& config) {
  auto found = find_expanded(config, std::make_index_sequence<kFlagged.size()>());
  if (found.twin == nullptr)
    return invalid_argument("ep: this configuration of ep_dispatch_expanded is not in the list");
  return found;
}

Result<EpSmallConfig> choose_small_dispatch(u32 input_row_bytes, bool cast, u32 world, u32 experts,
                                            u32 tokens) {
  for (const EpSmallConfig& config : kSmalls)
    if (config.cast == cast &&
        ep_small_shared(config, input_row_bytes, world, experts, tokens).bytes <= kMaxSharedBytes)
      return config;
  return make_error(Code::kUnsupported,
                    fmt::format("ep: no kernel for few tokens has room for rows of {} bytes and {} "
                                "experts in {} bytes of shared memory",
                                input_row_bytes, experts, kMaxSharedBytes));
}
KernelRef<EpSmallParams> small_dispatch_kernel(const EpSmallConfig& config) {
  if (config.cast)
    return config.warps == 8 ? small_dispatch<kSmalls[2]>() : small_dispatch<kSmalls[3]>();
  return config.warps == 8 ? small_dispatch<kSmalls[0]>() : small_dispatch<kSmalls[1]>();
}
KernelRef<EpSmallExpandedParams> small_expanded_kernel(const EpSmallConfig& config) {
  if (config.cast)
    return config.warps == 8 ? small_expanded<kSmalls[2]>() : small_expanded<kSmalls[3]>();
  return config.warps == 8 ? small_expanded<kSmalls[0]>() : small_expanded<kSmalls[1]>();
}
KernelRef<EpCombineParams> small_combine_kernel(EpPayload payload) {
  if (payload == EpPayload::kFp8) return combine<packed_pull(EpPayload::kFp8)>();
  if (payload == EpPayload::kLogFmt10) return combine<packed_pull(EpPayload::kLogFmt10)>();
  return combine<kSmallPull>();
}

EpCombineConfig combine_variant(bool pushes) {
  return pushes ? kPush : kPull;
}

KernelRef<EpCombineParams> combine_kernel(bool pushes) {
  return pushes ? combine<kPush>() : combine<kPull>();
}

// Named in faults as what it is launched for.
KernelRef<EpAwaitReadsParams> await_reads_kernel() {
  using C = EpAwaitReadsConfig;
  constexpr C kConfig{.threads = kWarpSize};
  return make_kernel<kConfig>(KernelId::kEpReduceRows, "ep_await_reads", "EpAwaitReadsConfig",
                              &kernel::ep_await_reads<kConfig>, Member{"threads", &C::threads});
}

KernelRef<EpMaskParams> mask_kernel() {
  using C = EpMaskConfig;
  constexpr C kConfig{.threads = kWarpSize};
  return make_kernel<kConfig>(KernelId::kEpMask, "ep_mask", "EpMaskConfig",
                              &kernel::ep_mask<kConfig>, Member{"threads", &C::threads});
}

namespace {
template <EpPacketConfig kConfig>
KernelRef<EpPacketParams> packet_dispatch() {
  using C = EpPacketConfig;
  return make_kernel<kConfig>(KernelId::kEpPacketDispatch, "ep_packet_dispatch", "EpPacketConfig",
                              &kernel::ep_packet_dispatch<kConfig>, Member{"warps", &C::warps},
                              Member{"cast", &C::cast});
}
}  // namespace

KernelRef<EpPacketParams> packet_dispatch_kernel(bool cast) {
  constexpr EpPacketConfig kBytes{.warps = kPacketWarps, .cast = false};
  constexpr EpPacketConfig kCasts{.warps = kPacketWarps, .cast = true};
  return cast ? packet_dispatch<kCasts>() : packet_dispatch<kBytes>();
}
u32 packet_shared_bytes(u32 experts) {
  return ep_packet_shared(kPacketWarps, experts);
}
KernelRef<EpPacketCombineParams> packet_combine_kernel() {
  using C = EpPacketCombineConfig;
  constexpr C kConfig{.warps = kPacketWarps};
  return make_kernel<kConfig>(KernelId::kEpPacketCombine, "ep_packet_combine",
                              "EpPacketCombineConfig", &kernel::ep_packet_combine<kConfig>,
                              Member{"warps", &C::warps});
}

KernelRef<EpGroupRowsParams> group_rows_kernel() {
  using C = EpGroupRowsConfig;
  constexpr C kConfig{.threads = kGroupThreads};
  return make_kernel<kConfig>(KernelId::kEpGroupRows, "ep_group_rows", "EpGroupRowsConfig",
                              &kernel::ep_group_rows<kConfig>, Member{"threads", &C::threads});
}
namespace {
template <EpReduceRowsConfig kConfig>
KernelRef<EpReduceRowsParams> reduce_rows() {
  using C = EpReduceRowsConfig;
  return make_kernel<kConfig>(KernelId::kEpReduceRows, "ep_reduce_rows", "EpReduceRowsConfig",
                              &kernel::ep_reduce_rows<kConfig>, Member{"warps", &C::warps},
                              Member{"packs", &C::packs});
}
}  // namespace

KernelRef<EpReduceRowsParams> reduce_rows_kernel(bool packs) {
  constexpr EpReduceRowsConfig kPlain{.warps = kReduceWarps, .packs = false};
  constexpr EpReduceRowsConfig kPacks{.warps = kReduceWarps, .packs = true};
  return packs ? reduce_rows<kPacks>() : reduce_rows<kPlain>();
}
EpExpandRowsConfig expand_rows_variant() {
  return kExpand;
}
KernelRef<EpExpandRowsParams> expand_rows_kernel() {
  using C = EpExpandRowsConfig;
  return make_kernel<kExpand>(KernelId::kEpExpandRows, "ep_expand_rows", "EpExpandRowsConfig",
                              &kernel::ep_expand_rows<kExpand>, Member{"warps", &C::warps},
                              Member{"stages", &C::stages}, Member{"stage_bytes", &C::stage_bytes});
}
KernelRef<EpCopyRowsParams> copy_rows_kernel() {
  using C = EpCopyRowsConfig;
  constexpr C kConfig{.threads = kCopyThreads};
  return make_kernel<kConfig>(KernelId::kEpCopyRows, "ep_copy_rows", "EpCopyRowsConfig",
                              &kernel::ep_copy_rows<kConfig>, Member{"threads", &C::threads});
}

}  // namespace crossdock::ep
