// What a peer tells of its regions: lies are refused.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/remote_regions.hpp"

#include <gtest/gtest.h>

namespace crossdock::testing {
namespace {

using transfer::detail::RemoteRegions;

Result<> tell(RemoteRegions& regions, std::uint32_t id, std::uint64_t address) {
  return regions.add({{.region_id = id, .addr = address, .length = 4096, .access = 3}}, {});
}

TEST(RemoteRegions, AnIdIsGivenOnce) {
  RemoteRegions regions;
  const wire::RegionEntry first{.region_id = 5, .addr = 1 << 20, .length = 4096, .access = 3};
  auto twin = first;
  twin.addr = 2 << 20;
  EXPECT_EQ(regions.add({first, twin}, {}).code(), Code::kCorrupt);
  ASSERT_TRUE(tell(regions, 5, 1 << 20).ok()) << "nothing of what was refused is kept";
  const auto again = tell(regions, 5, 2 << 20);
  ASSERT_EQ(again.code(), Code::kCorrupt);
  EXPECT_NE(again.error().message.find("id 5"), std::string::npos) << again.error().message;
  // One that was taken back may still be copied to.
  EXPECT_EQ(regions.revoke({5}).size(), 1u);
  EXPECT_EQ(tell(regions, 5, 1 << 20).code(), Code::kCorrupt);
  EXPECT_TRUE(tell(regions, 6, 1 << 20).ok());
  EXPECT_EQ(regions.snapshot()->size(), 1u);
}

TEST(RemoteRegions, RegionsThatOverlapAreRefused) {
  RemoteRegions regions;
  ASSERT_TRUE(tell(regions, 1, 8192).ok());
  EXPECT_EQ(tell(regions, 2, 8192 + 4095).code(), Code::kCorrupt);
  EXPECT_TRUE(tell(regions, 2, 8192 + 4096).ok());
}

TEST(RemoteRegions, ThereIsALimit) {
  RemoteRegions regions(3);
  for (std::uint32_t id = 0; id < 3; ++id)
    ASSERT_TRUE(tell(regions, id, (id + 1) * std::uint64_t{4096}).ok());
  EXPECT_EQ(tell(regions, 3, 1 << 20).code(), Code::kCorrupt);
  ASSERT_EQ(regions.revoke({0}).size(), 1u);
  EXPECT_TRUE(tell(regions, 4, 1 << 20).ok()) << "there is room again";
}

}  // namespace
}  // namespace crossdock::testing
