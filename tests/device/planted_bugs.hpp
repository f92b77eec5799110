// Bugs that are planted to see tests fail: runs a scenario, keeps its failures to itself, and looks
// for a seed at which there is one. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <string>

namespace crossdock::testing {

// The first failure of `run`, or nothing.
template <class Run>
std::string first_failure(const Run& run) {
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    run();
  }
  for (int i = 0; i < results.size(); ++i)
    if (results.GetTestPartResult(i).failed()) return results.GetTestPartResult(i).message();
  return {};
}

// `failure_of(seed)` says what went wrong; it has to be something within 32 seeds.
template <class FailureOf>
void expect_found(const char* name, const FailureOf& failure_of) {
  for (std::uint64_t seed = 1; seed <= 32; ++seed) {
    const std::string failure = failure_of(seed);
    if (failure.empty()) continue;
    std::printf("  %s: seed %llu: %s\n", name, static_cast<unsigned long long>(seed),
                failure.substr(0, 120).c_str());
    return;
  }
  FAIL() << name << " was not found";
}

}  // namespace crossdock::testing
