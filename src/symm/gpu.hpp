// The GPU side of heaps and ranks. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include <crossdock/core/result.hpp>

#include "cuda/device.hpp"
#include "cuda/vmm.hpp"
#include "symm/agreement.hpp"
#include "symm/heap.hpp"
#include "symm/rank_device.hpp"

namespace crossdock::symm {

Result<std::unique_ptr<RankDevice>> make_gpu_device(const cuda::Driver& driver, int ordinal);

struct GpuHeapOptions {
  HeapOptions heap = {};
  Sharing sharing = Sharing::kNone;
  // GPU of each local rank; a copy of the context keeps it alive.
  std::vector<std::pair<u32, cuda::Context>> local = {};
};
// Physical memory of each GPU (cuMemCreate), mapped into one range of addresses that all local GPUs
// reach.
std::unique_ptr<Heap> make_gpu_heap(GpuHeapOptions options);

// Kernels load, store and reduce in every window: kUnreachable names the first pair of GPUs where
// `local` cannot reach another GPU of the group that this process sees. Pairs it does not see are
// tried when their windows are mapped.
Result<> check_peers(const std::vector<std::pair<u32, cuda::Context>>& local,
                     const Agreement& agreement);

}  // namespace crossdock::symm
