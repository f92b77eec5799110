// The World: ranks with their heaps in one process, and the kernels launched on them.
//
//   auto world = twin::World::create({.ranks = 4}).value();
//   auto* flags = static_cast<u32*>(world->allocate(rank, 4096).value());
//   world->launch({.rank = rank, .grid = 2, .block = 256, .shared_bytes = 32768}, kernel, params);
//   twin::Report report = world->run({.seed = 7, .weak = true, .stale = true}).value();
//
// Kernels are functions `void kernel(const Params&)` (CROSSDOCK_KERNEL, CROSSDOCK_PARAMS) compiled
// by the host compiler. Kernels of one rank and stream run in order, all others side by side, all
// CTAs co-resident. `run` executes everything launched so far and forgets it; memory stays. Not
// thread-safe; several Worlds may exist and run on different OS threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <crossdock/core/result.hpp>

#include "twin/options.hpp"

namespace crossdock::twin {

class World {
 public:
  static Result<std::unique_ptr<World>> create(const WorldOptions& options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  [[nodiscard]] int ranks() const;
  [[nodiscard]] int node_of(int rank) const;

  // The heap of a rank: at the same address in every process that makes its Worlds in the same
  // order, at a stride of `heap_bytes` between ranks. Everything in it that is not allocated is out
  // of bounds.
  [[nodiscard]] unsigned char* heap(int rank) const;
  [[nodiscard]] std::size_t heap_bytes() const;
  // Whether the address is allocated memory of the rank's heap.
  [[nodiscard]] bool owns(int rank, const void* address) const;
  // Zeroed memory of a rank. `alignment`: a power of two.
  Result<void*> allocate(int rank, std::size_t bytes, std::size_t alignment = 256);
  // Gives back all allocations and forgets all launches; those of one rank; launches of one rank
  // alone.
  void reset();
  void reset(int rank);
  void drop_launches(int rank);

  // Memory from elsewhere (a memfd mapping, pinned host memory) as memory of `rank`. It must stay
  // mapped until detached, at one address in this process.
  Result<void> attach(int rank, void* base, std::size_t bytes);
  Result<void> detach(void* base);

  template <class Params>
  Result<void> launch(const LaunchConfig& config, void (*kernel)(const Params&),
                      const Params& params) {
    return launch_body(config, [kernel, params] { kernel(params); });
  }
  // The same for any callable; it is called once by each thread.
  Result<void> launch_body(const LaunchConfig& config, std::function<void()> body);

  // Errors are mistakes of the caller or of the machine (memory); what the kernels did wrong is in
  // the Report.
  Result<Report> run(const Schedule& schedule);

 private:
  struct Impl;
  explicit World(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock::twin
