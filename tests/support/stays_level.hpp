// Whether work leaves the memory of GPUs as full as it was, although other processes may take and
// give back theirs meanwhile: what leaks shows every time the work is done, what they do does not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <string>

#include "cuda/device.hpp"

namespace crossdock::testing {

inline std::uint64_t used_bytes(const cuda::Context& context) {
  const auto info = context.memory_info().value();
  return info.total_bytes - info.free_bytes;
}

// `used` tells the bytes in use of each GPU (a vector), when its streams are done; `work` is done
// at most six times, until it has left no GPU with more than `slack` more than before.
template <class Used, class Work>
::testing::AssertionResult stays_level(const Used& used, const Work& work,
                                       std::uint64_t slack = std::uint64_t{4} << 20) {
  constexpr int kTimes = 6;
  std::string grown;
  for (int time = 0; time < kTimes; ++time) {
    const auto before = used();
    work();
    if (::testing::Test::HasFatalFailure()) return ::testing::AssertionFailure() << "see above";
    const auto after = used();
    bool level = true;
    for (std::size_t gpu = 0; gpu < before.size(); ++gpu) {
      if (after[gpu] <= before[gpu] + slack) continue;
      level = false;
      grown += fmt::format("GPU {}: {} bytes in use, then {}\n", gpu, before[gpu], after[gpu]);
    }
    if (level) return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "every time there was more in use after the work:\n"
                                       << grown;
}

}  // namespace crossdock::testing
