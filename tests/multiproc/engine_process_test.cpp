// Engines in different processes: one of them is killed or stopped in the middle, and the other
// must neither hang nor touch, nor be touched in, memory that it was told is quiet.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <sys/mman.h>
#include <thread>

#include "base/child_process.hpp"
#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

using base::ChildProcess;
using base::hear_parent;
using base::say_parent;
using transfer::Message;
using transfer::State;

constexpr std::size_t kBytes = 64u << 20;

// --- the child's roles ---

// The parent orders this after the writes that it hashes, where TSan cannot see it.
__attribute__((no_sanitize("thread"))) std::uint64_t hash_of(const std::byte* memory) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kBytes; i += 8) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, memory + i, 8);
    sum = sum * 1099511628211u + word;
  }
  return sum;
}

// Owns a region and does nothing else, until the parent closes the pipe.
int run_target(const std::string& transports) {
  auto engine = make_engine(transports);
  auto region = engine.allocate(kBytes, {.label = "pool"}).value();
  say_parent(engine.name());
  std::string line;
  while (hear_parent(line)) {
    if (line == "hash") say_parent(std::to_string(hash_of(bytes_of(region, 0))));
  }
  return 0;
}

// Writes to the parent's region for ever, a new pattern each time.
int run_source(const std::string& transports, const std::string& peer_name) {
  auto engine = make_engine(transports);
  auto region = engine.allocate(kBytes).value();
  auto peer = engine.open(peer_name, soon()).value();
  const auto pool = peer.region("pool", soon()).value();
  for (std::uint64_t round = 1;; ++round) {
    std::memset(region.address(), static_cast<int>(round % 200) + 1, kBytes);
    const Request request{Op::kWrite, region.address(), pool.address, kBytes};
    const auto result = engine.transfer(peer, std::span(&request, 1), {.deadline = soon()});
    if (round == 1) say_parent("writing");
    if (!result.ok()) return 3;
  }
}

// --- the parent's tests ---

class EngineProcess : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, EngineProcess, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

// A source in this process with a target in another, and a transfer of all its memory under way.
struct Initiator {
  explicit Initiator(const std::string& transports, transfer::EngineOptions options = {})
      : child({"--role=target", base_of(transports)}),
        engine(make_engine(transports, std::move(options))),
        region(engine.allocate(kBytes).value()),
        peer(engine.open(child.hear(), soon()).value()),
        pool(peer.region("pool", soon()).value()) {
    fill_pattern(region.address(), kBytes, 1);
  }
  Transfer start(Deadline deadline, int copies = 8) {
    std::vector<Request> batch(static_cast<std::size_t>(copies),
                               Request{Op::kWrite, region.address(), pool.address, kBytes});
    return engine.submit(peer, batch, {.deadline = deadline}).value();
  }
  // "faulty+tcp" speaks to the peer's "tcp".
  static std::string base_of(const std::string& transports) {
    return transports.substr(transports.rfind('+') + 1);
  }
  // Until the peer, which hung, takes transfers again.
  Result<> eventually_delivered(std::size_t length) {
    const auto until = soon();
    const Request request{Op::kWrite, region.address(), pool.address, length};
    while (true) {
      auto result = engine.transfer(peer, std::span(&request, 1), {.deadline = until});
      if (result.ok() || until.passed() || result.error().retry != Retry::kLater) return result;
      std::this_thread::yield();
    }
  }
  void wait_until_moving(const Transfer& transfer) const {
    while (transfer.status().bytes_done == 0 && !transfer::is_terminal(transfer.status().state))
      std::this_thread::yield();
  }

  ChildProcess child;
  Engine engine;
  Region region;
  Peer peer;
  transfer::RemoteRegion pool;
};

TEST_P(EngineProcess, MovesBytesBetweenProcesses) {
  Initiator self(GetParam());
  auto transfer = self.start(soon(), 1);
  ASSERT_TRUE(transfer.wait(soon()).ok());
  // Reads back what the other process really has.
  std::memset(self.region.address(), 0, kBytes);
  const Request back{Op::kRead, self.region.address(), self.pool.address, kBytes};
  ASSERT_TRUE(self.engine.transfer(self.peer, std::span(&back, 1), {.deadline = soon()}).ok());
  EXPECT_TRUE(has_pattern(self.region.address(), kBytes, 1));
}

