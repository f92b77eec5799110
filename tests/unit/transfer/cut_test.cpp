// What a target took before its lanes were cut may still be put in place: until it has shown that
// it let go of them, or had its time, no transfer that used them ends.
// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include "support/engines.hpp"
#include "support/raw_server.hpp"

namespace crossdock::testing {
namespace {

constexpr auto kGrace = 1s;

// `late` passes its deadline, and its lanes are cut with `other` on them; they cannot be dialled
// again.
struct CutOff {
  explicit CutOff(bool refuse) {
    server.take_no_more(refuse);
    late = submit(Deadline::in(50ms));
    other = submit(Deadline::in(10min));
    for (const auto patience = soon(); !patience.passed();) {
      const auto now = std::chrono::steady_clock::now();
      if (peer.transport().empty()) break;
      before_cut = now;
    }
    EXPECT_TRUE(peer.transport().empty()) << "the lanes are cut";
  }
  std::optional<Transfer> submit(Deadline deadline) {
    const auto write = RawServer::write_from(memory.data(), memory.size());
    return source.submit(peer, std::span(&write, 1), {.deadline = deadline}).value();
  }
  void expect_it_had_its_time(Transfer& transfer) const {
    EXPECT_FALSE(transfer.wait(soon()).ok());
    EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
    EXPECT_GE(std::chrono::steady_clock::now() - before_cut, kGrace);
  }

  std::vector<std::byte> memory = std::vector<std::byte>(64);
  RawServer server;
  Engine source =
      make_engine("tcp", {.config = {{"transfer.quiesce_grace", "1s"}, {"log.level", "error"}}});
  Region local = source.register_memory(memory.data(), memory.size()).value();
  Peer peer = source.open(server.name(), soon()).value();
  std::optional<Transfer> late, other;
  std::chrono::steady_clock::time_point before_cut;
};

TEST(Cut, ARedialThatFailsAtOnceProvesNothing) {
  CutOff cut(true);
  std::thread waiting([&] { cut.expect_it_had_its_time(*cut.other); });
  cut.expect_it_had_its_time(*cut.late);
  waiting.join();
}

TEST(Cut, NorDoesACancelOfWhoWaitsForTheRedial) {
  CutOff cut(false);
  cut.other->cancel();
  cut.expect_it_had_its_time(*cut.other);
}

// The lane ends by itself with a write in flight: seen from here, that may be the doing of
// something in between, and what the target holds may still be put in place.
class BrokenLane : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Cut, BrokenLane, ::testing::Bool(), [](const auto& cancelled) {
  return std::string(cancelled.param ? "OfACancelledTransfer" : "WithoutATryLeft");
});

TEST_P(BrokenLane, ProvesAsLittleAsOneThatWasCut) {
  std::vector<std::byte> memory(64);
  RawServer server;
  auto source = make_engine("tcp", {.config = {{"transfer.quiesce_grace", "1s"},
                                               {"transfer.max_retries", "0"},
                                               {"transport.tcp.lanes", "1"},
                                               {"log.level", "error"}}});
  auto local = source.register_memory(memory.data(), memory.size()).value();
  auto peer = source.open(server.name(), soon()).value();
  const auto write = RawServer::write_from(memory.data(), memory.size());
  auto transfer =
      source.submit(peer, std::span(&write, 1), {.deadline = Deadline::in(10min)}).value();
  server.await_data();
  if (GetParam()) transfer.cancel();
  EXPECT_FALSE(transfer::is_terminal(transfer.status().state)) << "it is in flight";
  const auto before_end = std::chrono::steady_clock::now();
  server.end_lanes();
  EXPECT_EQ(transfer.wait(soon()).code(), GetParam() ? Code::kCancelled : Code::kPeerLost);
  EXPECT_GE(std::chrono::steady_clock::now() - before_end, kGrace);
}

// A close cuts what does not end, and gives it the same time.
TEST(Cut, CloseWaitsUntilACutTransferHadItsTime) {
  std::vector<std::byte> memory(64);
  RawServer server;  // never acknowledges a write
  auto source = make_engine(
      "tcp", {.config = {{"transfer.quiesce_grace", "2500ms"}, {"log.level", "error"}}});
  auto local = source.register_memory(memory.data(), memory.size()).value();
  auto peer = source.open(server.name(), soon()).value();
  const auto write = RawServer::write_from(memory.data(), memory.size());
  auto transfer =
      source.submit(peer, std::span(&write, 1), {.deadline = Deadline::in(10min)}).value();
  const auto begin = std::chrono::steady_clock::now();
  const auto closed = source.close(soon());
  EXPECT_TRUE(closed.ok()) << closed.error().describe();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 5s) << "until the cut, and after it";
  EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
}

}  // namespace
}  // namespace crossdock::testing
