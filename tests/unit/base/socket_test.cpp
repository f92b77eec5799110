// SPDX-License-Identifier: Apache-2.0
#include "base/socket.hpp"

#include <array>
#include <csignal>
#include <cstring>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace crossdock::base {
namespace {

using namespace std::chrono_literals;

struct Pair {
  Listener listener;
  UniqueFd client;
  UniqueFd server;
};

Listener listen_any(const std::string& host = "127.0.0.1") {
  return listen_tcp(HostPort{host, 0}, Deadline::in(2s)).value();
}

UniqueFd accept_within(const Listener& listener, Deadline deadline) {
  while (wait_ready(listener.fd.get(), POLLIN, deadline).value()) {
    Result<std::optional<UniqueFd>> fd = accept_tcp(listener.fd.get());
    if (fd.ok() && fd->has_value()) return UniqueFd(fd->value().release());
  }
  return {};
}

Pair connected_pair(const std::string& host = "127.0.0.1") {
  Pair pair{.listener = listen_any(host), .client = {}, .server = {}};
  pair.client = connect_tcp(pair.listener.address, Deadline::in(2s)).value();
  pair.server = accept_within(pair.listener, Deadline::in(2s));
  return pair;
}

bool has_ipv6() {
  return listen_tcp(HostPort{"::1", 0}, Deadline::in(1s)).ok();
}

TEST(Socket, CarriesBytesBothWays) {
  Pair pair = connected_pair();
  std::vector<std::byte> sent(3 << 20);
  for (std::size_t i = 0; i < sent.size(); ++i)
    sent[i] = static_cast<std::byte>(i * 31 >> 3);
  std::vector<std::byte> got(sent.size());
  std::jthread sender(
      [&] { EXPECT_TRUE(send_all(pair.client.get(), sent, Deadline::in(10s)).ok()); });
  ASSERT_TRUE(recv_exact(pair.server.get(), got, Deadline::in(10s)).ok());
  EXPECT_EQ(std::memcmp(sent.data(), got.data(), got.size()), 0);
}

TEST(Socket, Ipv6ListensAndConnectsByText) {
  if (!has_ipv6()) GTEST_SKIP() << "this machine has no IPv6 loopback";
  const Listener listener = listen_any("::1");
  const HostPort target = parse_host_port(listener.address.to_string()).value();
  EXPECT_TRUE(connect_tcp(target, Deadline::in(2s)).ok());
}

TEST(Socket, EphemeralPortsAreNotSharedAndBusyPortsAreNamed) {
  const Listener first = listen_any();
  const auto second = listen_tcp(first.address);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.code(), Code::kBusy);
  EXPECT_NE(second.error().message.find(first.address.to_string()), std::string::npos);
}

TEST(Socket, AnAddressOfAnotherMachineIsRefusedByName) {
  const auto listener = listen_tcp(HostPort{"192.0.2.1", 0}, Deadline::in(2s));
  ASSERT_FALSE(listener.ok());
  EXPECT_NE(listener.error().message.find("192.0.2.1"), std::string::npos);
}

TEST(Socket, TheWayOutIsAnAddressOfThisMachine) {
  const auto address = outgoing_address(AF_INET);
  if (!address.ok()) GTEST_SKIP() << "no route: " << address.error().message;
  EXPECT_EQ(address->family(), AF_INET);
  EXPECT_EQ(address->port(), 0);
  EXPECT_FALSE(address->is_any());
  EXPECT_TRUE(listen_tcp(*address).ok()) << address->host();
}

TEST(Socket, ConnectToAClosedPortIsUnreachable) {
  SocketAddress address;
  {
    const Listener listener = listen_any();
    address = listener.address;
  }
  const auto fd = connect_tcp(address, Deadline::in(2s));
  ASSERT_FALSE(fd.ok());
  EXPECT_EQ(fd.code(), Code::kUnreachable);
  EXPECT_NE(fd.error().message.find(address.to_string()), std::string::npos);
}