TEST_P(EngineProcess, AKilledTargetFailsTheTransferByName) {
  Initiator self(GetParam());
  auto transfer = self.start(Deadline::in(10s));
  self.wait_until_moving(transfer);
  self.child.signal(SIGKILL);
  const auto result = transfer.wait(Deadline::in(5s));
  if (result.ok()) return;  // the copies were faster than the signal
  EXPECT_EQ(result.code(), Code::kPeerLost) << result.error().describe();
  EXPECT_NE(result.error().message.find(self.peer.name()), std::string::npos)
      << result.error().message;
  while (self.peer.alive())
    std::this_thread::yield();
  EXPECT_TRUE(self.region.release(soon()).ok()) << "nothing holds the source any more";
}

TEST_P(EngineProcess, OtherPeersGoOnWhenOneDies) {
  Initiator self(GetParam());
  ChildProcess other_child({"--role=target", GetParam()});
  auto other = self.engine.open(other_child.hear(), soon()).value();
  const auto other_pool = other.region("pool", soon()).value();
  auto transfer = self.start(Deadline::in(10s));
  self.child.signal(SIGKILL);
  const Request request{Op::kWrite, self.region.address(), other_pool.address, 1 << 20};
  for (int i = 0; i < 50; ++i)
    ASSERT_TRUE(self.engine.transfer(other, std::span(&request, 1), {.deadline = soon()}).ok());
  (void)transfer.wait(Deadline::in(5s));
  EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
}

TEST_P(EngineProcess, AStoppedTargetCannotHoldTheTransferBeyondItsDeadline) {
  Initiator self(GetParam());
  auto warm = self.start(soon(), 1);
  ASSERT_TRUE(warm.wait(soon()).ok());
  self.child.stop();
  const auto begin = std::chrono::steady_clock::now();
  auto transfer = self.start(Deadline::in(500ms));
  const auto result = transfer.wait(Deadline::in(5s));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
  EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
  const bool needs_the_target = std::string(GetParam()) == "tcp";
  EXPECT_TRUE(result.code() == Code::kDeadline || (result.ok() && !needs_the_target));
  // Terminal means quiesced: what the target has now is what it keeps, whatever we do to the
  // source.
  std::memset(self.region.address(), 0xdb, kBytes);
  self.child.signal(SIGCONT);
  self.child.say("hash");
  const std::string first = self.child.hear();
  self.child.say("hash");
  EXPECT_EQ(first, self.child.hear());
  EXPECT_FALSE(first.empty());
}

// Nothing of it moves, so its deadline is not waited for.
TEST(EngineProcessOnce, AStoppedTargetIsAStall) {
  Initiator self("tcp");
  ASSERT_TRUE(self.eventually_delivered(1 << 20).ok());
  self.child.stop();
  for (const bool of_the_transfer : {true, false}) {
    TransferOptions options{.stall_timeout = 300ms};
    if (of_the_transfer) options.deadline = Deadline::in(10min);
    const std::vector<Request> batch(
        8, Request{Op::kWrite, self.region.address(), self.pool.address, kBytes});
    auto transfer = self.engine.submit(self.peer, batch, options);
    if (!transfer.ok()) continue;  // its rails were cut, and it does not answer the redial
    const auto result = transfer->wait(Deadline::in(30s));
    ASSERT_EQ(result.code(), Code::kDeadline);
    ASSERT_TRUE(transfer::is_terminal(transfer->status().state));
    EXPECT_NE(result.error().message.find("did not move for 300 ms"), std::string::npos)
        << result.error().describe();
  }
}

