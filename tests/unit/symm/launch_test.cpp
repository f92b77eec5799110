// Launching on GPUs, with the fake driver: what is loaded where, which shape, stream and parameters
// a launch has, what is refused, and how a fault record becomes an error.
// SPDX-License-Identifier: Apache-2.0
#include "symm/launch.hpp"

#include <algorithm>
#include <cstdlib>
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "symm/kernels/list.hpp"
#include "symm/kernels/suite.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(60s);
}

// A setting of the environment, for as long as this lives.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

class GpuLaunch : public crossdock::testing::FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    layout_.add("data", 4096);
    jit_ = std::make_unique<jit::Jit>(jit::JitOptions{},
                                      std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    group_ = Group::create({.world = 2}, layout_, driver_).value();
    launcher_ = std::make_unique<Launcher>(Launcher::create(*group_, jit_.get()).value());
  }
  void TearDown() override {
    launcher_.reset();
    group_.reset();
    jit_.reset();
    FakeCudaTest::TearDown();
  }
  Prepared<device::FlagPingPongParams> ping_pong(const BlockShape& block = {}) {
    return launcher_->prepare(flag_ping_pong_kernel(true), block, soon()).value();
  }

  jit::TemporaryFolder folder_;
  device::SymmetricLayout layout_;
  std::unique_ptr<jit::Jit> jit_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<Launcher> launcher_;
};

TEST_F(GpuLaunch, ParametersAndShapeArriveOnTheRanksStream) {
  const auto kernel = ping_pong({.threads = 64, .shared_bytes = 1024});
  device::FlagPingPongParams seen{};
  fake_->set_kernel("flag_ping_pong_code", [&](const cuda::LaunchConfig&, void** parameters) {
    seen = *static_cast<device::FlagPingPongParams*>(parameters[0]);
  });
  for (const u32 r : group_->local_ranks()) {
    const Rank& rank = group_->rank(r);
    device::FlagPingPongParams p{};
    p.common = rank.common(device::KernelId::kFlagPingPong, 7ms);
    p.view = rank.view();
    p.rounds = 40 + r;
    ASSERT_TRUE(launcher_->launch(rank, kernel, {.grid = 3}, p).ok());
    EXPECT_EQ(seen.rounds, 40 + r);
    EXPECT_EQ(seen.common.rank, r);
    EXPECT_EQ(seen.common.deadline_ns, 7'000'000u);
    EXPECT_EQ(seen.view.base, rank.view().base);
    const auto launch = fake_->last_launch();
    EXPECT_EQ(launch.config.grid_x, 3u);
    EXPECT_EQ(launch.config.block_x, 64u);
    EXPECT_EQ(launch.config.shared_bytes, 1024u);
    EXPECT_FALSE(launch.cooperative);
    EXPECT_EQ(launch.config.stream, rank.device().stream()->handle());
  }
  EXPECT_TRUE(launcher_->synchronize(soon()).ok());
}

TEST_F(GpuLaunch, StreamsOfTheRankOrOfTheCaller) {
  const auto kernel = ping_pong();
  const Rank& rank = group_->rank(1);
  const auto launched_on = [&](const LaunchShape& shape) {
    EXPECT_TRUE(launcher_->launch(rank, kernel, shape, device::FlagPingPongParams{}).ok());
    return fake_->last_launch().config.stream;
  };
  const cuda::Stream* second = launcher_->stream(rank, 1).value();
  EXPECT_NE(second->handle(), rank.device().stream()->handle());
  EXPECT_EQ(launched_on({.stream = 1}), second->handle());
  EXPECT_EQ(launched_on({.stream = 1}), launcher_->stream(rank, 1).value()->handle());
  EXPECT_NE(launched_on({.stream = 2}), second->handle());
  const auto own = cuda::Stream::create(*rank.device().context()).value();
  EXPECT_EQ(launched_on({.gpu_stream = &own}), own.handle());
}

