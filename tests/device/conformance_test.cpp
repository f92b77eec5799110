// The probes of conformance/ on the twin: no rule is broken, the outputs do not depend on the
// schedule, and they are what they were when they were last compared with a GPU (gpu_symm compares
// them byte for byte wherever there is one).
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gtest/gtest.h>
#include <xxhash.h>

#include "conformance/twin_machine.hpp"

namespace crossdock::testing::conformance {
namespace {

// XXH3-64 of all outputs in order. When it changes, `./x gpu` has to pass on an H200 before the new
// value is written here.
constexpr u64 kOutputsHash = 0xa328fc1c8215a01dull;

TEST(Conformance, TheTwinStillComputesWhatTheGpuDoes) {
  TwinMachine machine;
  const auto outputs = run_probes(machine);
  ASSERT_EQ(outputs.size(), 192u + 1 + 2 * std::size(kTensorCases));
  std::vector<u8> all;
  for (const Output& output : outputs)
    all.insert(all.end(), output.bytes.begin(), output.bytes.end());
  const u64 hash = XXH3_64bits(all.data(), all.size());
  EXPECT_EQ(hash, kOutputsHash) << std::hex << "0x" << hash << "ull";
  // Other seeds, other schedules, the same bytes.
  const auto again = run_probes(machine);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    ASSERT_EQ(outputs[i].bytes, again[i].bytes) << outputs[i].name;
}

}  // namespace
}  // namespace crossdock::testing::conformance
