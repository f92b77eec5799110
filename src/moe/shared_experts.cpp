// See shared_experts.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe/shared_experts.hpp"

#include <algorithm>

#include <crossdock/kernel/moe_cast_rows.cuh>

#include "moe/layer_core.hpp"

namespace crossdock::moe {
namespace {

constexpr device::MoeCastRowsConfig kCast{.warps = 8};
constexpr device::KernelId kCastId = device::KernelId::kMoeCastRows;

}  // namespace

symm::KernelRef<device::MoeCastRowsParams> cast_rows_kernel() {
  using C = device::MoeCastRowsConfig;
  return symm::make_kernel<kCast>(kCastId, "moe_cast_rows", "MoeCastRowsConfig",
                                  &device::kernel::moe_cast_rows<kCast>,
                                  symm::Member{"warps", &C::warps});
}

Result<std::unique_ptr<SharedExperts>> SharedExperts::create(ep::Core& group, GemmCore& gemm,
                                                             const LayerOptions& options,
                                                             Deadline deadline) {
  std::unique_ptr<SharedExperts> made(new SharedExperts(group, gemm, options));
  CROSSDOCK_CHECK_OK(made->prepare(deadline));
  for (const u32 rank : group.group().local_ranks())
    CROSSDOCK_CHECK_OK(made->allocate(rank, deadline));
  return made;
}

u64 SharedExperts::buffer_bytes(const LayerOptions& o) {
  if (o.shared_inter == 0) return 0;
  const u64 tokens = o.max_tokens;
  const u64 columns = device::round_up(tokens, u64{4});
  const u64 words = scale_words(o, o.hidden) + scale_words(o, o.shared_inter);
  const u64 codes = scaled(o) ? tokens * o.hidden : 0;
  return (tokens + 1) * 2 * sizeof(u32) + tokens * o.hidden * 2 +
         tokens * o.shared_inter * row_width(o) + codes + columns * words * sizeof(float);
}

// The kernels of every tile that forwards of up to max_tokens may take, and of the cast.
Result<> SharedExperts::prepare(Deadline deadline) {
  for (u32 rows = 1;; rows = std::min(rows * 2, options_.max_tokens)) {
    for (GemmCall like : {first({}, {.count = rows}, {}), second({}, {.count = rows}, {})})
      CROSSDOCK_CHECK_OK(gemm_->prepare(like, deadline));
    if (rows >= options_.max_tokens) break;
  }
  if (!fp8()) return {};
  CROSSDOCK_TRY(cast,
                group_->launcher().prepare(cast_rows_kernel(),
                                           {.threads = kCast.warps * device::kWarpSize}, deadline));
  cast_.emplace(std::move(cast));
  return {};
}

Result<> SharedExperts::allocate(u32 r, Deadline deadline) {
  symm::Rank& on = group_->group().rank(r);
  const u64 tokens = options_.max_tokens;
  Buffers b;
  b.rank = r;
  const auto make = [&](symm::LocalMemory& memory, u64 bytes) -> Result<> {
    CROSSDOCK_TRY(made, on.allocate(std::max<u64>(bytes, 16)));
    memory = std::move(made);
    return {};
  };
  CROSSDOCK_CHECK_OK(make(b.activations, tokens * options_.shared_inter * row_width(options_)));
  CROSSDOCK_CHECK_OK(make(b.outputs, tokens * options_.hidden * 2));
  if (fp8()) {
    const u64 column = scale_columns() * sizeof(float);
    CROSSDOCK_CHECK_OK(make(b.codes, tokens * options_.hidden));
    CROSSDOCK_CHECK_OK(make(b.scales, column * scale_words(options_, options_.hidden)));
    CROSSDOCK_CHECK_OK(
        make(b.activation_scales, column * scale_words(options_, options_.shared_inter)));
  }
  std::vector<u32> offsets;
  for (u32 count = 0; count <= options_.max_tokens; ++count)
    offsets.insert(offsets.end(), {0u, count});
  CROSSDOCK_CHECK_OK(make(b.offsets, offsets.size() * sizeof(u32)));
  CROSSDOCK_CHECK_OK(
      on.write(b.offsets.address(), offsets.data(), offsets.size() * sizeof(u32), deadline));
  buffers_.push_back(std::move(b));
  return {};
}

const SharedExperts::Buffers& SharedExperts::buffers(u32 rank) const {
  return *std::find_if(buffers_.begin(), buffers_.end(),
                       [&](const Buffers& b) { return b.rank == rank; });
}
const void* SharedExperts::outputs(u32 rank) const {
  return buffers(rank).outputs.address();
}

Result<> SharedExperts::cast(const Buffers& b, const LayerInput& in, StreamPtr stream) {
  const symm::Rank& rank = group_->group().rank(b.rank);
  const bool given = in.format == Format::kE4m3;
  device::MoeCastRowsParams p{};
  p.common = rank.common(kCastId, options_.wait);
  p.count = in.count;
  p.groups = options_.hidden / 128;
  p.ue8m0 = options_.scales == ScaleType::kUe8m0;
  p.words = scale_words(options_, options_.hidden);
  p.rows = given ? nullptr : static_cast<const u8*>(in.rows);
  p.row_stride = in.row_stride != 0 ? in.row_stride : u64{options_.hidden} * 2;
  p.given = static_cast<const u32*>(in.scales);
  p.given_stride = in.scale_stride != 0 ? in.scale_stride : u64{p.words} * sizeof(u32);
  p.codes = b.codes.as<u8>();
  p.scales = b.scales.as<u32>();
  p.scale_columns = scale_columns();
  const u32 groups_of_block = kCast.warps * device::MoeCastGroup::kPerWarp;
  const u64 blocks = device::ceil_div(u64{in.count} * p.groups, u64{groups_of_block});
  const u32 most = 4 * group_->launcher().num_sms(rank);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(shape,
                group_->shape(rank, static_cast<u32>(std::min<u64>(blocks, most)), stream, kept));
  return group_->launcher().launch(rank, *cast_, shape, p);
}

const u32* SharedExperts::offsets_of(const Buffers& b, u32 count) {
  return b.offsets.address() == nullptr ? nullptr : b.offsets.as<u32>() + u64{2} * count;
}

GemmCall SharedExperts::first(const WeightsView& w, const LayerInput& in, const Buffers& b) const {
  const bool here = !fp8() || in.format == Format::kE4m3;  // the caller's rows are multiplied
  return {
      .weights = {.format = options_.format,
                  .rows = w.gate_up,
                  .scales = w.gate_up_scales,
                  .experts = 1,
                  .n = 2 * options_.shared_inter,
                  .k = options_.hidden},
      .input = {.rows = here ? in.rows : b.codes.address(),
                .count = in.count,
                .row_stride = here ? in.row_stride : 0,
                .scales = b.scales.address(),
                .scale_columns = fp8() ? scale_columns() : 0},
      .groups = {.offsets = offsets_of(b, in.count)},
      .output = {.format = row_format(options_),
                 .rows = b.activations.address(),
                 .scales = b.activation_scales.address(),
                 .scale_columns = fp8() ? scale_columns() : 0},
      .swiglu =
          Swiglu{.clamp = options_.clamp, .fast = options_.fast, .row_weights = in.shared_weights},
      .scale_type = options_.scales,
      .expected_rows = in.count};
}

GemmCall SharedExperts::second(const WeightsView& w, const LayerInput& in, const Buffers& b) const {
  return {.weights = {.format = options_.format,
                      .rows = w.down,
                      .scales = w.down_scales,
                      .experts = 1,
                      .n = options_.hidden,
                      .k = options_.shared_inter},
          .input = {.rows = b.activations.address(),
                    .count = in.count,
                    .scales = b.activation_scales.address(),
                    .scale_columns = fp8() ? scale_columns() : 0},
          .groups = {.offsets = offsets_of(b, in.count)},
          .output = {.rows = b.outputs.address()},
          .scale_type = options_.scales,
          .expected_rows = in.count};
}

Result<> SharedExperts::run(u32 rank, const WeightsView& weights, const LayerInput& input,
                            StreamPtr stream, u32 blocks) {
  if (input.count == 0) return {};
  const Buffers& b = buffers(rank);
  if (fp8()) CROSSDOCK_CHECK_OK(cast(b, input, stream));
  CROSSDOCK_CHECK_OK(gemm_->run(rank, first(weights, input, b), stream, blocks));
  return gemm_->run(rank, second(weights, input, b), stream, blocks);
}

}  // namespace crossdock::moe
