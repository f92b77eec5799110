// SPDX-License-Identifier: Apache-2.0
#include "base/address.hpp"

#include <arpa/inet.h>
#include <chrono>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string>

#include "base/fd.hpp"

namespace crossdock::base {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

TEST(HostPort, ParsesEveryForm) {
  EXPECT_EQ(*parse_host_port("10.0.0.1:7000"), (HostPort{"10.0.0.1", 7000}));
  EXPECT_EQ(*parse_host_port("node7:1"), (HostPort{"node7", 1}));
  EXPECT_EQ(*parse_host_port("node7", 9), (HostPort{"node7", 9}));
  EXPECT_EQ(*parse_host_port("[2001:db8::1]:7000"), (HostPort{"2001:db8::1", 7000}));
  EXPECT_EQ(*parse_host_port("[::1]", 5), (HostPort{"::1", 5}));
  EXPECT_EQ(*parse_host_port("::1", 5), (HostPort{"::1", 5}));
  EXPECT_EQ(*parse_host_port("[fe80::1%lo]:65535"), (HostPort{"fe80::1%lo", 65535}));
}

struct BadAddress {
  const char* text;
  const char* says;
};
class HostPortRefuses : public testing::TestWithParam<BadAddress> {};

TEST_P(HostPortRefuses, WithASentence) {
  const auto result = parse_host_port(GetParam().text);
  ASSERT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr(GetParam().says));
  EXPECT_THAT(result.error().message, HasSubstr("write host:port"));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostPortRefuses,
    testing::Values(BadAddress{"", "is empty"}, BadAddress{":80", "has no host"},
                    BadAddress{"a:", "has port ''"}, BadAddress{"a:65536", "0 to 65535"},
                    BadAddress{"a:-1", "0 to 65535"}, BadAddress{"a:8x", "has port '8x'"},
                    BadAddress{"a:99999999999999999999", "0 to 65535"},
                    BadAddress{"a b:1", "space"}, BadAddress{"a\n:1", "control"},
                    BadAddress{"a:1:2", "several colons"}, BadAddress{"[::1:80", "bracket"},
                    BadAddress{"[::1]80", "between bracket and port"},
                    BadAddress{"[node]:80", "no IPv6 address"}, BadAddress{"[]:80", "no IPv6"}));

TEST(HostPort, FormatIsTheInverse) {
  for (const auto* text : {"10.0.0.1:7000", "node7:1", "[2001:db8::1]:7000"})
    EXPECT_EQ(to_string(*parse_host_port(text)), text);
}

TEST(Resolve, NumericHostsNeedNoNameService) {
  const auto v4 = resolve({"127.0.0.1", 80}, Deadline::now());
  ASSERT_TRUE(v4.ok()) << v4.error().describe();
  ASSERT_EQ(v4->size(), 1u);
  EXPECT_EQ(v4->front().to_string(), "127.0.0.1:80");
  EXPECT_TRUE(v4->front().is_loopback());
  const auto v6 = resolve({"::1", 80}, Deadline::now());
  ASSERT_TRUE(v6.ok());
  EXPECT_EQ(v6->front().to_string(), "[::1]:80");
  EXPECT_TRUE(v6->front().is_loopback());
  EXPECT_TRUE(resolve({"0.0.0.0", 1}, Deadline::now())->front().is_any());
  EXPECT_TRUE(resolve({"::", 1}, Deadline::now())->front().is_any());
}

TEST(Resolve, LocalhostIsLoopback) {
  const auto found = resolve({"localhost", 7}, Deadline::in(seconds(10)));
  ASSERT_TRUE(found.ok()) << found.error().describe();
  for (const auto& one : *found) {
    EXPECT_TRUE(one.is_loopback()) << one.to_string();
    EXPECT_EQ(one.port(), 7);
  }
}

TEST(Resolve, UnknownHostIsNamed) {
  const auto found = resolve({"no-such-host.invalid", 7}, Deadline::in(seconds(10)));
  ASSERT_FALSE(found.ok());
  EXPECT_THAT(found.error().message, HasSubstr("no-such-host.invalid"));
}

TEST(Resolve, NumericOnlyRefusesNames) {
  const auto found = resolve({"localhost", 7}, Deadline::now(), {.numeric_only = true});
  EXPECT_EQ(found.code(), Code::kNotFound);
}

TEST(Resolve, FamilyRestricts) {
  EXPECT_FALSE(resolve({"::1", 7}, Deadline::in(seconds(10)), {.family = AF_INET}).ok());
}

TEST(SocketAddress, ComparesFamilyHostAndPort) {
  auto a = resolve({"127.0.0.1", 80}, Deadline::now())->front();
  auto b = a;
  EXPECT_EQ(a, b);
  b.set_port(81);
  EXPECT_EQ(b.port(), 81);
  EXPECT_FALSE(a == b);
  EXPECT_FALSE(a == resolve({"::1", 80}, Deadline::now())->front());
}

TEST(SocketAddress, KeepsTheZoneOfLinkLocalAddresses) {
  sockaddr_in6 raw{};
  raw.sin6_family = AF_INET6;
  raw.sin6_port = htons(9);
  raw.sin6_scope_id = ::if_nametoindex("lo");
  ASSERT_EQ(::inet_pton(AF_INET6, "fe80::1", &raw.sin6_addr), 1);
  const SocketAddress address(reinterpret_cast<const sockaddr*>(&raw), sizeof raw);
  EXPECT_EQ(address.to_string(), "[fe80::1%lo]:9");
}

TEST(SocketNames, BothEndsAgree) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_TRUE(listener);
  const auto any = resolve({"127.0.0.1", 0}, Deadline::now())->front();
  ASSERT_EQ(::bind(listener.get(), any.get(), any.size()), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  const auto bound = local_address(listener.get());
  ASSERT_TRUE(bound.ok());
  EXPECT_NE(bound->port(), 0);
  UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(client.get(), bound->get(), bound->size()), 0);
  EXPECT_EQ(*peer_address(client.get()), *bound);
}

TEST(SocketNames, ErrorsNameTheDescriptor) {
  const auto name = local_address(-1);
  ASSERT_FALSE(name.ok());
  EXPECT_THAT(name.error().message, HasSubstr("descriptor -1"));
}

}  // namespace
}  // namespace crossdock::base
