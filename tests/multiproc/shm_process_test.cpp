// shm between real processes: faults of the peer (kill -9, SIGSTOP, unmapping), and the proof of
// identity. The peer is this same binary in a helper mode, started by fork and exec before any
// thread; it serves one command a line on its standard input and answers on its standard output.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/peer_helper.hpp"
#include "support/process_use.hpp"
#include "support/transport_fixture.hpp"
#include "transport/shm/identity.hpp"
#include "transport/shm/transport.hpp"

namespace crossdock::testing {
namespace {

using std::chrono::seconds;
using transport::RemoteRegion;
using transport::shm::CopyMode;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// An engine's worth of shm transport in this process.
struct Initiator {
  explicit Initiator(CopyMode copy = CopyMode::kAuto) {
    context.host = own_identity();
    context.instance = 1;
    context.regions = &regions;
    transport = transport::make_shm(context, {.copy = copy}).value();
  }
  std::unique_ptr<Endpoint> connect(const PeerProcessHelper& peer) {
    auto endpoint = transport->connect(peer.info(), 0, Deadline::in(seconds(5)));
    EXPECT_TRUE(endpoint.ok()) << (endpoint.ok() ? "" : endpoint.error().describe());
    return endpoint.ok() ? std::move(*endpoint) : nullptr;
  }
  mem::RegionTable regions;
  transport::TransportContext context;
  std::unique_ptr<Transport> transport;
};

void attach(Endpoint& endpoint, RemoteRegion& region) {
  const auto attached = endpoint.attach(region);
  ASSERT_TRUE(attached.ok()) << attached.error().describe();
  region.attached[0] = *attached;
}

std::optional<Error> run(Endpoint& endpoint, TestSink& sink, TestShard& shard) {
  if (auto posted = endpoint.post(shard.ready()); !posted.ok()) return posted.error();
  EXPECT_TRUE(sink.wait(shard.shard));
  return sink.outcome(shard.shard).error;
}

// Region kinds: memory that is mapped, and memory that only process_vm calls reach.
class ShmProcess : public ::testing::TestWithParam<bool> {
 protected:
  [[nodiscard]] bool mapped() const { return GetParam(); }
};

TEST_P(ShmProcess, MovesBytesBothWays) {
  PeerProcessHelper peer;
  Initiator self;
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(8 * kMiB, mapped());
  attach(*endpoint, *region);
  EXPECT_EQ(region->attached[0]->mode, mapped() ? transport::shm::kMapped : transport::shm::kVm);
  std::vector<std::byte> local(8 * kMiB);
  fill_pattern(local, 4);
  TestSink sink;
  TestShard write(Op::kWrite, sink);
  write.add(local.data(), region->address, local.size(), *region);
  const auto failure = run(*endpoint, sink, write);
  ASSERT_FALSE(failure) << failure->describe();
  EXPECT_TRUE(peer.region_matches(*region, 4)) << "judged by the peer itself";
  peer.fill_region(*region, 5);
  TestShard read(Op::kRead, sink);
  read.add(local.data(), region->address, local.size(), *region);
  ASSERT_FALSE(run(*endpoint, sink, read));
  EXPECT_TRUE(matches_pattern(local, 5));
}

TEST_P(ShmProcess, KilledPeerFailsTheShardsAndNothingLeaks) {
  const std::size_t descriptors = open_descriptors();
  const std::size_t mappings = mappings_of("/memfd:crossdock");
  {
    PeerProcessHelper peer;
    Initiator self;
    const auto endpoint = self.connect(peer);
    ASSERT_NE(endpoint, nullptr);
    const auto region = peer.make_region(16 * kMiB, mapped());
    attach(*endpoint, *region);
    std::vector<std::byte> local(16 * kMiB);
    TestSink sink;
    std::atomic<bool> killed{false};
    sink.on_progress = [&](Shard&) {
      if (!killed.exchange(true)) peer.kill();
    };
    std::vector<std::unique_ptr<TestShard>> shards;
    for (int i = 0; i < 6; ++i) {
      shards.push_back(std::make_unique<TestShard>(Op::kWrite, sink));
      shards.back()->add(local.data(), region->address, local.size(), *region);
      ASSERT_TRUE(endpoint->post(shards.back()->ready()).ok());
    }
    ASSERT_TRUE(sink.wait_all());
    for (const auto& shard : shards) {
      const auto outcome = sink.outcome(shard->shard);
      ASSERT_TRUE(outcome.error);
      EXPECT_EQ(outcome.error->code, Code::kPeerLost) << outcome.error->describe();
      EXPECT_EQ(outcome.error->retry, Retry::kAfterReconnect);
    }
    TestShard small(Op::kWrite, sink);
    small.add(local.data(), region->address, 64, *region);
    const auto late = run(*endpoint, sink, small);
    ASSERT_TRUE(late);
    EXPECT_EQ(late->code, Code::kPeerLost);
    EXPECT_EQ(self.transport->reaches(peer.info()).code(), Code::kPeerLost);
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(mappings_of("/memfd:crossdock"), mappings);
}

TEST_P(ShmProcess, StoppedPeerStillGetsItsBytes) {
  PeerProcessHelper peer;
  Initiator self;
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(4 * kMiB, mapped());
  attach(*endpoint, *region);
  peer.stop();
  std::vector<std::byte> local(4 * kMiB);
  fill_pattern(local, 6);
  TestSink sink;
  TestShard write(Op::kWrite, sink);
  write.add(local.data(), region->address, local.size(), *region);
  EXPECT_FALSE(run(*endpoint, sink, write));
  peer.resume();
  EXPECT_TRUE(peer.region_matches(*region, 6));
}

// The initiator dies or stops in the middle: the owner's memory holds a prefix of whole words, and
// the owner goes on. The helper plays the initiator, this process the owner.
TEST_P(ShmProcess, OwnerSurvivesAKilledInitiator) {
  PeerProcessHelper initiator;
  Initiator owner;
  const TestMemory there(32 * kMiB, mapped());
  const mem::NewRegion range{there.data(), there.size(), there.backing()};
  const auto record = owner.regions.add(std::span(&range, 1), {}).value()[0];
  initiator.write_forever(owner.context.host, owner.transport->local_address(), *record,
                          owner.transport->export_region(*record));
  // Until the first of its bytes (0x5A everywhere) are seen in the last page.
  const volatile std::byte* const last = there.data() + there.size() - 1;
  const Deadline end = Deadline::in(seconds(20));
  while (*last != std::byte{0x5A} && !end.passed())
    ::sched_yield();
  ASSERT_TRUE(*last == std::byte{0x5A});
  initiator.stop();
  initiator.wait_until_stopped();
  std::ranges::fill(there.bytes(), std::byte{1});
  EXPECT_TRUE(std::ranges::all_of(there.bytes(), [](std::byte b) { return b == std::byte{1}; }))
      << "a stopped process wrote";
  initiator.kill();  // reaped: its death is the proof that it will not write
  std::ranges::fill(there.bytes(), std::byte{2});
  EXPECT_TRUE(std::ranges::all_of(there.bytes(), [](std::byte b) { return b == std::byte{2}; }));
  EXPECT_TRUE(there.guards_intact());
}

TEST(ShmIdentity, AnotherProcessIsRefused) {
  PeerProcessHelper peer;
  PeerProcessHelper other;
  Initiator self;
  ASSERT_TRUE(self.transport->reaches(peer.info()).ok());
  auto info = peer.info();
  // The PID and start time of a process that does not hold the token.
  info.host = other.info().host;
  const auto refused = self.transport->reaches(info);
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(refused.code() == Code::kDenied || refused.code() == Code::kUnreachable)
      << refused.error().describe();
  // The right PID with the wrong start time: it was reused.
  info = peer.info();
  ++info.host.start_time;
  EXPECT_EQ(self.transport->reaches(info).code(), Code::kPeerLost);
  // Nobody.
  info = peer.info();
  info.host.pid = 0x3FFFFFFF;
  EXPECT_FALSE(self.transport->reaches(info).ok());
}

TEST(ShmIdentity, AnotherHostOrNamespaceIsUnreachable) {
  PeerProcessHelper peer;
  Initiator self;
  auto info = peer.info();
  info.host.boot_id = "other";
  EXPECT_EQ(self.transport->reaches(info).code(), Code::kUnreachable);
  info = peer.info();
  ++info.host.pid_namespace;
  const auto container = self.transport->reaches(info);
  EXPECT_EQ(container.code(), Code::kUnreachable);
  EXPECT_NE(container.error().message.find("container"), std::string::npos);
}

TEST(ShmIdentity, AWrongTokenIsRefused) {
  PeerProcessHelper peer;
  Initiator self;
  auto info = peer.info();
  info.address.back() = static_cast<char>(info.address.back() ^ 1);
  const auto refused = self.transport->reaches(info);
  ASSERT_EQ(refused.code(), Code::kUnreachable);
  EXPECT_NE(refused.error().message.find("token"), std::string::npos);
}

TEST(ShmIdentity, GarbageAddressesAreErrors) {
  PeerProcessHelper peer;
  Initiator self;
  auto info = peer.info();
  const std::string good = info.address;
  for (std::size_t n = 0; n < good.size(); ++n) {
    info.address = good.substr(0, n);
    EXPECT_FALSE(self.transport->reaches(info).ok()) << n;
  }
  info.address = good + "x";
  EXPECT_FALSE(self.transport->reaches(info).ok());
  info.address = good;
  info.address[0] = 9;
  EXPECT_EQ(self.transport->reaches(info).code(), Code::kIncompatible);
}

TEST(ShmRegions, AClosedMemfdIsRefused) {
  PeerProcessHelper peer;
  Initiator self(CopyMode::kMap);
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(kMiB, true);
  peer.close_memfd(*region);
  const auto refused = endpoint->attach(*region);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.code(), Code::kDenied) << refused.error().describe();
}

TEST(ShmRegions, AKeyThatPromisesTooMuchIsRefused) {
  PeerProcessHelper peer;
  Initiator self(CopyMode::kMap);
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(kMiB, true);
  region->length = 64 * kMiB;
  const auto refused = endpoint->attach(*region);
  EXPECT_EQ(refused.code(), Code::kDenied);
  region->keys[0].second.resize(5);
  EXPECT_FALSE(endpoint->attach(*region).ok());
}

// Its mapping is known by the id: bytes for the other would go to addresses of this process.
TEST(ShmRegions, AnotherRegionOfTheSameIdIsRefused) {
  PeerProcessHelper peer;
  Initiator self(CopyMode::kMap);
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(kMiB, true);
  attach(*endpoint, *region);
  const auto refused_as = [&](const std::function<void(RemoteRegion&)>& differ) {
    RemoteRegion twin;
    twin.id = region->id;
    twin.address = region->address;
    twin.length = region->length;
    twin.access = region->access;
    twin.keys = region->keys;
    differ(twin);
    return endpoint->attach(twin).code();
  };
  EXPECT_EQ(refused_as([](RemoteRegion&) {}), Code::kOk) << "attached again";
  EXPECT_EQ(refused_as([](RemoteRegion& twin) { twin.address += kMiB; }), Code::kCorrupt);
  EXPECT_EQ(refused_as([](RemoteRegion& twin) { twin.length /= 2; }), Code::kCorrupt);
  EXPECT_EQ(refused_as([](RemoteRegion& twin) { twin.access = transfer::Access::kRemoteRead; }),
            Code::kCorrupt);
  const auto other = peer.make_region(kMiB, true);
  EXPECT_EQ(refused_as([&](RemoteRegion& twin) { twin.keys = other->keys; }), Code::kCorrupt);
}

// A memfd that its owner could shrink would end this process with SIGBUS: it is not offered for
// mapping, and a peer that offers it all the same is refused.
TEST(ShmRegions, AnUnsealedMemfdIsNeverMapped) {
  Initiator self;
  base::UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(kMiB)), 0);
  mem::RegionRecord record;
  record.length = kMiB;
  record.backing.memfd = fd.get();
  EXPECT_TRUE(self.transport->export_region(record).empty());
  const auto name = transport::shm::name_memfd(fd.get());
  ASSERT_TRUE(name.ok());
  const auto opened = transport::shm::open_memfd({.pid = static_cast<std::uint32_t>(::getpid()),
                                                  .name = *name,
                                                  .writable = true,
                                                  .seals = F_SEAL_SHRINK});
  EXPECT_EQ(opened.code(), Code::kDenied);
  EXPECT_EQ(::ftruncate(fd.get(), 0), 0) << "it can indeed be shrunk";
}