TEST_P(EngineProcess, APeerThatWentOnIsReachedByTheSameHandle) {
  Initiator self(GetParam());
  for (int round = 0; round < 2; ++round) {
    self.child.stop();
    auto transfer = self.start(Deadline::in(200ms));
    (void)transfer.wait(Deadline::in(10s));
    ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
    self.child.signal(SIGCONT);
    const auto result = self.eventually_delivered(1 << 20);
    EXPECT_TRUE(result.ok()) << result.error().describe();
    EXPECT_TRUE(self.peer.alive());
  }
}

// A transfer whose rails were cut ends when the peer has let go of them, if it answers: here it
// goes on just after the cut.
TEST(EngineProcessOnce, ACutIsConfirmedByAPeerThatAnswers) {
  Initiator self("tcp", {.config = {{"transfer.quiesce_grace", "5s"}}});
  self.child.stop();
  auto transfer = self.start(Deadline::in(50ms));
  const auto until = soon();
  while (!self.peer.transport().empty() && !until.passed())
    std::this_thread::yield();
  ASSERT_TRUE(self.peer.transport().empty()) << "the rails are cut";
  self.child.signal(SIGCONT);
  EXPECT_EQ(transfer.wait(soon()).code(), Code::kDeadline);
  ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
  EXPECT_EQ(self.peer.transport(), "tcp") << "the new lanes stand before the transfer ends";
  EXPECT_EQ(self.engine.metrics().find("crossdock_redials_total 0\n"), std::string::npos);
}

TEST_P(EngineProcess, AReadFromAStoppedPeerEndsAndStaysEnded) {
  Initiator self(GetParam());
  auto warm = self.start(soon(), 1);
  ASSERT_TRUE(warm.wait(soon()).ok());
  const std::vector<Request> batch(
      8, Request{Op::kRead, self.region.address(), self.pool.address, kBytes});
  auto transfer = self.engine.submit(self.peer, batch, {.deadline = Deadline::in(2s)}).value();
  self.wait_until_moving(transfer);
  self.child.stop();
  const auto result = transfer.wait(Deadline::in(12s));
  ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
  EXPECT_TRUE(result.ok() || result.code() == Code::kDeadline) << result.error().describe();
  std::memset(self.region.address(), 0xdb, kBytes);
  self.child.signal(SIGCONT);
  self.child.say("hash");
  EXPECT_FALSE(self.child.hear().empty()) << "it runs again";
  for (std::size_t i = 0; i < kBytes; i += 512)
    ASSERT_EQ(*bytes_of(self.region, i), std::byte{0xdb}) << "read into after the end, at " << i;
}

// Whatever it waits for: the data, the peer's digest, its acknowledgement of the notification.
TEST_P(EngineProcess, AStoppedPeerHoldsNoStageBeyondTheDeadline) {
  Initiator self(GetParam(), {.config = {{"transfer.quiesce_grace", "1ms"}}});
  ASSERT_TRUE(self.eventually_delivered(kBytes).ok());
  self.child.stop();
  for (const int ms : {1, 20, 40, 60, 80, 120, 160, 200, 300}) {
    for (const bool checksum : {true, false}) {
      const std::vector<Request> batch(
          2, Request{Op::kWrite, self.region.address(), self.pool.address, kBytes});
      TransferOptions options{.deadline = Deadline::in(std::chrono::milliseconds(ms))};
      if (checksum)
        options.checksum = true;
      else
        options.notification = transfer::Notification{"m", "x"};
      auto transfer = self.engine.submit(self.peer, batch, options);
      if (!transfer.ok()) {
        EXPECT_EQ(transfer.error().retry, Retry::kLater) << transfer.error().describe();
        continue;  // its rails were cut, and it does not answer the redial
      }
      EXPECT_EQ(transfer->wait(Deadline::in(10s)).code(), Code::kDeadline);
      ASSERT_TRUE(transfer::is_terminal(transfer->status().state)) << ms << " " << checksum;
    }
  }
  EXPECT_TRUE(self.engine.pending().empty());
  EXPECT_TRUE(self.region.release(Deadline::in(5s)).ok());
}

