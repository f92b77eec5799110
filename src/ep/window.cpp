// See window.hpp. SPDX-License-Identifier: Apache-2.0
#include "ep/window.hpp"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "ep/slots.hpp"
#include "ep/variants.hpp"

namespace crossdock::ep {
namespace {

constexpr u32 kMaxRowBytes = 32 << 10;
constexpr u64 kMaxUserBytes = u64{1} << 40;
constexpr u32 kDefaultSmallSms = 16;
// More than these are faster as rows with flags.
constexpr u32 kPacketTokens = 8;

Result<> check_numbers(const Options& o, u32 world) {
  if (world == 0 || world > device::kEpMaxRanks)
    return invalid_argument(
        fmt::format("ep: world = {} must be 1 to {} ranks", world, device::kEpMaxRanks));
  if (o.experts == 0 || o.experts > device::kEpMaxExperts)
    return invalid_argument(
        fmt::format("ep: experts = {} must be 1 to {}", o.experts, device::kEpMaxExperts));
  if (o.top_k == 0 || o.top_k > device::kEpMaxTopK)
    return invalid_argument(
        fmt::format("ep: top_k = {} must be 1 to {}", o.top_k, device::kEpMaxTopK));
  if (o.max_tokens == 0)
    return invalid_argument("ep: max_tokens = 0 must be at least 1, the most of any rank");
  const bool only_small = o.small_tokens == o.max_tokens && !o.fall_back;
  if ((o.slots == 0 && !only_small && o.user_bytes == 0) || o.slots > device::kEpMaxSlots)
    return invalid_argument(
        fmt::format("ep: slots = {} must be 1 to {}, or 0 with small_tokens = max_tokens and "
                    "fall_back = false, "
                    "or with user_bytes, where all outputs are the caller's",
                    o.slots, device::kEpMaxSlots));
  if (o.user_bytes > kMaxUserBytes)
    return invalid_argument(
        fmt::format("ep: user_bytes = {} must be at most {}", o.user_bytes, kMaxUserBytes));
  if (o.expert_alignment > 4096)
    return invalid_argument(
        fmt::format("ep: expert_alignment = {} must be at most 4096, or 0 for no rows by expert",
                    o.expert_alignment));
  if (u64{world} * o.max_tokens * (o.expert_alignment != 0 ? o.top_k : 1) > 1u << 30)
    return invalid_argument(
        fmt::format("ep: {} ranks of max_tokens = {} are more than 2^30 rows or choices: use fewer "
                    "tokens a call",
                    world, o.max_tokens));
  return {};
}
Result<> check_compressed(const Options& o, u32 world) {
  if (!o.compressed) return {};
  if (o.small_tokens == 0)
    return invalid_argument(
        "ep: compressed = true is about the path for few tokens: set small_tokens, or leave it "
        "false");
  if (o.hidden % device::kEpUnitValues != 0)
    return invalid_argument(fmt::format(
        "ep: hidden = {} must be a multiple of {} for compressed = true: pad the rows to {}",
        o.hidden, device::kEpUnitValues, device::round_up(o.hidden, device::kEpUnitValues)));
  const u32 unit = device::ep_unit_bytes(device::EpPayload::kLogFmt10);
  const u32 most = combine_variant(false).stage_bytes / unit;
  if (std::min(world, o.top_k) > most)
    return invalid_argument(fmt::format(
        "ep: compressed = true is made for tokens of at most {} rows, and {} ranks with "
        "top_k = {} can have {}: leave it false",
        most, world, o.top_k, std::min(world, o.top_k)));
  return {};
}
Result<> check_small(const Options& o) {
  if (o.masks && o.combine != CombineBy::kPull)
    return invalid_argument(
        "ep: masks = true needs combine = kPull: rows that are pushed are awaited from every rank");
  if (o.mask_late && !o.masks) return invalid_argument("ep: mask_late = true needs masks = true");
  if (o.small_tokens == 0) return {};
  if (o.small_tokens > device::kEpMaxSmallTokens || o.small_tokens > o.max_tokens)
    return invalid_argument(fmt::format(
        "ep: small_tokens = {} must be at most {} and max_tokens = {}, or 0 for no small path",
        o.small_tokens, device::kEpMaxSmallTokens, o.max_tokens));
  if (o.small_slots == 0 || o.small_slots > device::kEpMaxSmallSlots)
    return invalid_argument(fmt::format("ep: small_slots = {} must be 1 to {}", o.small_slots,
                                        device::kEpMaxSmallSlots));
  if (o.small_sms > device::kEpMaxSendBlocks)
    return invalid_argument(fmt::format("ep: small_sms = {} must be at most {}, or 0 for {}",
                                        o.small_sms, device::kEpMaxSendBlocks, kDefaultSmallSms));
  return {};
}
Result<> check_expanding(const Options& o, u32 world) {
  if (o.expand_sms == 0) return {};
  const bool chosen = o.expand_sms != kAutoSms;
  const u32 experts = device::EpExperts::make(o.experts, world).most();
  if (chosen && o.expand_sms > device::kEpMaxBlocks)
    return invalid_argument(fmt::format("ep: expand_sms = {} must be at most {}, 0, or kAutoSms",
                                        o.expand_sms, device::kEpMaxBlocks));
  if (o.expert_alignment == 0)
    return invalid_argument(fmt::format(
        "ep: expand_sms = {} needs expert_alignment, on whose multiples the rows of experts begin",
        chosen ? std::to_string(o.expand_sms) : "kAutoSms"));
  if (!chosen) return {};
  if (experts > device::kEpMostExpanded)
    return invalid_argument(
        fmt::format("ep: expand_sms = {} is made for at most {} experts a rank, not {}: use "
                    "expand_rows() there",
                    o.expand_sms, device::kEpMostExpanded, experts));
  return {};
}
Result<> check_few_copies(const Options& o, u32 world) {
  if (o.small_expand_sms == 0) return {};
  const u32 experts = device::EpExperts::make(o.experts, world).most();
  if (o.small_expand_sms > device::kEpMaxBlocks)
    return invalid_argument(fmt::format("ep: small_expand_sms = {} must be at most {}, or 0",
                                        o.small_expand_sms, device::kEpMaxBlocks));
  if (o.small_tokens == 0 || o.expert_alignment == 0)
    return invalid_argument(fmt::format(
        "ep: small_expand_sms = {} needs small_tokens = {} and expert_alignment = {} to "
        "be set",
        o.small_expand_sms, o.small_tokens, o.expert_alignment));
  if (experts > device::kEpMostExpanded)
    return invalid_argument(
        fmt::format("ep: small_expand_sms = {} is made for at most {} experts a rank, not {}: use "
                    "expand_rows() there",
                    o.small_expand_sms, device::kEpMostExpanded, experts));
  return {};
}
Result<> check_rows(const Options& o, u32 row_bytes, u32 scale_bytes) {
  if (o.hidden == 0 || o.hidden % 8 != 0)
    return invalid_argument(fmt::format(
        "ep: hidden = {} must be a positive multiple of 8, 16 bytes of bf16: pad the rows to {}",
        o.hidden, device::round_up(std::max(o.hidden, 1u), 8u)));
  if (o.cast && o.hidden % device::kEpScaleGroup != 0)
    return invalid_argument(fmt::format(
        "ep: hidden = {} must be a multiple of {}, the values that share a scale, for "
        "the FP8 cast: pad to {} or set cast = false",
        o.hidden, device::kEpScaleGroup, device::round_up(o.hidden, device::kEpScaleGroup)));
  if (row_bytes % 16 != 0 || row_bytes > kMaxRowBytes || o.hidden * 2 > kMaxRowBytes)
    return invalid_argument(
        fmt::format("ep: rows of {} bytes must be a multiple of 16 and at most {}",
                    std::max(row_bytes, o.hidden * 2), kMaxRowBytes));
  if (scale_bytes % 4 != 0)
    return invalid_argument(fmt::format("ep: scale_bytes = {} must be a multiple of 4: pad to {}",
                                        scale_bytes, device::round_up(scale_bytes, 4u)));
  return {};
}
Result<> check_blocks(const char* what, const std::vector<u32>& blocks, u32 world, u32 max_tokens) {
  if (blocks.size() != world)
    return invalid_argument(
        fmt::format("ep: {}_sms_of has {} numbers for {} ranks: give one a rank, or none", what,
                    blocks.size(), world));
  const u32 least = device::ceil_div(max_tokens, device::kEpMaxTokensPerBlock);
  for (const u32 n : blocks)
    if (n < least || n == 0 || n > device::kEpMaxBlocks)
      return invalid_argument(fmt::format("ep: {}_sms = {} must be {} to {} for {} tokens", what, n,
                                          std::max(least, 1u), device::kEpMaxBlocks, max_tokens));
  return {};
}
Result<> check_senders(const Options& o, const std::vector<u32>& blocks, u32 world) {
  if (!combine_pushes(o, world)) return {};
  for (const u32 n : blocks)
    if (n < 2 || o.combine_send_sms >= n)
      return invalid_argument(
          fmt::format("ep: combine_sms = {} by push must be at least 2, and more than "
                      "combine_send_sms = {}: some send, the others add up",
                      n, o.combine_send_sms));
  return {};
}
std::vector<u32> blocks_of(const std::vector<u32>& each, u32 all, u32 world) {
  return each.empty() ? std::vector<u32>(world, all) : each;
}

}  // namespace

std::vector<u32> dispatch_blocks(const Options& options, u32 world) {
  // At least as many as the counts of a block have room for.
  const u32 least = device::ceil_div(options.max_tokens, device::kEpMaxTokensPerBlock);
  const u32 all = options.dispatch_sms != 0 ? options.dispatch_sms
                                            : std::max(default_dispatch_sms(world), least);
  return blocks_of(options.dispatch_sms_of, all, world);
}
std::vector<u32> combine_blocks(const Options& options, u32 world) {
  const u32 usual = default_combine_sms(world) * (options.combine == CombineBy::kPush ? 2 : 1);
  const u32 all = options.combine_sms != 0 ? options.combine_sms : usual;
  return blocks_of(options.combine_sms_of, all, world);
}
// By size: on 2 and 4 H200s pull is faster with any number of tokens and SMs (docs/design/ep.md).
bool combine_pushes(const Options& options, u32 world) {
  return world > 1 && options.combine == CombineBy::kPush;
}
u32 send_blocks(const Options& options, u32 world, u32 blocks) {
  if (!combine_pushes(options, world)) return 0;
  if (options.combine_send_sms != 0) return options.combine_send_sms;
  // A row of another rank's token is sent once, and every row is added once.
  return std::clamp(blocks * (world - 1) / (2 * world - 1), 1u, blocks - 1);
}

device::EpInputLayout small_input_layout(const Options& options, u32 capacity) {
  const u32 packed = options.compressed
                         ? device::ep_payload_stride(device::EpPayload::kLogFmt10, options.hidden)
                         : 0;
  return device::ep_input_layout(capacity, options.hidden * 2, options.top_k, packed);
}
u32 small_blocks(const Options& options, u32 tokens) {
  const u32 most = options.small_sms != 0 ? options.small_sms : kDefaultSmallSms;
  return std::min(tokens, most);
}

namespace {

// Beside a dispatch.
u32 copy_blocks(const Options& options, u32 world) {
  if (options.expand_sms != kAutoSms) return options.expand_sms;
  const u32 experts = device::EpExperts::make(options.experts, world).most();
  return experts > device::kEpMostExpanded ? 0 : default_expand_sms(world, options.top_k);
}
// Slots of the path for few tokens: control words, rows and inputs of each.
void add_small(Window& window, const Options& options) {
  window.small_capacity = window.world * options.small_tokens;
  const u64 before = window.layout.bytes;
  if (options.small_packets) window.packet_tokens = std::min(options.small_tokens, kPacketTokens);
  const device::EpMessage largest{.row_words = window.row_bytes / 4,
                                  .scale_words = window.scale_bytes / 4,
                                  .top_k = options.top_k,
                                  .cast = false};
  for (u32 i = 0; options.small_tokens != 0 && i < options.small_slots; ++i) {
    window.small.push_back(device::add_ep_small(window.layout, window.world, options.experts));
    if (!options.small_packets) continue;
    window.packets.push_back(device::add_ep_packets(
        window.layout, window.world, window.packet_tokens, largest, options.hidden / 2));
  }
  window.control_bytes += window.layout.bytes - before;
  window.small_output_bytes = device::ep_output_layout({.capacity = window.small_capacity,
                                                        .row_bytes = window.row_bytes,
                                                        .scale_bytes = window.scale_bytes,
                                                        .scales_by_column = true,
                                                        .top_k = options.top_k})
                                  .bytes;
  window.small_input_bytes = small_input_layout(options, window.small_capacity).bytes;
  const u64 slots = window.small.size();
  window.small_outputs = window.layout.add("ep.small.rows", slots * window.small_output_bytes);
  window.small_inputs = window.layout.add("ep.small.inputs", slots * window.small_input_bytes);
}

}  // namespace

Result<Window> make_window(const Options& options, u32 world) {
  CROSSDOCK_CHECK_OK(check_numbers(options, world));
  CROSSDOCK_CHECK_OK(check_small(options));
  CROSSDOCK_CHECK_OK(check_compressed(options, world));
  CROSSDOCK_CHECK_OK(check_few_copies(options, world));
  CROSSDOCK_CHECK_OK(check_expanding(options, world));
  Window window;
  window.world = world;
  window.capacity = world * options.max_tokens;
  window.row_bytes = options.row_bytes != 0 ? options.row_bytes : options.hidden * 2;
  const u32 cast_scales = cast_scale_bytes(options.hidden);
  window.scale_bytes = std::max(options.scale_bytes, cast_scales);
  CROSSDOCK_CHECK_OK(check_rows(options, window.row_bytes, window.scale_bytes));
  const auto blocks = dispatch_blocks(options, world);
  CROSSDOCK_CHECK_OK(check_blocks("dispatch", blocks, world, options.max_tokens));
  const auto combines = combine_blocks(options, world);
  CROSSDOCK_CHECK_OK(check_blocks("combine", combines, world, 1));
  CROSSDOCK_CHECK_OK(check_senders(options, combines, world));
  window.areas = device::add_ep(window.layout, world, options.experts,
                                *std::max_element(blocks.begin(), blocks.end()), options.masks);
  window.copy_blocks = copy_blocks(options, world);
  if (window.copy_blocks != 0)
    window.flags =
        device::add_ep_flags(window.layout, world, window.capacity, window.areas.most_blocks);
  window.control_bytes = window.layout.bytes;
  window.output_bytes = device::ep_output_layout({.capacity = window.capacity,
                                                  .row_bytes = window.row_bytes,
                                                  .scale_bytes = window.scale_bytes,
                                                  .scales_by_column = true,
                                                  .top_k = options.top_k})
                            .bytes;
  window.input_bytes =
      device::ep_input_layout(window.capacity, options.hidden * 2, options.top_k).bytes;
  window.pushes = combine_pushes(options, world);
  if (window.pushes)
    window.staging =
        device::add_ep_staging(window.layout, world, options.max_tokens, options.hidden * 2);
  window.staging_bytes = window.layout.bytes - window.control_bytes;
  add_small(window, options);
  window.slots = options.slots;
  const u64 all = u64{options.slots} + (options.fall_back ? 1 : 0);
  window.outputs = window.layout.add("ep.slots.rows", all * window.output_bytes);
  window.inputs = window.layout.add("ep.slots.inputs", all * window.input_bytes);
  window.user = window.layout.add("ep.user", options.user_bytes);
  return window;
}

u64 copy_words(const Window& window) {
  if (window.copy_blocks == 0) return 0;
  return device::EpCopyWords{window.copy_blocks, window.areas.most_experts}.count();
}
u64 routes_bytes(const Options& options, const Window& window, u32 rank) {
  const u32 blocks = dispatch_blocks(options, window.world)[rank];
  return device::EpTokens::most_routes(options.max_tokens, blocks, window.world) *
         sizeof(device::EpRoute);
}

inline namespace v1 {

std::uint32_t default_dispatch_sms(std::uint32_t world) {
  constexpr double kWire = 345, kOneSm = 49.5, kMargin = 1.28;
  if (world < 2) return 16;
  const double all_copies = static_cast<double>(world) / (world - 1);  // for one off the rank
  return static_cast<std::uint32_t>(std::ceil(all_copies * kWire / kOneSm * kMargin));
}
std::uint32_t default_combine_sms(std::uint32_t world) {
  if (world < 2) return 16;
  return std::max(8u, device::ceil_div(6 * world, world - 1));
}

// An SM copies 41 GB/s, and a dispatch brings what its SMs store, or what the wire takes and what
// stays on the rank. Copies begin when ids have come, a fifth into the dispatch, and end with
// scales: half as many SMs again as keep pace (docs/design/ep.md).
std::uint32_t default_expand_sms(std::uint32_t world, std::uint32_t top_k) {
  constexpr double kWire = 345, kOneSm = 49.5, kCopies = 41, kMost = 104;
  if (world == 0 || top_k == 0) return 0;
  const double ranks = world;
  const double rows = ranks * (1 - std::pow(1 - 1 / ranks, top_k));  // of a token, where even
  const double stored = kOneSm * default_dispatch_sms(world);
  const double arrives = world == 1 ? stored : std::min(stored, kWire * ranks / (ranks - 1));
  const double pace = top_k / rows * arrives / kCopies;
  return static_cast<std::uint32_t>(std::min(kMost, std::ceil(1.5 * pace / 8) * 8));
}

Result<Sizes> sizes(const Options& options, std::uint32_t world) {
  CROSSDOCK_TRY(window, make_window(options, world));
  Sizes out;
  out.capacity = window.capacity;
  out.rows_bytes = window.output_bytes;
  out.input_bytes = window.input_bytes;
  out.staging_bytes = window.staging_bytes;
  out.control_bytes = window.control_bytes;
  out.window_bytes = window.layout.bytes;
  out.user_bytes = options.user_bytes;
  out.small_bytes = window.small.size() * (window.small_output_bytes + window.small_input_bytes);
  if (options.fall_back) out.transit_bytes = window.output_bytes + window.input_bytes;
  u64 local = 0, copy = 0;
  for (u32 rank = 0; rank < world; ++rank) {
    const SlotLayout slot = slot_layout(options, window, rank);
    local = std::max(local, options.slots * slot.local_bytes);
    copy = std::max(copy, slot.copy_bytes);
  }
  const u64 small = small_slot_layout(options, window).local_bytes + sizeof(device::EpState) +
                    sizeof(device::EpSmallState);
  out.local_bytes = sizeof(device::EpState) + local + window.small.size() * small +
                    copy_words(window) * sizeof(u64);
  if (options.fall_back) out.copy_bytes = copy;
  return out;
}

}  // namespace v1
}  // namespace crossdock::ep
