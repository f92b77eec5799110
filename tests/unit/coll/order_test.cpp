// Calls of a rank on different streams, with the fake driver: those that wait at the same place run
// in the order of the calls, in captures as outside them, and no stream waits across a border.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "unit/coll/core_fixture.hpp"

namespace crossdock::testing {
namespace {

class CollOrder : public CollCoreTest {
 protected:
  void SetUp() override {
    CollCoreTest::SetUp();
    for (auto* const stream : {&first_, &second_, &peer_})
      stream->emplace(cuda::Stream::create(context(stream == &peer_ ? 1 : 0)).value());
    block_.emplace(cuda::PinnedMemory::allocate(context(0), 512).value());
  }
  void TearDown() override {
    core_.reset();
    for (auto* const stream : {&first_, &second_, &peer_})
      stream->reset();
    block_.reset();
    CollCoreTest::TearDown();
  }
  [[nodiscard]] u8* tensor() const { return block_->as<u8>() + 256; }
  void send(const cuda::Stream& stream) {
    EXPECT_OK(core_->send(0, 1, tensor(), 64, stream.handle()));
  }
  void receive(const cuda::Stream& stream) {
    EXPECT_OK(core_->receive(1, 0, tensor(), 64, stream.handle()));
  }
  void barrier(u32 r, const cuda::Stream& stream) { EXPECT_OK(core_->barrier(r, stream.handle())); }
  void session(u32 r, const cuda::Stream& stream) {
    auto begun = core_->begin(r, stream.handle());
    ASSERT_TRUE(begun.ok()) << begun.error().describe();
    EXPECT_OK(begun->end());
  }
  // Work of the caller, which the first stream's calls come after.
  void hold_first() { EXPECT_OK(cuda::wait_value_async(*first_, block_->device(), 1)); }
  void let_first_go() {
    __atomic_store_n(block_->as<u64>(), u64{1}, __ATOMIC_RELEASE);
    for (const auto* const stream : {&first_, &second_, &peer_})
      EXPECT_OK((*stream)->synchronize(soon()));
    __atomic_store_n(block_->as<u64>(), u64{0}, __ATOMIC_RELEASE);
    EXPECT_OK(core_->check());
  }

  std::optional<cuda::Stream> first_, second_, peer_;
  std::optional<cuda::PinnedMemory> block_;
};

// Nothing but that order keeps the second stream: words of before let it go on.
TEST_F(CollOrder, AnotherStreamComesAfterTheCallBefore) {
  const auto in_order = [&](const char* what, const auto& call, const auto& of_peer) {
    SCOPED_TRACE(what);
    hold_first();
    call(*first_);
    call(*second_);
    EXPECT_FALSE(*second_->idle());
    of_peer();
    of_peer();
    let_first_go();
  };
  in_order("sessions", [&](auto& on) { session(0, on); }, [&] { session(1, *peer_); });
  in_order("sends", [&](auto& on) { send(on); }, [&] { receive(*peer_); });
  in_order("barriers", [&](auto& on) { barrier(0, on); }, [&] { barrier(1, *peer_); });
}

TEST_F(CollOrder, CallsOfDifferentKindsDoNotWaitForEachOther) {
  hold_first();
  session(0, *first_);
  send(*second_);
  EXPECT_TRUE(*second_->idle());
  receive(*peer_);
  session(1, *peer_);
  let_first_go();
}

TEST_F(CollOrder, CapturesKeepTheOrderOfTheirOwnCalls) {
  send(*first_);  // outside
  auto capture = cuda::Capture::begin(*first_).value();
  const auto fork = cuda::Event::create(context(0)).value();
  EXPECT_OK(fork.record(*first_));
  EXPECT_OK(second_->wait(fork));
  const int before = fake_->calls("cuStreamWaitEvent");
  send(*first_);
  EXPECT_EQ(fake_->calls("cuStreamWaitEvent"), before) << "a capture waits for nothing outside";
  send(*second_);
  EXPECT_EQ(fake_->calls("cuStreamWaitEvent"), before + 1);
  EXPECT_OK(fork.record(*second_));
  EXPECT_OK(first_->wait(fork));
  EXPECT_OK(capture.finish());
  auto another = cuda::Capture::begin(*first_).value();
  send(*first_);
  EXPECT_EQ(fake_->calls("cuStreamWaitEvent"), before + 2) << "for the join alone";
  EXPECT_OK(another.finish());
  hold_first();
  send(*first_);
  send(*second_);
  EXPECT_FALSE(*second_->idle()) << "captures have not made this order forgotten";
  for (int i = 0; i < 3; ++i)
    receive(*peer_);
  let_first_go();
}

}  // namespace
}  // namespace crossdock::testing
