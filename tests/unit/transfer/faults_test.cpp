// The engine over transports that misbehave by seed: what it must repair, and what it must notice.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

using transfer::Notification;
using Settings = std::map<std::string, std::string>;

class FaultyOver : public ::testing::TestWithParam<const char*> {
 protected:
  // Only the source injects; shards are small so that a transfer meets several faults.
  Pair make_pair(Settings faults, std::size_t bytes = 1 << 20) const {
    faults.emplace("transfer.shard_bytes", "64KiB");
    faults["transport.enabled"] = std::string("faulty+") + GetParam();
    faults.emplace("log.level", "error");
    return Pair(GetParam(), bytes, false, {.config = std::move(faults)});
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, FaultyOver, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

TEST_P(FaultyOver, FailedShardsAreTriedAgain) {
  auto pair = make_pair({{"transport.faulty.fail_ppm", "200000"}, {"transfer.max_retries", "50"}});
  for (std::uint64_t round = 0; round < 10; ++round) {
    fill_pattern(pair.source_memory.data(), 1 << 20, round);
    const auto result = pair.run({pair.write(0, 1 << 20)});
    ASSERT_TRUE(result.ok()) << result.error().describe();
    ASSERT_TRUE(has_pattern(pair.target_memory.data(), 1 << 20, round));
  }
  EXPECT_EQ(pair.source.metrics().find("crossdock_shard_retries_total 0\n"), std::string::npos)
      << "faults were injected";
}

TEST_P(FaultyOver, LostConnectionsAreDialledAgain) {
  auto pair = make_pair({{"transport.faulty.drop_ppm", "50000"}, {"transfer.max_retries", "50"}});
  int delivered = 0;
  for (std::uint64_t round = 0; round < 20; ++round) {
    fill_pattern(pair.source_memory.data(), 1 << 20, round);
    const auto result = pair.run({pair.write(0, 1 << 20)});
    // A submission while the rails are down is refused with "later"; none hangs or lies.
    if (!result.ok()) {
      EXPECT_NE(result.error().retry, Retry::kNo) << result.error().describe();
      continue;
    }
    ++delivered;
    ASSERT_TRUE(has_pattern(pair.target_memory.data(), 1 << 20, round));
  }
  EXPECT_GT(delivered, 0);
}

TEST_P(FaultyOver, WithoutRetriesTheFaultIsReported) {
  auto pair = make_pair({{"transport.faulty.fail_ppm", "1000000"}, {"transfer.max_retries", "0"}});
  const auto result = pair.run({pair.write(0, 1 << 20)});
  EXPECT_EQ(result.code(), Code::kUnreachable);
  EXPECT_TRUE(pair.local.release(soon()).ok());
}

TEST_P(FaultyOver, DuplicateCompletionsEndATransferOnce) {
  auto pair = make_pair({{"transport.faulty.duplicate_ppm", "500000"}});
  for (std::uint64_t round = 0; round < 20; ++round) {
    fill_pattern(pair.source_memory.data(), 1 << 20, round);
    ASSERT_TRUE(pair.run({pair.write(0, 1 << 20)}).ok());
    ASSERT_TRUE(has_pattern(pair.target_memory.data(), 1 << 20, round));
  }
}

TEST_P(FaultyOver, DelayAndReorderingChangeNothing) {
  auto pair = make_pair({{"transport.faulty.delay_max", "3ms"}, {"transport.faulty.reorder", "8"}});
  auto mailbox = pair.target.mailbox("m").value();
  for (std::uint64_t round = 0; round < 10; ++round) {
    fill_pattern(pair.source_memory.data(), 1 << 20, round);
    ASSERT_TRUE(pair.run({pair.write(0, 1 << 20)}, {.notification = Notification{"m", "x"}}).ok());
    ASSERT_TRUE(mailbox.receive(soon()).ok());
    ASSERT_TRUE(has_pattern(pair.target_memory.data(), 1 << 20, round));
  }
}

TEST_P(FaultyOver, AFlippedBitIsCaughtByTheChecksum) {
  auto pair = make_pair({{"transport.faulty.corrupt_ppm", "1000000"}});
  fill_pattern(pair.source_memory.data(), 1 << 20, 1);
  ASSERT_TRUE(pair.run({pair.write(0, 1 << 20)}).ok()) << "without the checksum nobody looks";
  EXPECT_FALSE(has_pattern(pair.target_memory.data(), 1 << 20, 1)) << "a bit was flipped";
  const auto checked = pair.run({pair.write(0, 1 << 20)}, {.checksum = true});
  ASSERT_EQ(checked.code(), Code::kCorrupt);
  EXPECT_EQ(checked.error().scope, Scope::kTransfer);
}

TEST_P(FaultyOver, ADeadlineEndsADelayedTransfer) {
  auto pair = make_pair({{"transport.faulty.delay_max", "1min"}});
  const auto begin = std::chrono::steady_clock::now();
  const auto result = pair.run({pair.write(0, 1 << 20)}, {.deadline = Deadline::in(200ms)});
  EXPECT_EQ(result.code(), Code::kDeadline);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
  // Quiesced: the source may be reused at once.
  EXPECT_TRUE(pair.local.release(Deadline::in(1s)).ok());
}

// Shards start within two seconds, one after the other.
TEST_P(FaultyOver, WhatMovesOrWaitsForItsTurnIsNoStall) {
  auto pair = make_pair({{"transport.faulty.delay_max", "2s"},
                         {"transfer.shard_bytes", "16KiB"},
                         {"transfer.slice_bytes", "16KiB"}});
  const TransferOptions options{.deadline = soon(), .stall_timeout = 500ms};
  const std::vector<Request> many{pair.write(0, 1 << 20)};
  const std::vector<Request> one{pair.write(0, 4096)};
  const auto begin = std::chrono::steady_clock::now();
  auto moving = pair.source.submit(pair.peer, many, options).value();
  std::vector<Transfer> waiting;
  for (int i = 0; i < 8; ++i)
    waiting.push_back(pair.source.submit(pair.peer, one, options).value());
  const auto moved = moving.wait(soon());
  EXPECT_TRUE(moved.ok()) << moved.error().describe();
  EXPECT_GT(std::chrono::steady_clock::now() - begin, 500ms);
  for (auto& transfer : waiting) {
    const auto result = transfer.wait(soon());
    EXPECT_TRUE(result.ok()) << result.error().describe();
  }
}

TEST_P(FaultyOver, WhatDoesNotMoveIsAStall) {
  auto pair = make_pair({{"transport.faulty.delay_max", "1min"}});
  // Beside one that says nothing, the setting does not count: the deadline was given.
  auto patient =
      pair.source.submit(pair.peer, {{pair.write(0, 4096)}}, {.deadline = soon()}).value();
  const auto result =
      pair.run({pair.write(0, 1 << 20)}, {.deadline = Deadline::in(10min), .stall_timeout = 200ms});
  ASSERT_EQ(result.code(), Code::kDeadline);
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("did not move for 200 ms"));
  EXPECT_FALSE(transfer::is_terminal(patient.status().state));
  EXPECT_EQ(pair.run({pair.write(0, 4096)}, {.stall_timeout = -1ns}).code(),
            Code::kInvalidArgument);
}

TEST_P(FaultyOver, WithoutADeadlineTheSettingCounts) {
  auto pair =
      make_pair({{"transport.faulty.delay_max", "1min"}, {"transfer.stall_timeout", "200ms"}});
  auto transfer = pair.source.submit(pair.peer, {{pair.write(0, 4096)}}, {}).value();
  const auto result = transfer.wait(soon());
  ASSERT_EQ(result.code(), Code::kDeadline);
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("did not move for 200 ms"));
  EXPECT_EQ(pair.run({pair.write(0, 4096)}, {.deadline = Deadline::in(600ms), .stall_timeout = 0ns})
                .error()
                .message.find("did not move"),
            std::string::npos);
}

// One thread an engine hashes: most of these wait for the others far longer than they may stand
// still.
TEST(Stall, IsNoneWhileOthersAreChecked) {
  constexpr std::size_t kBytes = 2u << 20;
  Pair pair("shm", kBytes, true);
  std::vector<Transfer> transfers;
  for (int i = 0; i < 1500; ++i)
    transfers.push_back(
        pair.source
            .submit(pair.peer, {{pair.write(0, kBytes)}},
                    {.deadline = Deadline::in(10min), .stall_timeout = 300ms, .checksum = true})
            .value());
  for (auto& transfer : transfers) {
    const auto result = transfer.wait(Deadline::in(3min));
    ASSERT_TRUE(result.ok()) << result.error().describe();
  }
}

}  // namespace
}  // namespace crossdock::testing
