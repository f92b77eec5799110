// Stores and networks that lose packets without a word: a host that is gone leaves no connection
// behind on either side, and a server that does not answer yet is tried until the caller's
// deadline. In a network namespace, with a second process as the other host:
//
//   here   a1 10.77.1.1 ──────── b1 10.77.1.2   there, in another network namespace
//          10.77.4.0/24 by b1, which throws it away
//
// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <gmock/gmock.h>
#include <optional>
#include <thread>

#include "base/child_process.hpp"
#include "rendezvous/store_server.hpp"
#include "rendezvous/tcp_store.hpp"
#include "support/network_namespace.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;
using base::ChildProcess;
using crossdock::testing::shell;

bool g_namespace = false;  // NOLINT: set once by main() before any test runs

Deadline soon() {
  return Deadline::in(20s);
}

// --- the other host ---

struct OtherHost {
  std::unique_ptr<StoreServer> server;
  std::thread waiter;

  std::string serve(std::istream& in) {
    StoreServerOptions options{.address = {"10.77.1.2", 0}};
    in >> options.address.port;
    server = StoreServer::create(options, soon()).value();
    return std::to_string(server->address().port());
  }
  std::string put(std::istream& in) const {
    std::string key;
    in >> key;
    const auto put = open_store(server->url(), soon()).value()->put(key, "v", {}, soon());
    return put.ok() ? "ok" : put.error().describe();
  }
  std::string wait(std::istream& in) {
    std::string url;
    in >> url;
    auto store = open_store(url, soon()).value();
    waiter = std::thread([store] { (void)store->wait("never", Deadline::in(1h)); });
    return "opened";
  }
};

int run_other_host() {
  OtherHost host;
  const int status = crossdock::testing::serve_other_end(
      {{"serve", [&](std::istream& in) { return host.serve(in); }},
       {"put", [&](std::istream& in) { return host.put(in); }},
       {"wait", [&](std::istream& in) { return host.wait(in); }},
       {"connections",
        [&](std::istream&) { return std::to_string(host.server->num_connections()); }}});
  ::_exit(status);  // whatever the waiter waits for
}

// Whether the other host has acknowledged all that was sent to it.
bool all_acknowledged() {
  std::ifstream lines("/proc/self/net/tcp");
  for (std::string line; std::getline(lines, line);) {
    const auto to_it = line.find(" 02014D0A:");  // 10.77.1.2
    if (to_it != std::string::npos && line.find(" 00000000:", to_it) == std::string::npos)
      return false;
  }
  return true;
}

class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!g_namespace)
      GTEST_SKIP() << "no network namespace here: `unshare -rn ip link add ... type veth` fails";
    plug_in();
  }
  void TearDown() override {
    if (g_namespace) lose_host();
  }
  void plug_in() {
    there_.emplace(std::vector<std::string>{"--role=other-host"});
    ASSERT_EQ(there_->hear(), "here");
    const std::string pid = std::to_string(there_->pid());
    ASSERT_TRUE(shell("ip link add a1 type veth peer name b1 netns " + pid));
    ASSERT_TRUE(shell("ip address add 10.77.1.1/24 dev a1 && ip link set a1 up"));
    ASSERT_EQ(ask("shell ip address add 10.77.1.2/24 dev b1 && ip link set b1 up"), "ok");
    ASSERT_EQ(ask("shell ip link set lo up"), "ok");
  }
  // As without power: none of its last packets comes.
  void lose_host() {
    (void)shell("ip link set a1 down");
    there_.reset();
    (void)shell("ip link delete a1 2>/dev/null");
  }
  std::string ask(const std::string& line) {
    there_->say(line);
    return there_->hear();
  }
  std::optional<ChildProcess> there_;
};

TEST_F(TwoHosts, AServerDropsTheWaitOfAHostThatIsGone) {
  StoreServerOptions options{.address = {"10.77.1.1", 0}};
  options.limits.silence = 1s;
  const auto server = StoreServer::create(options, soon()).value();
  ASSERT_EQ(ask("wait " + server->url()), "opened");
  ASSERT_EQ(server->num_connections(), 1U);
  ASSERT_TRUE(shell("ip link set a1 down"));
  const Deadline deadline = soon();
  while (server->num_connections() != 0 && !deadline.passed())
    std::this_thread::yield();
  EXPECT_EQ(server->num_connections(), 0U);
}

TEST_F(TwoHosts, AWaitGoesOnAtTheHostThatCameInPlaceOfTheOther) {
  const std::string port = ask("serve 0");
  const auto store = open_tcp_store("10.77.1.2:" + port, soon(), 1s).value();
  Result<Entry> entry = make_error(Code::kInternal, "did not wait");
  std::jthread waiter([&] { entry = store->wait("k", soon()); });
  // A second connection is made when the first one waits.
  const Deadline deadline = soon();
  while (ask("connections") == "1" && !deadline.passed())
    ASSERT_TRUE(store->get("x", soon()).ok());
  // Else a request sent again would meet the new host.
  while (!all_acknowledged() && !deadline.passed())
    std::this_thread::yield();
  lose_host();
  plug_in();
  ASSERT_EQ(ask("serve " + port), port);
  EXPECT_EQ(ask("put k"), "ok");
  waiter.join();
  EXPECT_TRUE(entry.ok()) << entry.error().describe();
}

// The kernel gives such a connect up after two minutes; here, after three seconds.
TEST_F(TwoHosts, AServerThatDoesNotAnswerYetIsTriedUntilTheDeadline) {
  ASSERT_TRUE(shell("echo 1 > /proc/sys/net/ipv4/tcp_syn_retries"));
  ASSERT_TRUE(shell("ip route add 10.77.4.0/24 via 10.77.1.2"));
  ASSERT_EQ(ask("shell ip route add blackhole 10.77.4.0/24"), "ok");
  const auto deadline = Deadline::in(6s);
  const auto open = [deadline](const char* url) {
    const auto store = open_store(url, deadline);
    ASSERT_FALSE(store.ok());
    EXPECT_TRUE(deadline.passed()) << store.error().describe();
    EXPECT_THAT(store.error().message, ::testing::HasSubstr("10.77.4.9:7000"));
  };
  std::jthread other([&] { open("http://10.77.4.9:7000/metadata"); });
  open("tcp://10.77.4.9:7000");
}

}  // namespace

int run(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--role=other-host") return run_other_host();
  g_namespace = crossdock::testing::enter_network_namespace(argv);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace crossdock::rendezvous

int main(int argc, char** argv) {
  return crossdock::rendezvous::run(argc, argv);
}