TEST(Socket, ConnectKeepsItsDeadlineWhenNobodyAccepts) {
  // A full accept queue drops further SYNs: the connect stays in progress.
  const Listener listener =
      listen_tcp(resolve(HostPort{"127.0.0.1", 0}, Deadline::in(1s)).value().front(), 0).value();
  std::vector<UniqueFd> fillers;
  const auto start = Deadline::Clock::now();
  Result<UniqueFd> last = connect_tcp(listener.address, Deadline::in(200ms));
  for (int i = 0; i < 8 && last.ok(); ++i) {
    fillers.push_back(std::move(last).value());
    last = connect_tcp(listener.address, Deadline::in(200ms));
  }
  ASSERT_FALSE(last.ok()) << "the accept queue never filled";
  EXPECT_EQ(last.code(), Code::kDeadline);
  EXPECT_LT(Deadline::Clock::now() - start, 5s);
}

TEST(Socket, ReceiveKeepsItsDeadlineAndSaysHowMuchCame) {
  Pair pair = connected_pair();
  ASSERT_TRUE(
      send_all(pair.client.get(), std::as_bytes(std::span("abc", 3)), Deadline::in(1s)).ok());
  std::array<std::byte, 8> out;
  const auto result = recv_exact(pair.server.get(), out, Deadline::in(50ms));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.code(), Code::kDeadline);
  EXPECT_NE(result.error().message.find("3 of 8"), std::string::npos);
}

TEST(Socket, SendKeepsItsDeadlineWhenThePeerDoesNotRead) {
  Pair pair = connected_pair();
  const std::vector<std::byte> big(64 << 20);
  EXPECT_EQ(send_all(pair.client.get(), big, Deadline::in(100ms)).code(), Code::kDeadline);
}

TEST(Socket, PeerThatClosesIsLostAndNoSignalIsRaised) {
  Pair pair = connected_pair();
  pair.server.reset();
  std::array<std::byte, 8> out;
  EXPECT_EQ(recv_exact(pair.client.get(), out, Deadline::in(2s)).code(), Code::kPeerLost);
  EXPECT_EQ(recv_some(pair.client.get(), out, Deadline::in(2s)).value(), 0u);
  const std::vector<std::byte> chunk(1 << 20);
  Result<> sent;
  for (int i = 0; i < 100 && sent.ok(); ++i)
    sent = send_all(pair.client.get(), chunk, Deadline::in(2s));
  EXPECT_EQ(sent.code(), Code::kPeerLost);
}

TEST(Socket, RunningOutOfDescriptorsIsAnErrorNotACrash) {
  const Listener listener = listen_any();
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto fd = connect_tcp(listener.address, Deadline::in(1s));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(fd.code(), Code::kNoMemory);
}

TEST(Socket, AcceptWithoutAConnectionReturnsNothing) {
  const Listener listener = listen_any();
  EXPECT_FALSE(accept_tcp(listener.fd.get()).value().has_value());
}

TEST(Socket, AnInterruptCutsEveryWaitShort) {
  const UniqueFd interrupt(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Pair pair = connected_pair();
  std::array<std::byte, 8> out;
  const auto never = Deadline::in(10min);
  EXPECT_EQ(recv_some(pair.client.get(), out, Deadline::in(10ms), interrupt.get()).code(),
            Code::kDeadline)
      << "not before it is raised";
  std::thread owner([&] {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(interrupt.get(), &one, sizeof one), 8);
  });
  EXPECT_EQ(recv_some(pair.client.get(), out, never, interrupt.get()).code(), Code::kClosed);
  owner.join();
  EXPECT_EQ(wait_ready(pair.client.get(), POLLIN, never, interrupt.get()).code(), Code::kClosed);
  const std::vector<std::byte> much(64 << 20);
  EXPECT_EQ(send_all(pair.client.get(), much, never, interrupt.get()).code(), Code::kClosed);
  // A listener whose backlog is full does not answer.
  const Listener full = listen_tcp(HostPort{"127.0.0.1", 0}, Deadline::in(2s), 0).value();
  std::vector<UniqueFd> queued;
  Result<UniqueFd> last = make_error(Code::kInternal, "not tried");
  for (int i = 0; i < 8; ++i) {
    last = connect_tcp(full.address, never, nullptr, interrupt.get());
    if (!last.ok()) break;
    queued.push_back(std::move(*last));
  }
  EXPECT_EQ(last.code(), Code::kClosed);
}

}  // namespace
}  // namespace crossdock::base