TEST(ShmRegions, MemoryThatThePeerUnmapsGivesAnErrorNamingTheAddress) {
  PeerProcessHelper peer;
  Initiator self;
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(4 * kMiB, false);
  attach(*endpoint, *region);
  std::vector<std::byte> local(4 * kMiB);
  fill_pattern(local, 7);
  peer.unmap_second_half(*region);
  TestSink sink;
  TestShard write(Op::kWrite, sink);
  write.add(local.data(), region->address, local.size(), *region);
  const auto failure = run(*endpoint, sink, write);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, Code::kInvalidArgument) << failure->describe();
  char address[32];
  std::snprintf(address, sizeof(address), "0x%llx",
                static_cast<unsigned long long>(region->address + 2 * kMiB));
  EXPECT_NE(failure->message.find(address), std::string::npos) << failure->message;
  EXPECT_EQ(sink.outcome(write.shard).slices_done, 32u) << "the mapped half is 32 slices of 64 KiB";
  region->length = 2 * kMiB;
  EXPECT_TRUE(peer.region_matches(*region, 7));
  // The endpoint goes on.
  TestShard again(Op::kWrite, sink);
  again.add(local.data(), region->address, kMiB, *region);
  EXPECT_FALSE(run(*endpoint, sink, again));
}

TEST(ShmRegions, UnmappedRegionIsRefusedAtAttach) {
  PeerProcessHelper peer;
  Initiator self;
  const auto endpoint = self.connect(peer);
  ASSERT_NE(endpoint, nullptr);
  const auto region = peer.make_region(kMiB, false);
  region->address = 0x1000;
  EXPECT_EQ(endpoint->attach(*region).code(), Code::kInvalidArgument);
}

// Without the right to look into the peer, shm says so and how to get it. The helper gives up root
// and tries to reach this process.
TEST(ShmIdentity, AnotherUserIsToldTheRemedy) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  PeerProcessHelper stranger;
  Initiator self;
  const std::string answer =
      stranger.reach_as_nobody(self.context.host, self.transport->local_address());
  EXPECT_NE(answer.find("CAP_SYS_PTRACE"), std::string::npos) << answer;
  EXPECT_NE(answer.find("unreachable"), std::string::npos) << answer;
}

INSTANTIATE_TEST_SUITE_P(Kinds, ShmProcess, ::testing::Bool(),
                         [](const auto& row) { return row.param ? "map" : "vm"; });

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--peer-helper") == 0)
    return crossdock::testing::peer_helper_main();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
