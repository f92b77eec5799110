// What `crossdock bench symm` is told, shared by its parts: symm.cpp (command line and order),
// symm_run.cpp and symm_coll.cpp (measurements on GPUs). SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/figures.hpp"
#include "symm/kernels/suite.hpp"

namespace crossdock::tools::bench {

struct SymmBench {
  std::string backend = "gpu";
  std::uint32_t world = 0;  // 0: all GPUs; 4 in the twin
  std::vector<std::uint32_t> sms = {8, 16, 24, 64, 132};
  std::uint64_t bytes = 1'500'000'000;  // each rank moves in a run
  std::uint32_t repeat = 5;
  std::uint64_t heap = std::uint64_t{8} << 30;  // window whose creation is timed; 0: none
  std::chrono::nanoseconds timeout = std::chrono::seconds(120);
  FigureOutput output = {};
  // Several processes, one rank each.
  std::optional<std::uint32_t> rank;
  std::string store;
  std::string name = "bench-symm";
};

// A group on GPUs with the suite's areas and large ones for bandwidth, and every figure of it.
class SymmRig {
 public:
  static Result<SymmRig> create(const SymmBench& options, const symm::GroupOptions& group,
                                const cuda::Driver& driver, Deadline deadline);
  SymmRig(SymmRig&&) noexcept;
  ~SymmRig();
  // The suite once; wrong results are an error.
  Result<> verify(Deadline deadline);
  Result<> measure_latencies(std::vector<Figure>& figures, Deadline deadline);
  Result<> measure_bandwidth(std::vector<Figure>& figures, Deadline deadline);

 private:
  struct Impl;
  explicit SymmRig(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Creates a group with windows of `options.heap` bytes; the time it takes.
Result<Figure> measure_heap(const SymmBench& options, const symm::GroupOptions& group,
                            const cuda::Driver& driver);

// Gathers, tensors, rows: figures of a group of collectives of its own.
Result<> measure_collectives(const SymmBench& options, const symm::GroupOptions& group,
                             std::vector<Figure>& figures);

}  // namespace crossdock::tools::bench
