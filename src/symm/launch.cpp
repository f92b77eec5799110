// Launching on either backend. See launch.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/launch.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "base/config.hpp"
#include "base/log.hpp"

namespace crossdock::symm {
namespace {

constexpr u32 kTwinSms = 4;

Result<> check_grid(const char* kernel, const LaunchShape& shape) {
  if (shape.grid > 0) return {};
  return invalid_argument(fmt::format("launch of {}: grid = 0 must be at least 1", kernel));
}

Result<u32> count_resident_blocks(const jit::Kernel& kernel, const BlockShape& block) {
  const cuda::Function& function = kernel.function();
  CROSSDOCK_TRY(per_sm,
                function.max_blocks_per_sm(static_cast<int>(block.threads), block.shared_bytes));
  return static_cast<u32>(per_sm) * static_cast<u32>(function.context().device().num_sms);
}

}  // namespace

Result<std::unique_ptr<jit::Jit>> open_jit(const Group& group) {
  if (group.backend() != Backend::kGpu) return std::unique_ptr<jit::Jit>();
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(log, base::Logger::create(config.string("log.level")));
  auto options = jit::JitOptions::from_config(config, log.component("jit"));
  options.compiler.newest_cuda = group.driver()->version;
  return std::make_unique<jit::Jit>(std::move(options));
}

Result<Launcher> Launcher::create(Group& group, jit::Jit* jit) {
  if (group.backend() == Backend::kGpu && jit == nullptr)
    return invalid_argument("a launcher for GPUs needs a Jit");
  if (group.backend() == Backend::kCpu && group.twin() == nullptr)
    return make_error(Code::kUnsupported,
                      "kernels of the CPU backend run in the twin, which needs all ranks of the "
                      "group in one process; those of an elastic group meet at an inproc:// store "
                      "then");
  return Launcher(group, jit);
}

std::size_t Launcher::index_of(const Rank& rank) const {
  const auto ranks = group_->local_ranks();
  return static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank.rank()) -
                                  ranks.begin());
}

u32 Launcher::num_sms(const Rank& rank) const {
  const cuda::Context* context = rank.device().context();
  return context ? static_cast<u32>(context->device().num_sms) : kTwinSms;
}

Result<const cuda::Stream*> Launcher::stream(const Rank& rank, int index) {
  if (group_->backend() == Backend::kCpu)
    return make_error(Code::kUnsupported, "ranks of the CPU backend have no CUDA streams");
  if (index == 0) return rank.device().stream();
  const auto key = std::pair(rank.rank(), index);
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    CROSSDOCK_TRY(made, cuda::Stream::create(*rank.device().context()));
    found = streams_.emplace(key, std::move(made)).first;
  }
  return static_cast<const cuda::Stream*>(&found->second);
}

Result<std::vector<LoadedKernel>> Launcher::load(const jit::KernelSpec& spec,
                                                 const BlockShape& block, Deadline deadline) {
  std::vector<LoadedKernel> loaded;
  if (group_->backend() == Backend::kCpu) return loaded;
  for (const u32 r : group_->local_ranks()) {
    const RankDevice& device = group_->rank(r).device();
    CROSSDOCK_TRY(kernel, jit_->prepare(*device.context(), spec,
                                        {.deadline = deadline,
                                         .stream = device.stream(),
                                         .dynamic_shared_bytes = block.shared_bytes}));
    // Asking makes the driver load the code now. Loading at the first launch could wait for kernels
    // that run already, and they may be waiting for this one.
    CROSSDOCK_TRY(blocks, count_resident_blocks(kernel, block));
    if (blocks == 0)
      return invalid_argument(fmt::format(
          "kernel {} with {} threads and {} bytes of shared memory a block does not fit "
          "on {}: choose a smaller configuration",
          kernel.spec().title(), block.threads, block.shared_bytes, device.describe()));
    loaded.push_back({std::move(kernel), blocks});
  }
  return loaded;
}

Result<> Launcher::launch_twin(const Rank& rank, const Names& names, const LaunchShape& shape,
                               std::function<void()> body) {
  CROSSDOCK_CHECK_OK(check_grid(names.kernel, shape));
  CROSSDOCK_CHECK_OK(group_->check_seats());
  return group_->twin()->launch_body({.rank = static_cast<int>(rank.rank()),
                                      .stream = shape.stream,
                                      .grid = shape.grid,
                                      .block = names.block.threads,
                                      .shared_bytes = names.block.shared_bytes,
                                      .overlap = shape.overlap,
                                      .name = names.kernel},
                                     std::move(body));
}

Result<> Launcher::launch_gpu(const Rank& rank, const Names& names, const LaunchShape& shape,
                              const LoadedKernel& loaded, void* params) {
  CROSSDOCK_CHECK_OK(check_grid(names.kernel, shape));
  if (shape.resident && shape.grid > loaded.resident_blocks)
    return invalid_argument(
        fmt::format("launch of {}: its blocks wait for each other, and of grid = {} only {} are "
                    "resident at once on {}: use a grid of at most {}",
                    names.kernel, shape.grid, loaded.resident_blocks, rank.device().describe(),
                    loaded.resident_blocks));
  const cuda::Stream* on = shape.gpu_stream;
  if (on == nullptr) {
    CROSSDOCK_TRY(own, stream(rank, shape.stream));
    on = own;
  }
  return loaded.kernel.function().launch(*on,
                                         {.grid = {shape.grid},
                                          .block = {names.block.threads},
                                          .dynamic_shared_bytes = names.block.shared_bytes,
                                          .cooperative = shape.resident,
                                          .programmatic_serialization = shape.overlap},
                                         std::span<void*>(&params, 1));
}

Result<> Launcher::run_twin() {
  CROSSDOCK_CHECK_OK(group_->check_seats());
  CROSSDOCK_TRY(report, group_->twin()->run(schedule_));
  report_ = std::move(report);
  if (report_.ok()) return {};
  return make_error(Code::kInternal,
                    fmt::format("the twin found a fault in a kernel (seed {}): {}: "
                                "{}",
                                report_.seed, report_.kind, report_.message));
}

Result<> Launcher::synchronize(Deadline deadline) {
  if (group_->backend() == Backend::kCpu) {
    CROSSDOCK_CHECK_OK(run_twin());
    return group_->check();
  }
  for (const u32 r : group_->local_ranks())
    CROSSDOCK_CHECK_OK(group_->rank(r).device().stream()->synchronize(deadline));
  for (const auto& [key, stream] : streams_)
    CROSSDOCK_CHECK_OK(stream.synchronize(deadline));
  return group_->check();
}

}  // namespace crossdock::symm
