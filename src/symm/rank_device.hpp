// RankDevice: where one local rank runs, hidden behind one interface: a GPU, or the host. It makes
// memory, clears it and copies between it and the host; launching is not its business. Calls wait
// for their work, by a deadline. Single-owner; different ranks may be used by different threads on
// the GPU, by one thread on the CPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "symm/memory.hpp"

namespace crossdock::cuda {
class Context;
class Stream;
}  // namespace crossdock::cuda
namespace crossdock::twin {
class World;
}

namespace crossdock::symm {

class RankDevice {
 public:
  virtual ~RankDevice() = default;
  // "GPU 3 (NVIDIA H200, GPU-...)" or "CPU".
  [[nodiscard]] virtual std::string describe() const = 0;

  // Zeroed; at least 1 byte, aligned to 256.
  virtual Result<LocalMemory> allocate(u64 bytes) = 0;
  // Not zeroed; for what comes later on `stream` (null: the rank's own), and without waiting for
  // what is on it, so that it may be called while ranks wait for each other.
  virtual Result<LocalMemory> allocate_in_order(u64 bytes, const cuda::Stream* stream) = 0;
  virtual Result<HostMemory> allocate_host(u64 bytes) = 0;
  virtual Result<> zero(void* target, u64 bytes, Deadline deadline) = 0;
  // From the host to memory of this rank, and back.
  virtual Result<> write(void* target, const void* source, u64 bytes, Deadline deadline) = 0;
  virtual Result<> read(void* target, const void* source, u64 bytes, Deadline deadline) = 0;

  // Null on the CPU.
  [[nodiscard]] virtual const cuda::Context* context() const { return nullptr; }
  [[nodiscard]] virtual const cuda::Stream* stream() const { return nullptr; }
};

// `world` null: host memory of a process that has only some of the ranks; no kernel can run.
std::unique_ptr<RankDevice> make_cpu_device(u32 rank, std::shared_ptr<twin::World> world);

}  // namespace crossdock::symm
