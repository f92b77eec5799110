// The end of a group while streams of its GPUs are not through, with the fake driver: waits for
// peers end, the streams of its calls are waited for and no others, and what is still used stays.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "support/coll_cases.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CollLeaving : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    coll::Options options = coll_options();
    options.wait = 1h;  // no wait ends by itself
    const coll::Window window = coll::make_window(options, 2).value();
    auto group = symm::Group::create({.world = 2}, window.layout, driver_).value();
    auto jit = std::make_unique<jit::Jit>(
        jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    core_ = coll::Core::create(std::move(group), std::move(jit), options, soon()).value();
    stream_.emplace(cuda::Stream::create(context(0)).value());
    gate_.emplace(cuda::PinnedMemory::allocate(context(0), 256).value());
  }
  void TearDown() override {
    core_.reset();
    stream_.reset();
    gate_.reset();
    EXPECT_EQ(coll::Core::sweep(), 0u);
    FakeCudaTest::TearDown();
  }
  // Work of the caller that ends when open_gate() is called.
  void put_gate(const cuda::Stream& stream) {
    EXPECT_OK(cuda::wait_value_async(stream, gate_->device(), 1));
  }
  void open_gate() { __atomic_store_n(gate_->as<u64>(), u64{1}, __ATOMIC_RELEASE); }
  // Calls with this stream wait for rank 1, which never comes.
  void wait_for_the_peer(const cuda::Stream& stream) {
    EXPECT_OK(core_->receive(0, 1, gate_->as<u8>() + 128, 64, stream.handle()));
    EXPECT_OK(core_->barrier(0, stream.handle()));
  }
  // How long that took.
  std::chrono::nanoseconds drop() {
    const auto start = std::chrono::steady_clock::now();
    core_.reset();
    return std::chrono::steady_clock::now() - start;
  }
  void be_impatient() {
    core_->set_patience(20ms, base::Logger::create("info", [this](const base::LogRecord& record) {
                                lines_.emplace_back(record.message);
                              }).value());
  }
  void finish(const cuda::Stream& stream) { EXPECT_OK(stream.synchronize(Deadline::in(20s))); }

  jit::TemporaryFolder folder_;
  std::shared_ptr<coll::Core> core_;
  std::optional<cuda::Stream> stream_;
  std::optional<cuda::PinnedMemory> gate_;
  std::vector<std::string> lines_;
};

TEST_F(CollLeaving, WaitsForPeersEnd) {
  wait_for_the_peer(*stream_);
  EXPECT_FALSE(*stream_->idle());
  drop();
  EXPECT_TRUE(*stream_->idle()) << "what it was given is over before its memory goes";
  EXPECT_EQ(fake_->live().mappings, 0);
}

TEST_F(CollLeaving, StreamsOfOthersAreNotWaitedFor) {
  const cuda::Stream other = cuda::Stream::create(context(0)).value();
  put_gate(other);
  for (const u32 r : {0u, 1u})
    EXPECT_OK(core_->barrier(r, nullptr));
  drop();
  EXPECT_FALSE(*other.idle());
  EXPECT_EQ(fake_->live().mappings, 0);
  open_gate();
  finish(other);
}

TEST_F(CollLeaving, WhatIsStillInUseStaysUntilItIsNot) {
  be_impatient();
  put_gate(*stream_);  // the caller's work before the calls
  wait_for_the_peer(*stream_);
  EXPECT_LT(drop(), 10s);
  EXPECT_EQ(fake_->live().mappings, 2);
  EXPECT_EQ(coll::Core::sweep(), 1u);
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("rank 0: 1 streams and 0 waits of replayed graphs")));
  open_gate();
  finish(*stream_);  // its waits are let go all the same
  EXPECT_EQ(coll::Core::sweep(), 0u);
  EXPECT_EQ(fake_->live().mappings, 0);
}

TEST_F(CollLeaving, AStreamMayBeDestroyedBeforeTheGroup) {
  be_impatient();
  put_gate(*stream_);
  wait_for_the_peer(*stream_);
  stream_.reset();  // its work goes on
  drop();
  EXPECT_EQ(fake_->live().mappings, 2);
  open_gate();
  EXPECT_OK(cuda::Stream::create(context(0)).value().synchronize(soon()));
  const auto deadline = soon();
  while (coll::Core::sweep() != 0 && !deadline.passed())
    std::this_thread::yield();
  EXPECT_EQ(fake_->live().mappings, 0);
}

// The group knows nothing of it but that something waits.
TEST_F(CollLeaving, AGraphThatIsStillReplayedKeepsTheGroup) {
  be_impatient();
  auto capture = cuda::Capture::begin(*stream_).value();
  EXPECT_OK(core_->barrier(0, stream_->handle()));
  {
    const cuda::Graph graph = capture.finish().value();
    EXPECT_OK(graph.launch(*stream_));
    drop();
  }
  finish(*stream_);
  EXPECT_EQ(coll::Core::sweep(), 0u);
  EXPECT_EQ(fake_->live().mappings, 0);
}

}  // namespace
}  // namespace crossdock::testing
