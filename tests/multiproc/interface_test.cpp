// Engines and interfaces: an engine listens where it was told and nowhere else, an address that is
// not there or that peers cannot reach is an error that names it within the deadline, and a network
// that goes away ends transfers. The part that needs interfaces has a network namespace of its own,
// with a second process on the other side of two cables:
//
//   here   a1 10.77.1.1 ──────── b1 10.77.1.2   there, in another network namespace
//          a2 10.77.2.1 ──────── b2 10.77.2.2
//          no route              lo 10.77.3.2
//          10.77.4.0/24 by b1, which throws it away
//
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <thread>

#include "base/child_process.hpp"
#include "base/socket.hpp"
#include "support/engines.hpp"
#include "support/network_namespace.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using base::ChildProcess;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::size_t kBytes = 16u << 20;

bool g_namespace = false;  // NOLINT: set once by main() before any test runs

std::string port_of(const std::string& address) {
  return address.substr(address.rfind(':') + 1);
}
Result<> dial(const std::string& address) {
  auto fd = base::connect_tcp(base::parse_host_port(address).value(), Deadline::in(5s));
  if (!fd.ok()) return std::move(fd).error();
  return {};
}

// --- the other side ---

struct OtherSide {
  std::optional<Engine> engine;
  std::optional<Region> region;

  // "LISTEN [ADVERTISE [STORE NAME]]", "-" for none.
  std::string start(std::istream& in) {
    region.reset();
    engine.reset();
    EngineOptions options{.config = {{"transport.enabled", "tcp"}, {"log.level", "off"}}};
    std::string advertise = "-", store = "-";
    in >> options.listen >> advertise >> store >> options.name;
    if (advertise != "-") options.advertise = advertise;
    if (store != "-") options.store = store;
    auto made = Engine::create(std::move(options));
    if (!made.ok()) return made.error().describe();
    engine.emplace(std::move(made).value());
    region = engine->allocate(kBytes, {.label = "pool"}).value();
    return engine->address();
  }
  std::string open(std::istream& in) {
    std::string name;
    in >> name;
    const auto peer = engine->open(name, Deadline::in(5s));
    return peer.ok() ? "opened" : peer.error().describe();
  }
  // How many bytes of the region have this value. Threads of the engine write there when peers tell
  // them to, which nothing in this process orders with this.
  __attribute__((no_sanitize("thread"))) std::string count(std::istream& in) const {
    int value = 0;
    in >> value;
    const volatile std::byte* const memory = bytes_of(*region);
    std::size_t found = 0;
    for (std::size_t i = 0; i < kBytes; ++i)
      found += memory[i] == static_cast<std::byte>(value) ? 1u : 0u;
    return std::to_string(found);
  }
};

int run_other_side() {
  OtherSide side;
  return serve_other_end({{"start", [&](std::istream& in) { return side.start(in); }},
                          {"open", [&](std::istream& in) { return side.open(in); }},
                          {"count", [&](std::istream& in) { return side.count(in); }}});
}

// --- what needs no namespace ---

TEST(Interface, AnEngineListensOnItsAddressAlone) {
  auto target = make_engine("tcp", {.listen = "127.0.0.2:0"});
  ASSERT_THAT(target.address(), StartsWith("127.0.0.2:"));
  EXPECT_EQ(dial("127.0.0.1:" + port_of(target.address())).code(), Code::kUnreachable);
  std::vector<std::byte> memory(8192);
  auto region = target.register_memory(memory.data(), 4096).value();
  auto source = make_engine("tcp", {.listen = "127.0.0.3:0"});
  auto local = source.register_memory(memory.data() + 4096, 4096).value();
  auto peer = source.open(target.name(), soon()).value();
  const Request request{Op::kWrite, memory.data() + 4096, address_of(region), 4096};
  ASSERT_TRUE(source.transfer(peer, std::span(&request, 1), {.deadline = soon()}).ok());
  EXPECT_THAT(listening_sockets(::getpid()),
              ::testing::UnorderedElementsAre(target.address(), source.address()))
      << "also with data on its way";
}

TEST(Interface, AnAddressThatIsNotHereIsNamed) {
  for (const std::string listen :
       {"192.0.2.1:7000", "[2001:db8::1]:7000", "no-such-interface0:0"}) {
    const auto engine =
        Engine::create({.listen = listen, .config = {{"control.connect_timeout", "2s"}}});
    ASSERT_FALSE(engine.ok());
    EXPECT_THAT(engine.error().message, HasSubstr(listen.substr(0, listen.rfind(':'))));
  }
  EXPECT_THAT(listening_sockets(::getpid()), ElementsAre());
}

