// LayerCore: creation, buffers and weights. Forwards are in layer_run.cpp. See layer_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/layer_core.hpp"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <utility>

namespace crossdock::moe {
namespace {

// Of the places of an expert: its scales then begin at a multiple of 16 bytes.
constexpr u32 kAlignment = 8;

Result<> check_same(const char* what, u64 group, u64 layer) {
  if (group == layer) return {};
  return invalid_argument(fmt::format(
      "moe layer: the group was made with {} = {} and the layer wants {}: make the group with "
      "group_options()",
      what, group, layer));
}
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
  const bool fp8 = layer.format == Format::kE4m3;
  if (group.expert_alignment == 0 || (fp8 && !group.cast) ||
      row_bytes < layer.hidden * (fp8 ? 1 : 2))
    return invalid_argument(fmt::format(
        "moe layer: the group was made with expert_alignment = {}, cast = {} and rows of {} bytes: "
        "make it with group_options()",
        group.expert_alignment, group.cast, row_bytes));
  return {};
}
u64 most_places(const LayerOptions& options, u32 capacity, u32 experts, u32 alignment) {
  const u64 all = device::ep_most_places(capacity, options.top_k, experts, alignment);
  const u64 wanted = u64{options.max_places} + u64{experts} * (alignment - 1);
  return options.max_places == 0 ? all : std::min(all, wanted);
}
Result<LayerSizes> sizes_of(const LayerOptions& options, const ep::Options& group, u32 world) {
  LayerSizes out;
  CROSSDOCK_TRY(ep, ep::sizes(group, world));
  const u32 experts = device::EpExperts::make(options.experts, world).most();
  CROSSDOCK_TRY(weights, weight_sizes({.format = options.format,
                                       .experts = experts,
                                       .hidden = options.hidden,
                                       .inter = options.inter}));
  out.group = ep;
  out.weights = weights;
  out.places = most_places(options, ep.capacity, experts, group.expert_alignment);
  const bool fp8 = options.format == Format::kE4m3;
  const u64 columns = device::round_up(u64{out.places}, u64{4});
  out.activation_bytes = out.places * options.inter * (fp8 ? 1 : 2) +
                         (fp8 ? columns * (options.inter / 128) * sizeof(float) : 0);
  out.output_bytes = out.places * options.hidden * 2;
  if (options.shared_inter == 0) return out;
  CROSSDOCK_TRY(shared, weight_sizes({.format = options.format,
                                      .experts = 1,
                                      .hidden = options.hidden,
                                      .inter = options.shared_inter}));
  out.shared_weights = shared;
  out.shared_bytes = SharedExperts::buffer_bytes(options);
  return out;
}

}  // namespace

