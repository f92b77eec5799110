// A grouped GEMM on the multiprocessors that dispatch and combine leave free, so that they can be
// timed beside one (`crossdock bench ep --beside-gemm`): a product of bf16 on each GPU of this
// process, on a stream of its own, its launches back to back in a CUDA graph.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "bench/ep.hpp"
#include "bench/moe.hpp"
#include "cuda/device.hpp"
#include "cuda/graph.hpp"

namespace crossdock::tools::bench {

class EpGemmLoad {
 public:
  // Products on all multiprocessors but `free_sms`. Compares samples of the first result.
  static Result<EpGemmLoad> create(EpBenchRig& rig, std::uint32_t free_sms, Deadline deadline);

  [[nodiscard]] static double graph_operations();
  // Puts so many graphs on the stream of every GPU.
  Result<> start(std::uint32_t graphs);
  // Waits for them. TFLOP/s of the slowest GPU.
  Result<double> finish(Deadline deadline);
  // Whether the products of the GPU of `rank` ended after `event`. When both are done.
  [[nodiscard]] Result<bool> outlasted(std::uint32_t rank, const cuda::Event& event) const;

 private:
  struct OfRank {
    std::uint32_t rank = 0;
    std::unique_ptr<moe::Gemm> gemm;
    std::unique_ptr<MoeRig> data;
    std::unique_ptr<cuda::Graph> graph;
    std::unique_ptr<cuda::Event> begin, end;
  };
  Result<> add(std::uint32_t rank, const cuda::Device& device, std::uint32_t free_sms,
               Deadline deadline);

  std::vector<OfRank> ranks_;
  std::uint32_t started_ = 0;  // graphs
};

}  // namespace crossdock::tools::bench
