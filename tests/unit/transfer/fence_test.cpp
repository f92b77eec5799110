// Fencing: what an engine may do to the memory of another ends, whatever the other calls it, and
// nobody is told so without proof.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <future>
#include <thread>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

using transfer::Access;
using transfer::State;

// The same engine by another spelling of its address.
std::string respelled(const std::string& name) {
  return "localhost" + name.substr(name.rfind(':'));
}

bool holds_only(const std::vector<std::byte>& memory, std::byte value) {
  return std::all_of(memory.begin(), memory.end(), [&](std::byte b) { return b == value; });
}

class FenceOver : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, FenceOver, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

TEST_P(FenceOver, FenceEndsWhatAPeerMayDo) {
  Pair pair(GetParam(), 4096);
  ASSERT_TRUE(pair.run({pair.write(0, 8)}).ok());
  ASSERT_TRUE(pair.target.fence(pair.source.name(), soon()).ok());
  std::memset(pair.target_memory.data(), 0x5a, 4096);
  EXPECT_FALSE(pair.run({pair.write(0, 4096)}).ok());
  for (const auto byte : pair.target_memory)
    ASSERT_EQ(byte, std::byte{0x5a});
  while (pair.peer.alive())
    std::this_thread::yield();
  pair.peer = pair.open();
  EXPECT_TRUE(pair.run({pair.write(0, 8)}).ok()) << "opened again, it may";
}

// Many writes under way; after the fence none of them lands any more.
void expect_quiet_after(Pair& pair, const std::function<Result<>()>& fence) {
  const std::size_t bytes = pair.target_memory.size();
  const std::vector<Request> batch(64, pair.write(0, bytes));
  auto running = pair.source.submit(pair.peer, batch, {.deadline = soon()}).value();
  while (running.status().bytes_done == 0)
    std::this_thread::yield();
  const auto fenced = fence();
  ASSERT_TRUE(fenced.ok()) << fenced.error().describe();
  std::memset(pair.target_memory.data(), 0x5a, bytes);
  EXPECT_FALSE(running.wait(soon()).ok());
  EXPECT_TRUE(holds_only(pair.target_memory, std::byte{0x5a}));
}

TEST_P(FenceOver, APeerOpenedByAnotherSpellingIsFencedByItsHandle) {
  Pair pair(GetParam(), 8 << 20);
  const auto source = pair.target.open(respelled(pair.source.name()), soon()).value();
  ASSERT_NE(source.name(), pair.source.name());
  expect_quiet_after(pair, [&] { return pair.target.fence(source, soon()); });
}

TEST_P(FenceOver, AnEngineWithANameOfItsOwnIsFencedByEither) {
  for (const bool by_name : {false, true}) {
    Pair pair(GetParam(), 8 << 20, false, {.name = "prefill"});
    expect_quiet_after(pair, [&] {
      return by_name ? pair.target.fence("prefill", soon())
                     : pair.target.fence_instance(pair.source.instance(), soon());
    });
  }
}

TEST_P(FenceOver, ANameThatNobodyHereBearsProvesNothing) {
  Pair pair(GetParam(), 4096);
  for (const auto& name : {respelled(pair.source.name()), std::string("nobody")}) {
    const auto fenced = pair.target.fence(name, soon());
    ASSERT_FALSE(fenced.ok()) << name;
    EXPECT_EQ(fenced.code(), Code::kNotFound);
    EXPECT_NE(fenced.error().message.find(name), std::string::npos);
  }
  EXPECT_TRUE(pair.run({pair.write(0, 8)}).ok()) << "and nobody was fenced off";
  EXPECT_TRUE(pair.target.fence_instance(1, soon()).ok()) << "never opened this engine";
}

TEST_P(FenceOver, OthersOfTheEngineGoOn) {
  std::vector<std::byte> bytes(64);
  Pair pair(GetParam(), 4096);
  auto other = make_engine(GetParam());
  auto local = other.register_memory(bytes.data(), bytes.size()).value();
  auto peer = other.open(pair.target.name(), soon()).value();
  ASSERT_TRUE(pair.target.fence_instance(pair.source.instance(), soon()).ok());
  const Request write{Op::kWrite, bytes.data(), address_of(pair.remote), 64};
  EXPECT_TRUE(other.transfer(peer, std::span(&write, 1), {.deadline = soon()}).ok());
}

// A peer that confirms too late was fenced all the same: it notices, and may open the engine again.
TEST(Fence, APeerThatConfirmsLateMayOpenAgain) {
  Pair pair("shm", 4096);
  std::promise<void> hangs, go_on;
  auto inbox = pair.source.mailbox("inbox").value();
  const auto hanging = inbox
                           .on_message([&hangs, gate = go_on.get_future().share()](
                                           const transfer::Message& message) {
                             if (message.payload != "wait") return;
                             hangs.set_value();
                             gate.wait();
                           })
                           .value();
  auto back = pair.target.open(pair.source.name(), soon()).value();
  auto knock =
      pair.target.submit(back, {}, {.deadline = soon(), .notification = {{"inbox", "wait"}}})
          .value();
  hangs.get_future().wait();
  EXPECT_EQ(pair.target.fence_instance(pair.source.instance(), Deadline::in(200ms)).code(),
            Code::kDeadline);
  std::vector<std::byte> memory(4096);
  auto later =
      pair.target.register_memory(memory.data(), memory.size(), {.label = "later"}).value();
  go_on.set_value();
  EXPECT_TRUE(knock.wait(soon()).ok());
  const auto patience = soon();
  while (pair.peer.alive() && !patience.passed())
    std::this_thread::yield();
  EXPECT_FALSE(pair.peer.alive()) << "fenced, it must open the engine again";
  for (const auto& region : pair.peer.regions())
    EXPECT_NE(region.label, "later") << "announced to one that is fenced off";
  pair.peer = pair.open();
  const auto again = pair.run({pair.write(0, 4096)});
  EXPECT_TRUE(again.ok()) << again.error().describe();
}

}  // namespace
}  // namespace crossdock::testing
