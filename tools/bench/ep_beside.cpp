// See ep_beside.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/ep_beside.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "cuda/device.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;

constexpr u32 kLaunches = 4;  // of a graph
// 0.5 TFLOP, more than half a millisecond: long beside a dispatch.
const MoeCase kProduct{
    .product = {"beside", "l1", 8, 4096, 7168}, .format = moe::Format::kBf16, .rows = 1024};

}  // namespace

double EpGemmLoad::graph_operations() {
  return kProduct.operations() * kLaunches;
}

Result<EpGemmLoad> EpGemmLoad::create(EpBenchRig& rig, u32 free_sms, Deadline deadline) {
  EpGemmLoad load;
  for (const u32 r : rig.group().local_ranks()) {
    const cuda::Context& context = *rig.rank(r).device().context();
    CROSSDOCK_CHECK_OK(load.add(r, context.device(), free_sms, deadline));
  }
  return load;
}

Result<> EpGemmLoad::add(u32 rank, const cuda::Device& device, u32 free_sms, Deadline deadline) {
  const u32 all = static_cast<u32>(device.num_sms);
  OfRank of;
  of.rank = rank;
  moe::GemmOptions options;
  options.ranks.world = 1;
  options.ranks.ranks = {{.rank = 0, .device = device.ordinal}};
  if (free_sms >= all)
    return invalid_argument(
        fmt::format("--beside-gemm: {} SMs of {} leave none for a product; "
                    "choose fewer by --sms",
                    free_sms, all));
  options.sms = all - free_sms;
  CROSSDOCK_TRY(gemm, moe::Gemm::create(options));
  of.gemm = std::make_unique<moe::Gemm>(std::move(gemm));
  CROSSDOCK_TRY(data, MoeRig::create(*of.gemm, kProduct, deadline));
  of.data = std::make_unique<MoeRig>(std::move(data));
  CROSSDOCK_TRY(error, of.data->verify(deadline));
  (void)error;  // verify() has compared it with its bound

  const cuda::Stream& stream = *of.data->rank().device().stream();
  CROSSDOCK_TRY(capture, cuda::Capture::begin(stream));
  for (u32 i = 0; i < kLaunches; ++i)
    CROSSDOCK_CHECK_OK(of.gemm->run(0, of.data->call()));
  CROSSDOCK_TRY(graph, capture.finish());
  CROSSDOCK_TRY(begin, cuda::Event::create(stream.context(), cuda::Timing::kOn));
  CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
  of.graph = std::make_unique<cuda::Graph>(std::move(graph));
  of.begin = std::make_unique<cuda::Event>(std::move(begin));
  of.end = std::make_unique<cuda::Event>(std::move(end));
  ranks_.push_back(std::move(of));
  return {};
}

Result<> EpGemmLoad::start(u32 graphs) {
  started_ = graphs;
  for (const OfRank& of : ranks_) {
    const cuda::Stream& stream = *of.data->rank().device().stream();
    CROSSDOCK_CHECK_OK(of.begin->record(stream));
    for (u32 i = 0; i < graphs; ++i)
      CROSSDOCK_CHECK_OK(of.graph->launch(stream));
    CROSSDOCK_CHECK_OK(of.end->record(stream));
  }
  return {};
}

Result<double> EpGemmLoad::finish(Deadline deadline) {
  double slowest_ms = 0;
  for (const OfRank& of : ranks_) {
    CROSSDOCK_CHECK_OK(of.gemm->synchronize(deadline));
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(*of.begin, *of.end));
    slowest_ms = std::max<double>(slowest_ms, ms);
  }
  return graph_operations() * started_ / slowest_ms / 1e9;
}

Result<bool> EpGemmLoad::outlasted(u32 rank, const cuda::Event& event) const {
  for (const OfRank& of : ranks_) {
    if (of.rank != rank) continue;
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(event, *of.end));
    return ms > 0;
  }
  return false;
}

}  // namespace crossdock::tools::bench
