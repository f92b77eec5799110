// The first kernels on GPUs, one rank each, in one process: right results in every world this
// machine can have, with either addressing; wgmma and the conversions against their definitions;
// launches that cannot work.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "gpu/symm/symm_fixture.hpp"
#include "symm/kernels/check.hpp"
#include "symm/kernels/list.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

using SymmGpu = SymmGpuTest;

TEST_F(SymmGpu, TheSuitePassesInEveryWorld) {
  for (const u32 world : worlds()) {
    for (const auto addressing : {symm::Addressing::kStride, symm::Addressing::kTable}) {
      SCOPED_TRACE(world);
      const SymmWorld w = make(world, addressing);
      // Twice: rings, epochs, barriers and flags go on where they were.
      for (int round = 0; round < 2; ++round)
        for (const symm::Suite::Step& step : symm::Suite::steps()) {
          const auto done = ((*w.suite).*step.run)(soon());
          ASSERT_TRUE(done.ok()) << step.name << ": " << done.error().describe();
        }
      std::printf("world %u, %s: suite passed\n", world,
                  addressing == symm::Addressing::kStride ? "stride" : "table");
    }
  }
}

TEST_F(SymmGpu, WgmmaGivesTheProduct) {
  const auto ctx = context();
  if (ctx.device().sm() != 90)
    GTEST_SKIP() << "wgmma exists on sm_90 only; this GPU is sm_" << ctx.device().sm();
  const SymmWorld w = make(1);
  for (const auto& config : symm::wgmma_check_variants()) {
    const auto wrong = symm::check_wgmma(*w.launcher, w.group->rank(0), config, soon());
    ASSERT_TRUE(wrong.ok()) << wrong.error().describe();
    EXPECT_EQ(*wrong, 0u) << "of " << 64 * config.n << " elements; n " << config.n << " fp8 "
                          << config.fp8 << " registers " << config.a_registers << " map "
                          << config.tensor_map;
  }
}

TEST_F(SymmGpu, ConversionInstructionsMatchTheirDefinitions) {
  const SymmWorld w = make(1);
  // Every 2^8-th bit pattern of fp32, from two starts, so that all exponents and the first bits of
  // the mantissa come.
  for (const u32 first : {0u, 0x2bu}) {
    const auto mismatches = symm::check_conversions(
        *w.launcher, w.group->rank(0),
        {.first = first, .stride = 257, .count = 0xffffffffu / 257, .blocks = w.shape.blocks},
        soon());
    ASSERT_TRUE(mismatches.ok()) << mismatches.error().describe();
    EXPECT_EQ(*mismatches, symm::ConvertMismatches{});
  }
}

// One kernel of rank 0 waits for a flag that another kernel of rank 0 sets, on another stream.
TEST_F(SymmGpu, StreamsOfARankRunSideBySide) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, this machine has " << num_gpus_;
  const SymmWorld w = make(2);
  symm::Rank& rank = w.group->rank(0);
  const auto kernel =
      w.launcher->prepare(symm::flag_ping_pong_kernel(true), {.threads = 32}, soon()).value();
  const auto elapsed = rank.allocate(sizeof(u64)).value();
  device::FlagPingPongParams p{};
  p.common = rank.common(device::KernelId::kFlagPingPong, 10s);
  p.view = rank.view();
  p.flag = w.areas.flag;
  p.elapsed_ns = elapsed.as<u64>();
  p.rounds = 1;
  p.first = 1;  // waits
  ASSERT_TRUE(w.launcher->stream(rank, 1).ok());
  ASSERT_TRUE(w.launcher->launch(rank, kernel, {.stream = 0}, p).ok());
  p.first = 0;  // sets its own
  ASSERT_TRUE(w.launcher->launch(rank, kernel, {.stream = 1}, p).ok());
  const auto done = w.launcher->synchronize(soon());
  EXPECT_TRUE(done.ok()) << done.error().describe();
}

TEST_F(SymmGpu, AGridThatCannotBeResidentIsRefused) {
  const SymmWorld w = make(1);
  auto grid = symm::GridSync::create(*w.launcher, {.max_blocks = 100'000}, soon()).value();
  const auto refused = grid.launch(w.group->rank(0), {.blocks = 100'000});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("resident at once"));
  std::printf("%s\n", refused.error().message.c_str());
}

}  // namespace
}  // namespace crossdock::testing
