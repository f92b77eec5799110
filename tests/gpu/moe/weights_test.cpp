// Preparation of weights on a GPU: bit by bit what the CPU makes, for every kind of number and
// format, and products of what it made.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "gpu/gpu_fixture.hpp"
#include "support/weights_case.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::Number;
using ::testing::HasSubstr;

class WeightsGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto made = GemmRig::create(symm::Backend::kGpu);
    ASSERT_TRUE(made.ok()) << made.error().describe();
    rig_.emplace(std::move(made).value());
  }
  std::optional<GemmRig> rig_;
};

TEST_F(WeightsGpu, HasTheBitsOfTheCpu) {
  for (WeightCase c : weight_cases()) {
    c.experts = 5;
    c.hidden = 640;
    c.inter = 384;
    ASSERT_NO_FATAL_FAILURE(compare_preparation(*rig_, c));
  }
}
TEST_F(WeightsGpu, NamesTheFirstFlaw) {
  PlainPair from({.experts = 4, .hidden = 512, .inter = 512, .format = Format::kE2m1});
  const u32 nan = 0x7fc00000u;
  for (const u64 at : {u64{1024 * 512 * 3 + 5}, u64{1024 * 512 + 700 * 512 + 3}})
    std::memcpy(&from.gate_up.codes[at * 4], &nan, 4);
  EXPECT_THAT(compare_refusal(*rig_, from),
              HasSubstr("the value nan of gate_up at expert 1, row 700, column 3"));
}

}  // namespace
}  // namespace crossdock::testing
