// What is wrong with a layer: its options, the group that it is to share, the weights that it is
// given. What is wrong with a forward is in layer_run.cpp. See layer_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "moe/layer_core.hpp"
#include "moe/variants.hpp"
#include "symm/pointers.hpp"

namespace crossdock::moe {
namespace {

Result<> check_same(const char* what, u64 group, u64 layer) {
  if (group == layer) return {};
  return invalid_argument(fmt::format(
      "moe layer: the group was made with {} = {} and the layer wants {}: make the group with "
      "group_options()",
      what, group, layer));
}
Result<> check_formats(const LayerOptions& o) {
  if (o.format > Format::kE2m1)
    return invalid_argument(
        fmt::format("moe layer: the unknown format {}", static_cast<unsigned>(o.format)));
  if (o.scales > ScaleType::kUe8m0)
    return invalid_argument(
        fmt::format("moe layer: scales of the unknown type {}", static_cast<unsigned>(o.scales)));
  if (!scaled(o) && o.scales != ScaleType::kF32)
    return invalid_argument(
        "moe layer: scales = ue8m0 with format = bf16, which has no scales: leave them f32");
  return {};
}

}  // namespace

Result<> check_group(const ep::Options& group, const LayerOptions& layer) {
  CROSSDOCK_CHECK_OK(check_same("experts", group.experts, layer.experts));
  CROSSDOCK_CHECK_OK(check_same("top_k", group.top_k, layer.top_k));
  CROSSDOCK_CHECK_OK(check_same("hidden", group.hidden, layer.hidden));
  CROSSDOCK_CHECK_OK(check_same("wide_ids", group.wide_ids, layer.wide_ids));
  if (group.max_tokens < layer.max_tokens)
    return invalid_argument(
        fmt::format("moe layer: max_tokens = {} are more than the {} that the group was made for",
                    layer.max_tokens, group.max_tokens));
  const u32 row_bytes = group.row_bytes != 0 ? group.row_bytes : group.hidden * 2;
  if (group.expert_alignment == 0 || (scaled(layer) && !group.cast) ||
      row_bytes < layer.hidden * row_width(layer))
    return invalid_argument(fmt::format(
        "moe layer: the group was made with expert_alignment = {}, cast = {} and rows of {} bytes: "
        "make it with group_options()",
        group.expert_alignment, group.cast, row_bytes));
  if (scaled(layer) && group.expert_alignment % 4 != 0)
    return invalid_argument(
        fmt::format("moe layer: the group was made with expert_alignment = {}: rows with scales "
                    "need a multiple of 4, as group_options() gives it",
                    group.expert_alignment));
  if (group.slots == 0)
    return invalid_argument(
        "moe layer: the group was made with slots = 0: a forward needs at least one");
  return {};
}

Result<> check_layer(const LayerOptions& o, u32 world) {
  CROSSDOCK_CHECK_OK(check_formats(o));
  for (const auto& [what, value] : {std::pair{"hidden", o.hidden}, std::pair{"inter", o.inter}})
    if (value == 0 || value % 128 != 0)
      return invalid_argument(
          fmt::format("moe layer: {} = {} must be a positive multiple of 128: pad to {}", what,
                      value, device::round_up(std::max(value, 1u), 128u)));
  if (o.shared_inter % 128 != 0)
    return invalid_argument(
        fmt::format("moe layer: shared_inter = {} must be a multiple of 128: pad to {}",
                    o.shared_inter, device::round_up(o.shared_inter, 128u)));
  if (o.experts < world)
    return invalid_argument(
        fmt::format("moe layer: {} experts are fewer than the {} ranks: every rank needs one",
                    o.experts, world));
  if (!(o.clamp >= 0))
    return invalid_argument(
        fmt::format("moe layer: clamp = {} must be 0 or more; infinity: none", o.clamp));
  return {};
}

Result<> LayerCore::check_weights(u32 rank, const WeightsView& weights, Experts of) const {
  if (of == Experts::kShared && options_.shared_inter == 0)
    return invalid_argument(
        "moe layer: shared_inter = 0: make the layer with the inner size of its shared experts");
  const WeightLayout wanted = weight_layout(rank, of);
  if (weights.layout != wanted)
    return make_error(
        Code::kIncompatible,
        fmt::format("moe layer: the weights are of {}; rank {} takes {}: prepare them for it",
                    describe(weights.layout), rank, describe(wanted)));
  const auto wrong = [](const void* p, u64 alignment) {
    return p == nullptr || reinterpret_cast<std::uintptr_t>(p) % alignment != 0;
  };
  if (wrong(weights.gate_up, 16) || wrong(weights.down, 16))
    return invalid_argument(
        fmt::format("moe layer: gate_up at {} and down at {} must lie on multiples of 16 bytes",
                    weights.gate_up, weights.down));
  const u64 width = options_.scales == ScaleType::kUe8m0 ? 1 : 4;
  const bool needs = scaled(options_);
  if (needs ? wrong(weights.gate_up_scales, width) || wrong(weights.down_scales, width)
            : weights.gate_up_scales != nullptr || weights.down_scales != nullptr)
    return invalid_argument(
        fmt::format("moe layer: {} weights {} scales, but those of gate_up are at {} and those of "
                    "down at {}",
                    format_name(options_.format), needs ? "need" : "have no",
                    weights.gate_up_scales, weights.down_scales));
  return {};
}

Result<> LayerCore::check_there(u32 r, const WeightsView& weights, Experts of) const {
  CROSSDOCK_CHECK_OK(check_weights(r, weights, of));
  const symm::Rank& on = rank(r);
  CROSSDOCK_CHECK_OK(symm::check_pointer(on, {"moe", "use", weights.gate_up, "gate_up"}));
  CROSSDOCK_CHECK_OK(
      symm::check_pointer(on, {"moe", "use", weights.gate_up_scales, "scales of gate_up"}));
  CROSSDOCK_CHECK_OK(symm::check_pointer(on, {"moe", "use", weights.down, "down"}));
  return symm::check_pointer(on, {"moe", "use", weights.down_scales, "scales of down"});
}

}  // namespace crossdock::moe