Result<> check_layer(const LayerOptions& o, u32 world) {
  if (o.format != Format::kBf16 && o.format != Format::kE4m3)
    return invalid_argument(
        fmt::format("moe layer: the unknown format {}", static_cast<unsigned>(o.format)));
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

Result<std::shared_ptr<LayerCore>> LayerCore::create(std::shared_ptr<ep::Core> group,
                                                     const LayerOptions& options,
                                                     Deadline deadline) {
  const u32 world = group->group().world();
  CROSSDOCK_CHECK_OK(check_layer(options, world));
  CROSSDOCK_CHECK_OK(check_group(group->options(), options));
  std::shared_ptr<LayerCore> core(new LayerCore(std::move(group), options));
  CROSSDOCK_TRY(sizes, sizes_of(options, core->group_->options(), world));
  core->sizes_ = sizes;
  core->gemm_ =
      GemmCore::over(core->group_->launcher(), {.sms = options.gemm_sms, .wait = options.wait});
  CROSSDOCK_CHECK_OK(core->prepare(deadline));
  if (options.shared_inter != 0) {
    CROSSDOCK_TRY(shared, SharedExperts::create(*core->group_, *core->gemm_, options, deadline));
    core->shared_ = std::move(shared);
  }
  for (const u32 rank : core->group_->group().local_ranks()) {
    CROSSDOCK_CHECK_OK(core->allocate(rank));
    CROSSDOCK_CHECK_OK(core->make_side(rank));
  }
  return core;
}

Result<> LayerCore::allocate(u32 r) {
  symm::Rank& on = rank(r);
  const bool fp8 = options_.format == Format::kE4m3;
  Buffers b;
  b.rank = r;
  CROSSDOCK_TRY(activations, on.allocate(sizes_.places * options_.inter * (fp8 ? 1 : 2)));
  CROSSDOCK_TRY(outputs, on.allocate(sizes_.output_bytes));
  b.activations = std::move(activations);
  b.outputs = std::move(outputs);
  if (fp8) {
    CROSSDOCK_TRY(scales, on.allocate(scale_columns() * (options_.inter / 128) * sizeof(float)));
    b.activation_scales = std::move(scales);
  }
  buffers_.push_back(std::move(b));
  return {};
}

// The kernels of every tile that forwards of up to max_tokens may take.
Result<> LayerCore::prepare(Deadline deadline) {
  const WeightsView none{.layout = weight_layout(0)};
  const u32 most = expected_rows({.count = options_.max_tokens});
  // Tiles change at powers of two.
  for (u32 rows = 1;; rows = std::min(rows * 2, most)) {
    for (GemmCall like : {first(none, {}, {}, {}), second(none, {}, {}, {})}) {
      like.expected_rows = rows;
      CROSSDOCK_CHECK_OK(gemm_->prepare(like, deadline));
    }
    if (rows == most) return {};
  }
}

const LayerCore::Buffers& LayerCore::buffers(u32 rank) const {
  return *std::find_if(buffers_.begin(), buffers_.end(),
                       [&](const Buffers& b) { return b.rank == rank; });
}

WeightLayout LayerCore::weight_layout(u32 rank, Experts of) const {
  if (of == Experts::kShared)
    return {.format = options_.format,
            .experts = 1,
            .hidden = options_.hidden,
            .inter = options_.shared_inter};
  const auto experts = device::EpExperts::make(options_.experts, group_->group().world());
  return {.format = options_.format,
          .experts = experts.count(rank),
          .hidden = options_.hidden,
          .inter = options_.inter};
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
  const bool fp8 = options_.format == Format::kE4m3;
  const auto wrong = [](const void* p, u64 alignment) {
    return p == nullptr || reinterpret_cast<std::uintptr_t>(p) % alignment != 0;
  };
  if (wrong(weights.gate_up, 16) || wrong(weights.down, 16))
    return invalid_argument(
        fmt::format("moe layer: gate_up at {} and down at {} must lie on multiples of 16 bytes",
                    weights.gate_up, weights.down));
  if (fp8 ? wrong(weights.gate_up_scales, 4) || wrong(weights.down_scales, 4)
          : weights.gate_up_scales != nullptr || weights.down_scales != nullptr)
    return invalid_argument(
        fmt::format("moe layer: {} weights {} scales, but those of gate_up are at {} and those of "
                    "down at {}",
                    fp8 ? "e4m3" : "bf16", fp8 ? "need" : "have no", weights.gate_up_scales,
                    weights.down_scales));
  return {};
}

Result<RankWeights> LayerCore::copy_weights(u32 r, const WeightsView& from, Deadline deadline,
                                            Experts of) const {
  CROSSDOCK_CHECK_OK(check_weights(r, from, of));
  CROSSDOCK_TRY(sizes, weight_sizes(from.layout));
  symm::Rank& on = rank(r);
  const auto copy = [&](const void* source, u64 bytes) -> Result<symm::LocalMemory> {
    if (bytes == 0) return symm::LocalMemory{};
    CROSSDOCK_TRY(memory, on.allocate(bytes));
    CROSSDOCK_CHECK_OK(on.write(memory.address(), source, bytes, deadline));
    return memory;
  };
  RankWeights out;
  CROSSDOCK_TRY(gate_up, copy(from.gate_up, sizes.gate_up_bytes));
  CROSSDOCK_TRY(gate_up_scales,
                copy(from.gate_up_scales, sizes.gate_up_scales * sizes.scale_bytes));
  CROSSDOCK_TRY(down, copy(from.down, sizes.down_bytes));
  CROSSDOCK_TRY(down_scales, copy(from.down_scales, sizes.down_scales * sizes.scale_bytes));
  out.rank = r;
  out.view = {.layout = from.layout,
              .gate_up = gate_up.address(),
              .gate_up_scales = gate_up_scales.address(),
              .down = down.address(),
              .down_scales = down_scales.address()};
  out.gate_up = std::move(gate_up);
  out.gate_up_scales = std::move(gate_up_scales);
  out.down = std::move(down);
  out.down_scales = std::move(down_scales);
  return out;
}

inline namespace v1 {

ep::Options group_options(const LayerOptions& options) {
  const bool fp8 = options.format == Format::kE4m3;
  ep::Options ep;
  ep.experts = options.experts;
  ep.top_k = options.top_k;
  ep.max_tokens = options.max_tokens;
  ep.hidden = options.hidden;
  ep.row_bytes = options.hidden * (fp8 ? 1 : 2);
  ep.wide_ids = options.wide_ids;
  ep.dispatch_sms = options.dispatch_sms;
  ep.combine_sms = options.combine_sms;
  ep.wait = options.wait;
  ep.cast = fp8;
  ep.fall_back = false;    // a forward gives its slot back
  ep.host_counts = false;  // nor does it ask for counts
  ep.expert_alignment = kAlignment;
  ep.statistics = options.statistics;
  return ep;
}

Result<LayerSizes> layer_sizes(const LayerOptions& options) {
  CROSSDOCK_CHECK_OK(check_layer(options, options.ranks.world));
  return sizes_of(options, group_options(options), options.ranks.world);
}

}  // namespace v1
}  // namespace crossdock::moe