TEST_F(GpuLaunch, AResidentGridIsCooperativeAndHasToFit) {
  const auto kernel = ping_pong({.threads = 1024});
  const Rank& rank = group_->rank(0);
  const u32 most = launcher_->resident_blocks(rank, kernel);
  EXPECT_EQ(most, 2 * launcher_->num_sms(rank));
  const device::FlagPingPongParams p{};
  ASSERT_TRUE(launcher_->launch(rank, kernel, {.grid = most, .resident = true}, p).ok());
  EXPECT_TRUE(fake_->last_launch().cooperative);
  const auto refused = launcher_->launch(rank, kernel, {.grid = most + 1, .resident = true}, p);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message,
              AllOf(HasSubstr("flag_ping_pong"), HasSubstr("at most " + std::to_string(most))));
  EXPECT_EQ(launcher_->launch(rank, kernel, {.grid = 0}, p).code(), Code::kInvalidArgument);
}

TEST_F(GpuLaunch, AFaultRecordIsTheErrorOfSynchronize) {
  const auto kernel = ping_pong();
  fake_->set_kernel("flag_ping_pong_code", [](const cuda::LaunchConfig&, void** parameters) {
    const auto& p = *static_cast<device::FlagPingPongParams*>(parameters[0]);
    p.common.fault->kernel = p.common.kernel;
    p.common.fault->phase = device::Phase::kFlag;
    p.common.fault->rank = p.common.rank;
    p.common.fault->peer = 0;
    p.common.fault->state = device::FaultRecord::kWritten;
  });
  const Rank& rank = group_->rank(1);
  device::FlagPingPongParams p{};
  p.common = rank.common(device::KernelId::kFlagPingPong, 7ms);
  ASSERT_TRUE(launcher_->launch(rank, kernel, {}, p).ok());
  const auto failed = launcher_->synchronize(soon());
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, Code::kPeerLost);
  EXPECT_THAT(failed.error().message,
              AllOf(HasSubstr("rank 1"), HasSubstr("flag_ping_pong"), HasSubstr("for rank 0")));
  ASSERT_TRUE(group_->reset(soon()).ok());
  EXPECT_TRUE(launcher_->synchronize(soon()).ok());
}

TEST_F(GpuLaunch, SynchronizeEndsByItsDeadline) {
  fake_->hold_work(true);
  const auto late = launcher_->synchronize(Deadline::now());
  EXPECT_EQ(late.code(), Code::kDeadline);
  fake_->hold_work(false);
}

TEST_F(GpuLaunch, PreparingIsRefusedWhereItCannotWork) {
  EXPECT_EQ(Launcher::create(*group_, nullptr).code(), Code::kInvalidArgument);
  const auto huge = launcher_->prepare(flag_ping_pong_kernel(true),
                                       {.threads = 32, .shared_bytes = 1 << 20}, soon());
  ASSERT_FALSE(huge.ok());
  EXPECT_THAT(huge.error().message, HasSubstr("shared memory"));
  const auto capture = cuda::Capture::begin(*group_->rank(1).device().stream()).value();
  EXPECT_EQ(launcher_->prepare(barrier_kernel(false, false), {}, soon()).code(),
            Code::kInvalidArgument);
}

// The sentence that names the remedy is of no use where nobody can read it.
TEST_F(GpuLaunch, ACacheThatCannotBeWrittenIsToldOnceByTheJitOfAGroup) {
  const Setting folder("CROSSDOCK_JIT_CACHE_DIR", "/proc/crossdock-no-such-cache");
  const auto opened = open_jit(*group_);
  ASSERT_TRUE(opened.ok()) << opened.error().describe();
  ::testing::internal::CaptureStderr();
  (*opened)->cache().store("a.kernel", {});
  (*opened)->cache().store("b.kernel", {});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr(" warn jit "));
  EXPECT_THAT(said, HasSubstr("the kernel cache /proc/crossdock-no-such-cache cannot be written"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

}  // namespace
}  // namespace crossdock::symm