TEST(Interface, AnAdvertisedAddressThatNobodyCanDialIsRefused) {
  for (const std::string advertise :
       {"10.0.0.1:http", "10.0.0.1:70000", ":7000", "::1:x", "a b", "0.0.0.0:7000", "[::]:7000"}) {
    const auto engine = Engine::create({.listen = "127.0.0.1:0", .advertise = advertise});
    ASSERT_EQ(engine.code(), Code::kInvalidArgument) << advertise;
    EXPECT_THAT(engine.error().message, HasSubstr("`advertise` must be"));
    EXPECT_THAT(engine.error().message, HasSubstr(advertise));
  }
}

// Who lets the system choose the port could not name it.
TEST(Interface, AnAdvertisedHostHasThePortThatIsListenedOn) {
  for (const std::string advertise : {"localhost", "localhost:0"}) {
    auto target = make_engine("tcp", {.listen = "127.0.0.1:0", .advertise = advertise});
    EXPECT_THAT(target.address(), StartsWith("localhost:"));
    EXPECT_THAT(listening_sockets(::getpid()),
                ElementsAre("127.0.0.1:" + port_of(target.address())));
    EXPECT_TRUE(make_engine("tcp").open(target.name(), soon()).ok());
  }
}

TEST(Interface, APeerOnAnotherAddressIsUnreachableByName) {
  const support::TempDir dir;
  const std::string store = "file://" + dir.path();
  auto listening = make_engine("tcp", {.listen = "127.0.0.2:0"});
  const std::string wrong = "127.0.0.1:" + port_of(listening.address());
  auto target = make_engine("tcp", {.name = "decode", .advertise = wrong, .store = store});
  auto source = make_engine("tcp", {.store = store});
  const auto peer = source.open("decode", Deadline::in(5s));
  ASSERT_EQ(peer.code(), Code::kUnreachable);
  EXPECT_THAT(peer.error().message, HasSubstr("decode"));
  EXPECT_THAT(peer.error().message, HasSubstr(wrong));
}

// --- two hosts, two cables ---

class Cables : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!g_namespace)
      GTEST_SKIP() << "no network namespace here: `unshare -rn ip link add ... type veth` fails";
    there_.emplace(std::vector<std::string>{"--role=other-side"});
    ASSERT_EQ(there_->hear(), "here");
    const std::string pid = std::to_string(there_->pid());
    for (const std::string n : {"1", "2"}) {
      ASSERT_TRUE(shell("ip link add a" + n + " type veth peer name b" + n + " netns " + pid));
      ASSERT_TRUE(shell("ip address add 10.77." + n + ".1/24 dev a" + n));
      ASSERT_TRUE(shell("ip link set a" + n + " up"));
      ASSERT_EQ(ask("shell ip address add 10.77." + n + ".2/24 dev b" + n), "ok");
      ASSERT_EQ(ask("shell ip link set b" + n + " up"), "ok");
    }
    ASSERT_EQ(ask("shell ip link set lo up && ip address add 10.77.3.2/32 dev lo"), "ok");
    ASSERT_EQ(ask("shell ip route add blackhole 10.77.4.0/24"), "ok");
    ASSERT_TRUE(shell("ip route add 10.77.4.0/24 via 10.77.1.2"));
  }
  void TearDown() override {
    there_.reset();
    if (g_namespace) (void)shell("ip link delete a1 2>/dev/null; ip link delete a2 2>/dev/null");
  }
  std::string ask(const std::string& line) {
    there_->say(line);
    return there_->hear();
  }
  std::optional<ChildProcess> there_;
};

TEST_F(Cables, AnEngineBoundToOneIsNotOnTheOther) {
  const std::string address = ask("start 10.77.1.2:0");
  ASSERT_THAT(address, StartsWith("10.77.1.2:"));
  EXPECT_TRUE(dial(address).ok());
  for (const std::string other : {"10.77.2.2:", "10.77.3.2:"})
    EXPECT_EQ(dial(other + port_of(address)).code(), Code::kUnreachable) << other;
  EXPECT_THAT(listening_sockets(there_->pid()), ElementsAre(address));
  auto engine = make_engine("tcp", {.listen = "10.77.2.1:0"});
  auto region = engine.allocate(kBytes).value();
  auto peer = engine.open(address, soon()).value();
  const auto pool = peer.region("pool", soon()).value();
  const Request request{Op::kWrite, region.address(), pool.address, kBytes};
  EXPECT_TRUE(engine.transfer(peer, std::span(&request, 1), {.deadline = soon()}).ok());
  EXPECT_THAT(listening_sockets(there_->pid()), ElementsAre(address));
}

