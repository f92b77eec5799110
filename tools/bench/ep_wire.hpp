// What the link gives in the run of `crossdock bench ep` itself: rows of 7168 bytes to or from
// random peers by plain bulk copies, all ranks at once, as `crossdock bench symm` has them. One
// rank alone copies within its own memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "symm/kernels/probe.hpp"

namespace crossdock::tools::bench {

class EpWire {
 public:
  // Collective among the processes, like the rates below.
  static Result<EpWire> create(const symm::GroupOptions& ranks, std::uint32_t repeat,
                               Deadline deadline);
  EpWire(EpWire&&) noexcept;
  ~EpWire();

  [[nodiscard]] bool local() const;  // one rank: no link takes part
  // GB/s that a rank pushes or pulls, the mean of the local ones; measured at the first call. By so
  // many SMs, or with 0 by the number that is the fastest.
  Result<double> gb_per_s(symm::Direction direction, std::uint32_t sms);

 private:
  struct Impl;
  explicit EpWire(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock::tools::bench
