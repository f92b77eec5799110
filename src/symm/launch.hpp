// Launcher: runs kernels on the local ranks of one group, with the same calls and parameters on
// GPUs and in the twin.
//
//   prepare(kernel)            GPU: compile or load it on every local rank's GPU.   Twin: nothing.
//   launch(rank, ...)          GPU: into a stream of the rank.   Twin: into a queue of the rank.
//   synchronize(deadline)      GPU: wait for the streams.        Twin: run what is queued, by the
//                              schedule. Then, on both, faults of the ranks become the Error.
//
// Kernels of one rank and stream run in order, all others side by side. On GPUs a launch returns at
// once; nothing but prepare() compiles or allocates, so launches can be captured into graphs. What
// a kernel waits for has to be launched too before anybody synchronizes. Single-owner; the group
// and
// the Jit outlive it. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "cuda/stream.hpp"
#include "jit/jit.hpp"
#include "symm/group.hpp"
#include "symm/kernel.hpp"
#include "twin/options.hpp"

namespace crossdock::symm {

// The part of a launch's shape that a kernel is prepared for.
struct BlockShape {
  u32 threads = 32;  // of a block
  u32 shared_bytes = 0;
};
struct LaunchShape {
  u32 grid = 1;
  // Blocks wait for each other, so all of them have to be resident at once: a grid that cannot be
  // is refused, and the GPU starts all blocks or none.
  bool resident = false;
  // The kernel may start while the one before it in the stream still runs, and waits for it by
  // itself (grid_dependency_wait) before it touches global memory; the twin checks that it does.
  bool overlap = false;
  int stream = 0;  // which of the rank's streams; 0 is that of its RankDevice
  // GPU: a stream of the caller on the rank's GPU instead of one of the rank's own.
  const cuda::Stream* gpu_stream = nullptr;
};

// A kernel on the GPU of one rank, and how many of its blocks that GPU holds at once.
struct LoadedKernel {
  jit::Kernel kernel;
  u32 resident_blocks = 0;
};

// A kernel that is ready on every local rank of a group. A value; the Launcher may go first.
template <class Params>
class Prepared {
 public:
  [[nodiscard]] const KernelRef<Params>& kernel() const { return kernel_; }
  [[nodiscard]] const BlockShape& block() const { return block_; }

 private:
  friend class Launcher;
  Prepared(KernelRef<Params> kernel, BlockShape block, std::vector<LoadedKernel> loaded)
      : kernel_(std::move(kernel)), block_(block), loaded_(std::move(loaded)) {}
  KernelRef<Params> kernel_;
  BlockShape block_;
  std::vector<LoadedKernel> loaded_;  // by local rank; empty on the twin
};

// The compiler of a group's kernels, by the jit.* settings: none that is newer than the driver of
// the group, which could not load what it makes. Null on the CPU backend, where kernels run in the
// twin. What is to be said of the compiler and of the cache goes to the log, as jit.
Result<std::unique_ptr<jit::Jit>> open_jit(const Group& group);

class Launcher {
 public:
  // `jit` may be null on the CPU backend. kUnsupported where kernels cannot run: ranks of the CPU
  // backend in several processes.
  static Result<Launcher> create(Group& group, jit::Jit* jit);

  // For all local ranks. Refused while stream 0 of one of them is being captured.
  template <class Params>
  Result<Prepared<Params>> prepare(const KernelRef<Params>& kernel, const BlockShape& block,
                                   Deadline deadline) {
    CROSSDOCK_TRY(loaded, load(kernel.spec, block, deadline));
    return Prepared<Params>(kernel, block, std::move(loaded));
  }
  // `rank`: one of the group's local ranks.
  template <class Params>
  Result<> launch(const Rank& rank, const Prepared<Params>& prepared, const LaunchShape& shape,
                  const Params& params) {
    const Names names{prepared.kernel_.name, prepared.block_};
    if (group_->backend() == Backend::kCpu)
      return launch_twin(rank, names, shape,
                         [kernel = prepared.kernel_.twin, params] { kernel(params); });
    return launch_gpu(rank, names, shape, prepared.loaded_[index_of(rank)],
                      const_cast<Params*>(&params));
  }

  // When everything launched has ended: the Error of the first fault of a local rank (kPeerLost,
  // kDeadline), of a broken rule in the twin (kInternal, with its report), or success.
  Result<> synchronize(Deadline deadline);

  // How many blocks the rank's GPU holds at once; 0: no limit (twin).
  template <class Params>
  [[nodiscard]] u32 resident_blocks(const Rank& rank, const Prepared<Params>& prepared) const {
    return prepared.loaded_.empty() ? 0 : prepared.loaded_[index_of(rank)].resident_blocks;
  }
  // Multiprocessors of the rank's GPU; 4 in the twin.
  [[nodiscard]] u32 num_sms(const Rank& rank) const;
  // GPU: stream `index` of the rank, for events and captures.
  Result<const cuda::Stream*> stream(const Rank& rank, int index = 0);

  // Twin: the schedule of the next synchronize(). Deadlines fire unless it says otherwise.
  void set_schedule(const twin::Schedule& schedule) { schedule_ = schedule; }
  [[nodiscard]] const twin::Report& last_report() const { return report_; }
  [[nodiscard]] Group& group() const { return *group_; }

 private:
  struct Names {
    const char* kernel;
    BlockShape block;
  };
  explicit Launcher(Group& group, jit::Jit* jit) : group_(&group), jit_(jit) {
    schedule_.fire_deadlines = true;
  }
  [[nodiscard]] std::size_t index_of(const Rank& rank) const;
  Result<std::vector<LoadedKernel>> load(const jit::KernelSpec& spec, const BlockShape& block,
                                         Deadline deadline);
  Result<> launch_twin(const Rank& rank, const Names& names, const LaunchShape& shape,
                       std::function<void()> body);
  Result<> launch_gpu(const Rank& rank, const Names& names, const LaunchShape& shape,
                      const LoadedKernel& loaded, void* params);
  Result<> run_twin();

  Group* group_;
  jit::Jit* jit_;
  std::map<std::pair<u32, int>, cuda::Stream> streams_;  // beyond stream 0, by rank and index
  twin::Schedule schedule_;
  twin::Report report_;
};

}  // namespace crossdock::symm