// The address on the way out, whichever cable that is.
TEST_F(Cables, AnEngineOnEveryInterfaceTellsTheOneOnTheWayOut) {
  ASSERT_THAT(ask("start 10.77.1.2:0"), StartsWith("10.77.1.2:"));
  for (const std::string n : {"1", "2"}) {
    ASSERT_TRUE(shell("ip route replace default via 10.77." + n + ".2"));
    auto engine = make_engine("tcp", {.listen = "0.0.0.0:0"});
    EXPECT_THAT(engine.address(), StartsWith("10.77." + n + ".1:"));
    EXPECT_EQ(ask("open " + engine.name()), "opened");
  }
  ASSERT_TRUE(shell("ip route delete default"));
}

TEST_F(Cables, AnAddressWithoutARouteOrAnAnswerIsNamedInTime) {
  auto engine = make_engine("tcp", {.listen = "10.77.1.1:0"});
  for (const std::string address : {"10.77.3.2:7000", "10.77.4.9:7000"}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto peer = engine.open(address, Deadline::in(700ms));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s) << address;
    ASSERT_THAT(peer.code(), AnyOf(Code::kUnreachable, Code::kDeadline)) << address;
    EXPECT_THAT(peer.error().message, HasSubstr(address));
  }
}

TEST_F(Cables, APeerThatPublishesTheWrongInterfaceIsUnreachableByName) {
  const support::TempDir dir;
  const std::string store = "file://" + dir.path();
  auto engine = make_engine("tcp", {.listen = "10.77.1.1:0", .store = store});
  for (const std::string wrong : {"10.77.3.2:7000", "10.77.4.9:7000"}) {
    ASSERT_THAT(ask("start 10.77.1.2:0 " + wrong + " " + store + " decode-1"), wrong);
    const auto begin = std::chrono::steady_clock::now();
    const auto peer = engine.open("decode-1", Deadline::in(700ms));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s) << wrong;
    ASSERT_THAT(peer.code(), AnyOf(Code::kUnreachable, Code::kDeadline)) << wrong;
    EXPECT_THAT(peer.error().message, HasSubstr("decode-1"));
    EXPECT_THAT(peer.error().message, HasSubstr(wrong));
  }
  ASSERT_THAT(ask("start 10.77.1.2:0 - " + store + " decode-1"), StartsWith("10.77.1.2:"));
  const auto peer = engine.open("decode-1", soon());
  EXPECT_TRUE(peer.ok()) << peer.error().describe();
}

// No packet tells either side, unlike when a process dies.
TEST_F(Cables, ACutCableEndsTransfersAndAMendedOneCarriesThem) {
  const std::string address = ask("start 10.77.1.2:0");
  auto engine = make_engine("tcp", {.listen = "10.77.1.1:0"});
  auto region = engine.allocate(kBytes).value();
  auto peer = engine.open(address, soon()).value();
  const auto pool = peer.region("pool", soon()).value();
  const std::vector<Request> batch(64, Request{Op::kWrite, region.address(), pool.address, kBytes});
  std::memset(region.address(), 1, kBytes);
  auto transfer = engine.submit(peer, batch, {.deadline = Deadline::in(1s)}).value();
  while (transfer.status().bytes_done == 0 && !transfer::is_terminal(transfer.status().state))
    std::this_thread::yield();
  ASSERT_TRUE(shell("ip link set a1 down"));
  const auto begin = std::chrono::steady_clock::now();
  const auto result = transfer.wait(Deadline::in(10s));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
  EXPECT_EQ(result.code(), Code::kDeadline) << "it had 1 GiB to move";
  std::memset(region.address(), 2, kBytes);
  ASSERT_TRUE(shell("ip link set a1 up"));
  EXPECT_EQ(ask("count 2"), "0") << "what came after the end of the transfer";
  const auto until = soon();
  Result<> again;
  do
    again = engine.transfer(peer, std::span(batch).first(1), {.deadline = until});
  while (!again.ok() && again.error().retry == Retry::kLater && !until.passed());
  EXPECT_TRUE(again.ok()) << again.error().describe();
  EXPECT_EQ(ask("count 2"), std::to_string(kBytes));
}

TEST_F(Cables, ASilentNetworkIsALostPeer) {
  const std::string address = ask("start 10.77.1.2:0");
  auto engine =
      make_engine("tcp", {.listen = "10.77.1.1:0", .config = {{"control.silence", "1s"}}});
  auto peer = engine.open(address, soon()).value();
  ASSERT_EQ(ask("shell ip link set b1 down"), "ok");
  EXPECT_EQ(peer.region("never", Deadline::in(10s)).code(), Code::kPeerLost);
  EXPECT_FALSE(peer.alive());
}

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
  using namespace crossdock::testing;
  if (argc == 2 && std::string(argv[1]) == "--role=other-side") return run_other_side();
  g_namespace = enter_network_namespace(argv);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