TEST_P(EngineProcess, AKilledPeerEndsAChecksumAndANotification) {
  for (const bool checksum : {true, false}) {
    Initiator self(GetParam());
    self.child.stop();  // so that it cannot answer before it dies
    const Request request{Op::kWrite, self.region.address(), self.pool.address, 64};
    TransferOptions options{.deadline = soon()};
    if (checksum)
      options.checksum = true;
    else
      options.notification = transfer::Notification{"m", "x"};
    auto transfer = self.engine.submit(self.peer, std::span(&request, 1), options).value();
    EXPECT_EQ(transfer.wait(Deadline::in(50ms)).code(), Code::kDeadline) << "it waits for the peer";
    self.child.signal(SIGKILL);
    EXPECT_EQ(transfer.wait(Deadline::in(10s)).code(), Code::kPeerLost);
  }
}

// Each transfer to the healthy peer needs it dialled again while the other does not answer its
// redial; and checksums, which run on a thread of their own.
TEST(EngineProcessOnce, APeerThatHangsHoldsUpNoOther) {
  Initiator self("faulty+tcp", {.config = {{"transport.faulty.fail_ppm", "300000"},
                                           {"transfer.max_retries", "100"},
                                           {"control.connect_timeout", "1min"}}});
  ChildProcess healthy({"--role=target", "tcp"});
  auto other = self.engine.open(healthy.hear(), soon()).value();
  const auto other_pool = other.region("pool", soon()).value();
  self.child.stop();
  auto stuck = self.start(Deadline::in(100ms));
  (void)stuck.wait(Deadline::in(10s));
  // Its rails are down now; this asks for them.
  const Request request{Op::kWrite, self.region.address(), self.pool.address, 64};
  (void)self.engine.submit(self.peer, std::span(&request, 1), {.deadline = Deadline::in(1min)});
  const Request to_other{Op::kWrite, self.region.address(), other_pool.address, 1 << 20};
  for (int i = 0; i < 10; ++i) {
    // Rails that are being dialled take no submission: later.
    const auto until = soon();
    Result<> result;
    do
      result = self.engine.transfer(other, std::span(&to_other, 1),
                                    {.deadline = until, .checksum = true});
    while (!result.ok() && result.code() == Code::kUnreachable && !until.passed());
    ASSERT_TRUE(result.ok()) << result.error().describe();
  }
  EXPECT_TRUE(self.peer.alive()) << "it still hangs";
  self.child.signal(SIGKILL);  // the end of the engine need not wait for it
}

TEST_P(EngineProcess, PoisonAfterCancelNeverArrives) {
  Initiator self(GetParam());
  for (int round = 0; round < 20; ++round) {
    fill_pattern(self.region.address(), kBytes, 7);
    auto transfer = self.start(soon(), 2);
    if (round % 3 != 0) self.wait_until_moving(transfer);
    transfer.cancel();
    const auto result = transfer.wait(soon());
    ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
    ASSERT_TRUE(result.ok() || result.code() == Code::kCancelled);
    std::memset(self.region.address(), 0xdb, kBytes);  // poison
    std::vector<std::byte> copy(1 << 20);
    auto scratch = self.engine.register_memory(copy.data(), copy.size()).value();
    const Request back{Op::kRead, copy.data(), self.pool.address + kBytes - (1 << 20), 1 << 20};
    ASSERT_TRUE(self.engine.transfer(self.peer, std::span(&back, 1), {.deadline = soon()}).ok());
    for (std::size_t i = 0; i + 8 <= copy.size(); i += 4096) {
      std::uint64_t word = 0;
      std::memcpy(&word, copy.data() + i, 8);
      ASSERT_NE(word, 0xdbdbdbdbdbdbdbdbu) << "poison at " << i << " in round " << round;
    }
    ASSERT_TRUE(scratch.release(soon()).ok());
  }
}

