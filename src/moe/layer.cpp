// The public face: Layer over LayerCore. See crossdock/moe/layer.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <utility>

#include "moe/layer_core.hpp"

namespace crossdock::moe {
namespace {

Result<RankWeights*> find(const std::vector<std::unique_ptr<RankWeights>>& all, u32 rank) {
  for (const auto& weights : all)
    if (weights->rank == rank) return weights.get();
  return invalid_argument(fmt::format(
      "moe layer: rank {} is not one of the {} ranks of this process", rank, all.size()));
}

}  // namespace

inline namespace v1 {

Result<Layer> Layer::create(const LayerOptions& options) {
  CROSSDOCK_CHECK_OK(check_layer(options, options.ranks.world));
  CROSSDOCK_TRY(group, ep::Core::create({.ranks = options.ranks, .ep = group_options(options)}));
  CROSSDOCK_TRY(
      core, LayerCore::create(std::move(group), options, Deadline::in(options.compile_timeout)));
  return Layer(std::move(core));
}
Result<Layer> Layer::create(const ep::Group& group, const LayerOptions& options,
                            Deadline deadline) {
  CROSSDOCK_TRY(core, LayerCore::create(group.core().shared_from_this(), options, deadline));
  return Layer(std::move(core));
}
Layer::Layer(std::shared_ptr<moe::LayerCore> core) : core_(std::move(core)) {
  for (auto* of : {&weights_, &shared_})
    for (const u32 rank : local_ranks()) {
      of->push_back(std::make_unique<RankWeights>());
      of->back()->rank = rank;
    }
}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;
Layer::~Layer() = default;

Layer Layer::sibling() const {
  return Layer(core_);
}

std::uint32_t Layer::world() const noexcept {
  return core_->group().group().world();
}
std::span<const std::uint32_t> Layer::local_ranks() const noexcept {
  return core_->group().group().local_ranks();
}
const LayerSizes& Layer::memory() const noexcept {
  return core_->memory();
}
WeightLayout Layer::weight_layout(std::uint32_t rank) const {
  return core_->weight_layout(rank);
}
const moe::RankWeights* Layer::weights_of(std::uint32_t rank) const noexcept {
  const auto found = find(weights_, rank);
  return found.ok() ? *found : nullptr;
}

Result<> Layer::load(std::uint32_t rank, const WeightsView& weights, Deadline deadline) {
  CROSSDOCK_TRY(mine, find(weights_, rank));
  CROSSDOCK_TRY(copied, core_->copy_weights(rank, weights, deadline));
  *mine = std::move(copied);
  return {};
}
Result<> Layer::use(std::uint32_t rank, const WeightsView& weights) {
  CROSSDOCK_TRY(mine, find(weights_, rank));
  CROSSDOCK_CHECK_OK(core_->check_there(rank, weights));
  *mine = RankWeights{.rank = rank, .view = weights};
  return {};
}
Result<PreparedWeights> Layer::prepare_weights(std::uint32_t rank, const PlainWeights& plain,
                                               Deadline deadline) {
  const LayerOptions& o = core_->options();
  return Weights::prepare(core_->gemm(), core_, rank, plain,
                          {.format = o.format, .scales = o.scales}, deadline);
}
Result<> Layer::load_bias(std::uint32_t rank, const ExpertBias& bias, Deadline deadline) {
  CROSSDOCK_TRY(mine, find(weights_, rank));
  return core_->copy_bias(*mine, bias, deadline);
}
WeightLayout Layer::shared_layout() const {
  return core_->weight_layout(0, Experts::kShared);
}
Result<> Layer::load_shared(std::uint32_t rank, const WeightsView& weights, Deadline deadline) {
  CROSSDOCK_TRY(mine, find(shared_, rank));
  CROSSDOCK_TRY(copied, core_->copy_weights(rank, weights, deadline, Experts::kShared));
  *mine = std::move(copied);
  return {};
}
Result<> Layer::use_shared(std::uint32_t rank, const WeightsView& weights) {
  CROSSDOCK_TRY(mine, find(shared_, rank));
  CROSSDOCK_CHECK_OK(core_->check_there(rank, weights, Experts::kShared));
  *mine = RankWeights{.rank = rank, .view = weights};
  return {};
}
Result<> Layer::forward(std::uint32_t rank, const LayerInput& input, const LayerOutput& output,
                        StreamPtr stream) {
  CROSSDOCK_TRY(mine, find(weights_, rank));
  CROSSDOCK_TRY(shared, find(shared_, rank));
  return core_->forward(*mine,
                        {.input = input, .output = output, .stream = stream, .shared = shared});
}
BegunForward::BegunForward(std::unique_ptr<moe::Begun> begun) : begun_(std::move(begun)) {}
BegunForward::BegunForward(BegunForward&&) noexcept = default;
BegunForward& BegunForward::operator=(BegunForward&&) noexcept = default;
BegunForward::~BegunForward() = default;

Result<BegunForward> Layer::forward_begin(std::uint32_t rank, const LayerInput& input,
                                          StreamPtr stream) {
  CROSSDOCK_TRY(mine, find(weights_, rank));
  CROSSDOCK_TRY(shared, find(shared_, rank));
  CROSSDOCK_TRY(begun, core_->begin(*mine, {.input = input, .stream = stream, .shared = shared}));
  return BegunForward(std::move(begun));
}
Result<> Layer::forward_end(BegunForward& begun, const LayerOutput& output, StreamPtr stream) {
  if (begun.ended())
    return invalid_argument("moe layer: this forward has ended: begin another one");
  if (begun.begun_->core != core_)
    return invalid_argument(
        "moe layer: this forward was begun by a layer over other buffers: end it with the layer "
        "that began it, or a sibling");
  CROSSDOCK_TRY(mine, find(weights_, begun.begun_->rank));
  CROSSDOCK_TRY(shared, find(shared_, begun.begun_->rank));
  CROSSDOCK_CHECK_OK(
      core_->end(*mine, *begun.begun_, {.output = output, .stream = stream, .shared = shared}));
  begun.begun_.reset();
  return {};
}
Result<> Layer::synchronize(Deadline deadline) {
  return core_->group().launcher().synchronize(deadline);
}
Result<> Layer::check() const {
  return core_->group().group().check();
}
Result<> Layer::reset(Deadline deadline) {
  return core_->group().reset(deadline);
}
Result<ep::Statistics> Layer::statistics(std::uint32_t rank, Deadline deadline) const {
  return core_->group().statistics(rank, deadline);
}

}  // namespace v1
}  // namespace crossdock::moe
