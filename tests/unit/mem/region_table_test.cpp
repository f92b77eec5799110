// SPDX-License-Identifier: Apache-2.0
#include "mem/region_table.hpp"

#include <array>
#include <atomic>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "base/clock.hpp"

namespace crossdock::mem {
namespace {

using transfer::Access;
using transfer::Op;

void* at(std::uint64_t address) {
  return reinterpret_cast<void*>(address);
}

Result<std::vector<std::shared_ptr<RegionRecord>>> add(RegionTable& table,
                                                       std::vector<NewRegion> regions,
                                                       Access access = Access::kRemoteReadWrite) {
  return table.add(regions, {.access = access});
}

TEST(RegionTable, RefusesWhatCannotBeMemory) {
  RegionTable table;
  EXPECT_EQ(add(table, {{nullptr, 10}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(add(table, {{at(4096), 0}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(add(table, {{at(4096), std::size_t{1} << 63}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(add(table, {{at(~std::uint64_t{0} - 10), 100}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(table.version(), 0u);
}

TEST(RegionTable, BatchIsAllOrNone) {
  RegionTable table;
  const auto result = add(table, {{at(0x1000), 0x1000}, {at(0x3000), 0x1000}, {at(0x1800), 0x10}});
  ASSERT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_NE(result.error().message.find("0x1800"), std::string::npos) << result.error().message;
  EXPECT_NE(result.error().message.find("0x1000"), std::string::npos) << result.error().message;
  EXPECT_TRUE(table.snapshot()->empty());
}

TEST(RegionTable, OverlapWithARegisteredRegionIsRefusedOnEveryEdge) {
  RegionTable table;
  ASSERT_TRUE(add(table, {{at(0x2000), 0x1000}}).ok());
  for (auto [address, length] : {std::pair<std::uint64_t, std::size_t>{0x2000, 0x1000},
                                 {0x1fff, 2},
                                 {0x2fff, 1},
                                 {0x1000, 0x5000},
                                 {0x2800, 0x10}})
    EXPECT_EQ(add(table, {{at(address), length}}).code(), Code::kInvalidArgument) << address;
  EXPECT_TRUE(add(table, {{at(0x1000), 0x1000}, {at(0x3000), 0x1000}}).ok()) << "touching is fine";
}

TEST(RegionTable, LeaseNamesTheFault) {
  RegionTable table;
  ASSERT_TRUE(add(table, {{at(0x2000), 0x1000}}).ok());
  EXPECT_TRUE(table.lease_local(0x2000, 0x1000).ok());
  EXPECT_EQ(table.lease_local(0x1fff, 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(table.lease_local(0x3000, 1).code(), Code::kInvalidArgument);
  const auto past = table.lease_local(0x2f00, 0x101);
  ASSERT_EQ(past.code(), Code::kInvalidArgument);
  EXPECT_NE(past.error().message.find("shorten it by 1 bytes"), std::string::npos)
      << past.error().message;
  EXPECT_EQ(table.lease_local(0x2f00, ~std::uint64_t{0}).code(), Code::kInvalidArgument);
}

TEST(RegionTable, AccessIsCheckedForPeersOnly) {
  RegionTable table;
  ASSERT_TRUE(add(table, {{at(0x1000), 16}}, Access::kLocalOnly).ok());
  ASSERT_TRUE(add(table, {{at(0x2000), 16}}, Access::kRemoteRead).ok());
  EXPECT_TRUE(table.lease_local(0x1000, 16).ok());
  EXPECT_EQ(table.lease_inbound(0x1000, 16, Op::kRead).code(), Code::kDenied);
  EXPECT_TRUE(table.lease_inbound(0x2000, 16, Op::kRead).ok());
  EXPECT_EQ(table.lease_inbound(0x2000, 16, Op::kWrite).code(), Code::kDenied);
  for (const auto& record : *table.snapshot())
    EXPECT_EQ(record->leases.load(), 0u);
}

TEST(RegionTable, ALeasedRegionIsNotReleased) {
  RegionTable table;
  const auto record = add(table, {{at(0x1000), 16}}).value().front();
  auto lease = table.lease_local(0x1000, 16).value();
  table.begin_release(*record);
  EXPECT_EQ(table.finish_release(*record).code(), Code::kBusy);
  EXPECT_EQ(table.lease_local(0x1000, 16).code(), Code::kClosed) << "no new leases while closing";
  lease.reset();
  EXPECT_TRUE(table.finish_release(*record).ok());
  EXPECT_TRUE(table.snapshot()->empty());
  EXPECT_TRUE(add(table, {{at(0x1000), 16}}).ok()) << "the range is free again";
}

TEST(RegionTable, ReleaseAndLeaseNeverBothSucceed) {
  for (int round = 0; round < 200; ++round) {
    RegionTable table;
    const auto record = add(table, {{at(0x1000), 16}}).value().front();
    std::atomic<bool> go{false};
    Lease held;
    std::thread taker([&] {
      while (!go.load()) {
      }
      if (auto lease = table.lease_local(0x1000, 16); lease.ok()) held = std::move(*lease);
    });
    go.store(true);
    table.begin_release(*record);
    const bool released = table.finish_release(*record).ok();
    taker.join();
    EXPECT_FALSE(released && held) << "round " << round;
  }
}

TEST(RegionTable, FiveThousandRegionsInOneBatch) {
  RegionTable table;
  std::vector<NewRegion> regions;
  for (std::uint64_t i = 5000; i-- > 0;)
    regions.push_back({at(0x10000 + i * 0x1000), 0x1000});
  ASSERT_TRUE(add(table, regions).ok());
  for (std::uint64_t i = 0; i < 5000; ++i)
    ASSERT_TRUE(table.lease_local(0x10000 + i * 0x1000 + 0xfff, 1).ok()) << i;
}

TEST(RegionTable, AReleasedRegionIsInNoSnapshotAndMakesRoomForAnother) {
  RegionTable table;
  const auto records = add(table, {{at(0x10000), 0x1000}, {at(0x20000), 0x1000}}).value();
  const auto before = table.snapshot();
  const auto version = table.version();
  table.begin_release(*records[0]);
  ASSERT_TRUE(table.finish_release(*records[0]).ok());
  EXPECT_EQ(table.version(), version + 1);
  EXPECT_EQ(before->size(), 2u) << "a snapshot does not change";
  ASSERT_EQ(table.snapshot()->size(), 1u);
  EXPECT_EQ(table.snapshot()->front(), records[1]);
  EXPECT_EQ(table.lease_local(0x10000, 1).code(), Code::kInvalidArgument);
  EXPECT_FALSE(table.finish_release(*records[0]).value()) << "twice is once";
  EXPECT_EQ(table.version(), version + 1);
  EXPECT_TRUE(add(table, {{at(0xf000), 0x2000}}).ok());
}

// Copying the table for each of them, which is what this forbids, takes ten seconds and more.
TEST(RegionTable, TensOfThousandsAreReleasedOneByOne) {
  RegionTable table;
  std::vector<NewRegion> regions;
  for (std::uint64_t i = 0; i < 24'000; ++i)
    regions.push_back({at(0x10000 + i * 0x1000), 0x1000});
  const auto records = add(table, regions).value();
  const auto begin = base::process_cpu_ns();
  for (const auto& record : records) {
    table.begin_release(*record);
    ASSERT_TRUE(table.finish_release(*record).ok());
  }
  EXPECT_LT(base::process_cpu_ns() - begin, 1'000'000'000u);
  EXPECT_TRUE(table.snapshot()->empty());
}

}  // namespace
}  // namespace crossdock::mem