// A target in this process with a source in another that writes all the time.
struct Victim {
  explicit Victim(const std::string& transports)
      : engine(make_engine(transports)),
        region(engine.allocate(kBytes, {.label = "pool"}).value()),
        mailbox(engine.mailbox("events").value()),
        child({"--role=source", transports, engine.name()}) {
    EXPECT_EQ(child.hear(), "writing");
  }
  // Poisons the region and tells whether anything of it changes; the writer fills all of it in a
  // few milliseconds when it is alive.
  bool stays_poisoned() {
    std::memset(region.address(), 0xdb, kBytes);
    const auto end = Deadline::in(300ms);
    while (!end.passed())
      for (std::size_t i = 0; i < kBytes; i += 1024)
        if (*bytes_of(region, i) != std::byte{0xdb}) return false;
    return true;
  }
  Engine engine;
  Region region;
  transfer::Mailbox mailbox;
  ChildProcess child;
};

TEST_P(EngineProcess, TheTestNoticesALivingWriter) {
#ifdef CROSSDOCK_SANITIZE_THREAD
  GTEST_SKIP() << "two writers of one place, on purpose: a race, as TSan would say rightly";
#endif
  Victim self(GetParam());
  EXPECT_FALSE(self.stays_poisoned());
}

TEST_P(EngineProcess, AKilledSourceIsQuietOnceItIsReportedLost) {
  for (int round = 0; round < 3; ++round) {
    Victim self(GetParam());
    self.child.signal(SIGKILL);
    const auto message = self.mailbox.receive(soon()).value();
    EXPECT_EQ(message.kind, Message::Kind::kPeerLost);
    EXPECT_TRUE(self.stays_poisoned());
    EXPECT_TRUE(self.region.release(soon()).ok());
  }
}

TEST_P(EngineProcess, AReleasedRegionIsQuietAlthoughTheWriterLives) {
  Victim self(GetParam());
  ASSERT_TRUE(self.region.release(soon()).ok()) << "the writer lets go when asked";
  EXPECT_TRUE(self.stays_poisoned());
}

TEST_P(EngineProcess, AStoppedSourceHoldsTheRegionOrIsFencedOff) {
  Victim self(GetParam());
  self.child.stop();
  const auto released = self.region.release(Deadline::in(300ms));
  ASSERT_EQ(released.code(), Code::kBusy) << "no proof that it will not write when it goes on";
  EXPECT_EQ(released.error().scope, Scope::kPeer);
  self.child.signal(SIGCONT);
  EXPECT_TRUE(self.region.release(soon()).ok()) << "it answers now";
}

// Whether the pages are mapped: a peer that goes on would die, or write what others use now.
bool is_mapped(void* address) {
  unsigned char in_core = 0;
  return ::mincore(address, 1, &in_core) == 0;
}

TEST_P(EngineProcess, CloseWithAStoppedSourceKeepsMappedWhatItMayWrite) {
  const bool copies = std::string(GetParam()) == "shm";
  void* address = nullptr;
  {
    Victim self(GetParam());
    self.child.stop();
    const auto begin = std::chrono::steady_clock::now();
    const auto closed = self.engine.close(Deadline::in(300ms));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
    // The connections of a tcp peer are cut, which is proof enough.
    EXPECT_EQ(closed.code(), copies ? Code::kBusy : Code::kOk);
    address = self.region.address();
  }
  if (copies) {
    EXPECT_TRUE(is_mapped(address)) << "handles and engine are gone, the writer was not";
  }
}

TEST_P(EngineProcess, CloseWithAStoppedTargetIsBounded) {
  Initiator self(GetParam());
  auto transfer = self.start(soon());
  self.wait_until_moving(transfer);
  self.child.stop();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(self.engine.close(soon()).ok()) << "nobody else uses this engine's memory";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
}

TEST_P(EngineProcess, AStoppedPeerIsLostAfterItsSilence) {
  Initiator self(GetParam(), {.config = {{"control.silence", "1s"}}});
  self.child.stop();
  EXPECT_EQ(self.peer.region("never", soon()).code(), Code::kPeerLost);
  EXPECT_FALSE(self.peer.alive());
}

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
  using namespace crossdock::testing;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() >= 2 && arguments[0] == "--role=target") return run_target(arguments[1]);
  if (arguments.size() >= 3 && arguments[0] == "--role=source")
    return run_source(arguments[1], arguments[2]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
