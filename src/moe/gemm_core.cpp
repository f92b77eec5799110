// GemmCore, and moe::Gemm over it. See gemm_core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm_core.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <initializer_list>
#include <utility>

#include "moe/weight_kernel.hpp"
#include "symm/pointers.hpp"

namespace crossdock::moe {
namespace {

template <class Variants>
auto* find(const Variants& all, const device::GroupedGemmConfig& config) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& v) { return same(v.config, config); });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

Result<std::shared_ptr<GemmCore>> GemmCore::create(const GemmOptions& options) {
  std::shared_ptr<GemmCore> core(new GemmCore({.sms = options.sms, .wait = options.wait}));
  device::SymmetricLayout layout;
  layout.add("unused", device::SymmetricLayout::kLine);  // a window cannot be empty
  CROSSDOCK_TRY(group, symm::Group::create(options.ranks, layout));
  CROSSDOCK_TRY(jit, symm::open_jit(*group));
  core->jit_ = std::move(jit);
  core->group_ = std::move(group);
  CROSSDOCK_TRY(launcher, symm::Launcher::create(*core->group_, core->jit_.get()));
  core->own_launcher_.emplace(std::move(launcher));
  core->launcher_ = &*core->own_launcher_;
  return core;
}

std::shared_ptr<GemmCore> GemmCore::over(symm::Launcher& launcher, const Settings& settings) {
  std::shared_ptr<GemmCore> core(new GemmCore(settings));
  core->launcher_ = &launcher;
  return core;
}

// Or one that differs in what it is best for, not in what it does: prepare() was called with
// another K, or without the list of rows or the bias.
const GemmCore::Variant* GemmCore::find_any(const device::GroupedGemmConfig& config) const {
  const std::lock_guard lock(prepared_);
  if (const Variant* exact = find(variants_, config)) return exact;
  const auto found = std::find_if(variants_.begin(), variants_.end(), [&](const Variant& v) {
    auto other = config;
    other.hand_over = v.config.hand_over;
    return same(v.config, other);
  });
  return found == variants_.end() ? nullptr : &*found;
}

Result<device::GroupedGemmConfig> GemmCore::choose(const GemmCall& call) const {
  CROSSDOCK_TRY(config, choose_gemm(call));
  if (hand_over_ && config.tile_rows == 128 && config.fp8 && !config.fp4)
    config.hand_over = *hand_over_;
  return config;
}

Result<> GemmCore::prepare(const GemmCall& like, Deadline deadline) {
  if (like.weights.k != 0) return prepare_one(like, deadline);
  GemmCall of = like;
  for (const u32 k : {1u, ~0u}) {  // long sums may have a kernel of their own
    of.weights.k = k;
    CROSSDOCK_CHECK_OK(prepare_one(of, deadline));
  }
  return {};
}

// Compiles without the lock, which forwards of other ranks take: of two that do so at the same time
// the first one's kernel is kept.
Result<> GemmCore::prepare_one(const GemmCall& like, Deadline deadline) {
  CROSSDOCK_TRY(config, choose(like));
  {
    const std::lock_guard lock(prepared_);
    if (find(variants_, config) != nullptr) return {};
  }
  CROSSDOCK_TRY(ref, gemm_kernel(config));
  const symm::BlockShape block{.threads = device::gemm_threads(config),
                               .shared_bytes = device::grouped_gemm_shared(config).bytes};
  CROSSDOCK_TRY(kernel, launcher_->prepare(ref, block, deadline));
  const std::lock_guard lock(prepared_);
  if (find(variants_, config) == nullptr) variants_.push_back({config, std::move(kernel)});
  return {};
}

bool GemmCore::prepared_best(const GemmCall& call) const {
  const auto config = choose(call);
  const std::lock_guard lock(prepared_);
  return config.ok() && find(variants_, *config) != nullptr;
}

Result<> GemmCore::check_pointers(const symm::Rank& rank, const GemmCall& call) {
  const void* const bias = call.bias ? call.bias->values : nullptr;
  const float* const row_weights = call.swiglu ? call.swiglu->row_weights : nullptr;
  for (const auto& [p, what] : std::initializer_list<std::pair<const void*, const char*>>{
           {call.weights.rows, "weights"},
           {call.weights.scales, "scales of weights"},
           {call.input.count == 0 ? nullptr : call.input.rows, "input rows"},
           {call.input.count == 0 ? nullptr : call.input.scales, "input scales"},
           {call.groups.offsets, "offsets"},
           {call.groups.counts, "counts"},
           {call.groups.rows, "numbers of rows"},
           {call.output.rows, "output rows"},
           {call.output.scales, "output scales"},
           {row_weights, "weights of rows"},
           {bias, "bias"}})
    CROSSDOCK_CHECK_OK(symm::check_pointer(rank, {"moe", "gemm", p, what}));
  return {};
}

