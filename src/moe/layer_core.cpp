// LayerCore: creation, buffers and weights. What is refused is in layer_check.cpp, forwards are in
// layer_run.cpp. See layer_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/layer_core.hpp"

#include <algorithm>
#include <utility>

namespace crossdock::moe {
namespace {

// Of the places of an expert: its scales then begin at a multiple of 16 bytes.
constexpr u32 kAlignment = 8;

u64 most_places(const LayerOptions& options, u32 capacity, u32 experts, u32 alignment) {
  const u64 all = device::ep_most_places(capacity, options.top_k, experts, alignment);
  const u64 wanted = u64{options.max_places} + u64{experts} * (alignment - 1);
  return options.max_places == 0 ? all : std::min(all, wanted);
}
Result<LayerSizes> sizes_of(const LayerOptions& options, const ep::Options& group, u32 world) {
  LayerSizes out;
  CROSSDOCK_TRY(ep, ep::sizes(group, world));
  const u32 experts = device::EpExperts::make(options.experts, world).most();
  const WeightLayout layout{.format = options.format,
                            .experts = experts,
                            .hidden = options.hidden,
                            .inter = options.inter,
                            .scales = options.scales};
  CROSSDOCK_TRY(weights, weight_sizes(layout));
  out.group = ep;
  out.weights = weights;
  out.places = most_places(options, ep.capacity, experts, group.expert_alignment);
  const u64 columns = device::round_up(u64{out.places}, u64{4});
  out.activation_bytes = out.places * options.inter * row_width(options) +
                         columns * scale_words(options, options.inter) * sizeof(float);
  out.output_bytes = out.places * options.hidden * 2;
  out.ones_bytes = u64{options.max_tokens} * options.top_k * sizeof(float);
  if (options.shared_inter == 0) return out;
  CROSSDOCK_TRY(shared, weight_sizes({.format = options.format,
                                      .experts = 1,
                                      .hidden = options.hidden,
                                      .inter = options.shared_inter,
                                      .scales = options.scales}));
  out.shared_weights = shared;
  out.shared_bytes = SharedExperts::buffer_bytes(options);
  return out;
}

}  // namespace

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
    CROSSDOCK_CHECK_OK(core->allocate(rank, deadline));
    CROSSDOCK_CHECK_OK(core->make_side(rank));
  }
  return core;
}

Result<> LayerCore::allocate(u32 r, Deadline deadline) {
  symm::Rank& on = rank(r);
  Buffers b;
  b.rank = r;
  CROSSDOCK_TRY(activations, on.allocate(sizes_.places * options_.inter * row_width(options_)));
  CROSSDOCK_TRY(outputs, on.allocate(sizes_.output_bytes));
  b.activations = std::move(activations);
  b.outputs = std::move(outputs);
  const std::vector<float> ones(u64{options_.max_tokens} * options_.top_k, 1.0f);
  CROSSDOCK_TRY(made, on.allocate(sizes_.ones_bytes));
  CROSSDOCK_CHECK_OK(on.write(made.address(), ones.data(), sizes_.ones_bytes, deadline));
  b.ones = std::move(made);
  if (scaled(options_)) {
    CROSSDOCK_TRY(scales, on.allocate(scale_columns() * scale_words(options_, options_.inter) *
                                      sizeof(float)));
    b.activation_scales = std::move(scales);
  }
  buffers_.push_back(std::move(b));
  return {};
}

// The kernels of every tile that forwards of up to max_tokens may take.
Result<> LayerCore::prepare(Deadline deadline, std::optional<Bias> of_first,
                            std::optional<Bias> of_second) const {
  static constexpr std::int32_t kListed = 0;  // that there is a list counts, not what is in it
  const WeightsView none{.layout = weight_layout(0)};
  const u32 most = expected_rows({.count = options_.max_tokens});
  // Tiles change at powers of two.
  for (u32 rows = 1;; rows = std::min(rows * 2, most)) {
    GemmCall one = first(none, {}, {}, {}), two = second(none, {}, {}, {});
    one.expected_rows = two.expected_rows = rows;
    if (row_order({.expected_rows = rows}) == RowOrder::kGather) one.groups.rows = &kListed;
    one.bias = of_first;
    two.bias = of_second;
    CROSSDOCK_CHECK_OK(gemm_->prepare(one, deadline));
    CROSSDOCK_CHECK_OK(gemm_->prepare(two, deadline));
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
            .inter = options_.shared_inter,
            .scales = options_.scales};
  const auto experts = device::EpExperts::make(options_.experts, group_->group().world());
  return {.format = options_.format,
          .experts = experts.count(rank),
          .hidden = options_.hidden,
          .inter = options_.inter,
          .scales = options_.scales};
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

namespace {

// Whether a forward may have its dispatch copy rows: where an expert may have so many that they are
// copied apart, and no shared experts make halves of every forward.
bool may_copy_beside(const LayerOptions& o) {
  if (o.shared_inter != 0) return false;
  if (o.row_order != RowOrder::kAuto) return o.row_order == RowOrder::kCopy;
  const u64 choices = u64{o.max_tokens} * std::max(o.ranks.world, 1u) * o.top_k;
  return choose_row_order(static_cast<u32>(choices / std::max(o.experts, 1u))) == RowOrder::kCopy;
}

}  // namespace

inline namespace v1 {

ep::Options group_options(const LayerOptions& options) {
  ep::Options ep;
  ep.experts = options.experts;
  ep.top_k = options.top_k;
  ep.max_tokens = options.max_tokens;
  ep.hidden = options.hidden;
  ep.row_bytes = options.hidden * row_width(options);
  ep.wide_ids = options.wide_ids;
  ep.dispatch_sms = options.dispatch_sms;
  ep.combine_sms = options.combine_sms;
  ep.wait = options.wait;
  ep.cast = scaled(options);
  ep.fall_back = false;    // a forward gives its slot back
  ep.host_counts = false;  // nor does it ask for counts
  ep.expert_alignment = kAlignment;
  ep.expand_sms = may_copy_beside(options) ? options.expand_sms : 0;
  ep.statistics = options.statistics;
  return ep;
}

Result<LayerSizes> layer_sizes(const LayerOptions& options) {
  CROSSDOCK_CHECK_OK(check_layer(options, options.ranks.world));
  return sizes_of(options, group_options(options), options.ranks.world);
}

}  // namespace v1
}  // namespace crossdock::moe
