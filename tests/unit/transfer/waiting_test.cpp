// Calls that wait: for the control thread, which they must not do on it; for transfers that are
// stuck; for another thread; and what the control thread itself wakes up for.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <fstream>
#include <future>
#include <thread>

#include "support/engines.hpp"
#include "support/process_use.hpp"
#include "support/raw_client.hpp"
#include "support/raw_server.hpp"

namespace crossdock::testing {
namespace {

using transfer::Message;

TEST(Waiting, TheControlThreadIsNotToWaitForItself) {
  Pair pair("tcp", 4096, false, {.config = {{"log.level", "error"}}});
  auto spare = pair.source.allocate(4096).value();
  auto inbox = pair.source.mailbox("inbox").value();
  auto other = pair.source.mailbox("other").value();
  std::promise<std::vector<Code>> codes;
  const auto listening = inbox.on_message([&](const Message& message) {
    if (message.payload != "go") return;
    // Its notification waits for an answer that this thread would read.
    auto sent =
        pair.source.submit(pair.peer, {}, {.deadline = soon(), .notification = {{"m", "x"}}});
    codes.set_value({sent.code(), sent->wait(soon()).code(),
                     pair.source.notify(pair.peer, {"m", "x"}, soon()).code(),
                     pair.run({pair.write(0, 64)}).code(), spare.release(soon()).code(),
                     pair.source.fence_instance(1, soon()).code(),
                     pair.source.fence("nobody", soon()).code(),
                     pair.peer.region("not there", soon()).code(), other.receive(soon()).code()});
  });
  auto back = pair.target.open(pair.source.name(), soon()).value();
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(pair.target.notify(back, {"inbox", "go"}, Deadline::in(100s)).ok());
  const auto seen = codes.get_future().get();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  EXPECT_EQ(seen.front(), Code::kOk) << "it may submit";
  for (std::size_t i = 1; i < seen.size(); ++i)
    EXPECT_EQ(seen[i], Code::kInvalidArgument) << i;
}

// Nobody judges deadlines while a handler blocks: the call returns all the same, and says that the
// transfer goes on.
TEST(Waiting, ATransferThatIsStuckIsSaidToGoOn) {
  std::vector<std::byte> memory(64);
  RawServer server;  // never acknowledges a write
  auto source =
      make_engine("tcp", {.config = {{"transfer.quiesce_grace", "1ms"}, {"log.level", "error"}}});
  auto local = source.register_memory(memory.data(), memory.size()).value();
  auto peer = source.open(server.name(), soon()).value();
  std::promise<void> blocked, go_on;
  auto inbox = source.mailbox("inbox").value();
  const auto listening = inbox
                             .on_message([&, gate = go_on.get_future().share()](const Message& m) {
                               if (m.payload != "block") return;
                               blocked.set_value();
                               gate.wait();
                             })
                             .value();
  auto other = make_engine("tcp");
  auto back = other.open(source.name(), soon()).value();
  auto knock =
      other.submit(back, {}, {.deadline = soon(), .notification = {{"inbox", "block"}}}).value();
  blocked.get_future().wait();
  const auto write = RawServer::write_from(memory.data(), memory.size());
  const auto stuck = source.transfer(peer, std::span(&write, 1), {.deadline = Deadline::in(50ms)});
  EXPECT_EQ(stuck.code(), Code::kDeadline);
  EXPECT_EQ(stuck.error().scope, Scope::kCall);
  EXPECT_NE(stuck.error().message.find("pending()"), std::string::npos) << stuck.error().message;
  EXPECT_EQ(source.pending().size(), 1u);
  go_on.set_value();
  EXPECT_TRUE(knock.wait(soon()).ok());
  for (const auto patience = soon(); !source.pending().empty() && !patience.passed();)
    std::this_thread::yield();
  EXPECT_TRUE(source.pending().empty());
}

TEST(Waiting, WhoClosesWhileAnotherDoesKeepsItsDeadline) {
  auto target = make_engine("shm");
  RawClient slow(target, "slow", 7, true);
  std::thread closing([&] { EXPECT_TRUE(target.close(soon()).ok()); });
  const auto asked = slow.receive<wire::Revoke>();
  EXPECT_TRUE(asked);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(target.close(Deadline::in(50ms)).code(), Code::kDeadline);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  if (asked) slow.send(wire::RevokeAck{.token = asked->token});
  closing.join();
  EXPECT_TRUE(target.close(soon()).ok());
}

// How often the threads of that name went to sleep.
std::uint64_t sleeps_of(const std::string& name) {
  std::uint64_t sum = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream comm(task.path() / "comm"), status(task.path() / "status");
    std::string line;
    if (!std::getline(comm, line) || line != name) continue;
    unsigned long long times = 0;
    while (std::getline(status, line))
      if (std::sscanf(line.c_str(), "voluntary_ctxt_switches: %llu", &times) == 1) sum += times;
  }
  return sum;
}

// Each short transfer has its deadline judged earlier than the long one is looked at.
TEST(Waiting, ShortTransfersLeaveNoTimersBehind) {
  Pair pair("tcp", 4096, false,
            {.config = {{"transport.enabled", "faulty+tcp"},
                        {"transport.faulty.delay_max", "1min"},
                        {"log.level", "error"}}});
  const auto write = pair.write(0, 64);
  const auto submit = [&] {
    return pair.source
        .submit(pair.peer, std::span(&write, 1),
                {.deadline = Deadline::in(10min), .stall_timeout = 8s})
        .value();
  };
  // One of them is left at the end; by chance it is not the same.
  std::array<Transfer, 4> patient{submit(), submit(), submit(), submit()};
  for (int i = 0; i < 300; ++i)
    (void)pair.run({write}, {.deadline = Deadline::in(2ms)});
  const auto before = sleeps_of("xd-control");
  // They are looked at once in two seconds.
  const auto until = Deadline::in(2500ms);
  bool left = false;
  for (auto& transfer : patient)
    left = transfer.wait(until).code() == Code::kDeadline || left;
  EXPECT_TRUE(left);
  EXPECT_LT(sleeps_of("xd-control") - before, 50u);
}

}  // namespace
}  // namespace crossdock::testing