Result<> GemmCore::run(u32 r, const GemmCall& call, StreamPtr stream, u32 blocks) {
  const auto ranks = group().local_ranks();
  if (std::find(ranks.begin(), ranks.end(), r) == ranks.end())
    return invalid_argument(
        fmt::format("moe: rank {} is not one of the {} ranks of this process", r, ranks.size()));
  CROSSDOCK_CHECK_OK(check_gemm(call));
  CROSSDOCK_TRY(config, choose(call));
  const Variant* variant = find_any(config);
  if (variant == nullptr)
    return invalid_argument(fmt::format(
        "moe: the kernel for tiles of {} rows of {}{} has not been prepared: call "
        "prepare() with such a call before the first run and before any capture",
        config.tile_rows, config.fp8 ? "e4m3" : "bf16", config.swiglu ? " with SwiGLU" : ""));
  const symm::Rank& rank = group().rank(r);
  CROSSDOCK_CHECK_OK(check_pointers(rank, call));
  CROSSDOCK_TRY(params, gemm_params(rank, call, variant->config, settings_.wait));
  params.cycles = cycles_;
  if (blocks == 0) blocks = settings_.sms != 0 ? settings_.sms : launcher_->num_sms(rank);
  symm::LaunchShape shape{.grid = blocks};
  std::optional<cuda::Stream> kept;
  if (stream != nullptr && group().backend() == symm::Backend::kGpu) {
    kept.emplace(
        cuda::Stream::borrow(*rank.device().context(), static_cast<cuda::StreamHandle>(stream)));
    shape.gpu_stream = &*kept;
  }
  return launcher_->launch(rank, variant->kernel, shape, params);
}

// As prepare().
Result<const symm::Prepared<device::PrepareWeightsParams>*> GemmCore::weight_kernel_of(
    Deadline deadline) {
  {
    const std::lock_guard lock(prepared_);
    if (weight_kernel_) return &*weight_kernel_;
  }
  CROSSDOCK_TRY(made, launcher_->prepare(weight_kernel(), weight_kernel_block(), deadline));
  const std::lock_guard lock(prepared_);
  if (!weight_kernel_) weight_kernel_.emplace(std::move(made));
  return &*weight_kernel_;
}

// Waits for no other rank: its thread may be inside a forward that waits for what this one launches
// next.
Result<> GemmCore::prepare_weights(const symm::Rank& rank, const device::WeightMatrix& matrix,
                                   u64* words, Deadline deadline) {
  CROSSDOCK_TRY(kernel, weight_kernel_of(deadline));
  const device::PrepareWeightsParams params{
      .common = rank.common(device::KernelId::kPrepareWeights, settings_.wait),
      .matrix = matrix,
      .flaw = words,
      .inexact = words + 1};
  const symm::LaunchShape shape{.grid = 2 * launcher_->num_sms(rank)};
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *kernel, shape, params));
  if (group().backend() == symm::Backend::kCpu) return launcher_->synchronize(deadline);
  CROSSDOCK_CHECK_OK(rank.device().stream()->synchronize(deadline));
  return rank.check();
}

inline namespace v1 {

Result<Gemm> Gemm::create(const GemmOptions& options) {
  CROSSDOCK_TRY(core, GemmCore::create(options));
  return Gemm(std::move(core));
}
Gemm::Gemm(std::shared_ptr<GemmCore> core) : core_(std::move(core)) {}
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;
Gemm::~Gemm() = default;

std::span<const std::uint32_t> Gemm::local_ranks() const noexcept {
  return core_->group().local_ranks();
}
Result<> Gemm::prepare(const GemmCall& like, Deadline deadline) {
  return core_->prepare(like, deadline);
}
Result<> Gemm::run(std::uint32_t rank, const GemmCall& call, StreamPtr stream) {
  return core_->run(rank, call, stream);
}
Result<> Gemm::synchronize(Deadline deadline) {
  return core_->launcher().synchronize(deadline);
}
Result<> Gemm::check() const {
  return core_->group().check();
}
Result<> Gemm::reset(Deadline deadline) {
  return core_->group().reset(deadline);
}

}  // namespace v1
}  // namespace crossdock::moe
