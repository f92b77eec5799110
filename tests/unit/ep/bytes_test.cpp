// Rows in formats that no kernel knows travel as bytes, with scales of any kind beside them: those
// of NVFP4 and MXFP8, on both paths, with scales by row and by column, every byte compared. In the
// twin.
// SPDX-License-Identifier: Apache-2.0
#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kHidden = 512;

// H / 2 bytes of pairs of e2m1, and a byte of e4m3 for each 16 values.
EpCase nvfp4(u32 world) {
  return {.world = world,
          .max_tokens = 20,
          .row_bytes = kHidden / 2,
          .scale_bytes = kHidden / 16,
          .combine_bytes = kHidden * 2};
}
// H bytes of e4m3, and a byte of ue8m0 for each 32 values.
EpCase mxfp8(u32 world) {
  return {.world = world,
          .max_tokens = 20,
          .row_bytes = kHidden,
          .scale_bytes = kHidden / 32,
          .combine_bytes = kHidden * 2};
}

void rounds_of_every_kind(EpCase c) {
  for (const bool few : {false, true})
    for (const bool by_column : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "few " << few << " by column " << by_column);
      c.fixed = few;
      c.scales_by_column = by_column;
      auto rig = EpGroupRig::create(c, symm::Backend::kCpu).value();
      for (u32 seed = 1; seed <= 2; ++seed) {
        rig.group().core().launcher().set_schedule(weak_schedule(seed));
        ASSERT_NO_FATAL_FAILURE(rig.round(seed)) << "seed " << seed;
      }
    }
}

TEST(EpBytes, Nvfp4RowsAndScales) {
  for (const u32 world : {2u, 3u})
    ASSERT_NO_FATAL_FAILURE(rounds_of_every_kind(nvfp4(world)));
}
TEST(EpBytes, Mxfp8RowsAndScales) {
  for (const u32 world : {2u, 3u})
    ASSERT_NO_FATAL_FAILURE(rounds_of_every_kind(mxfp8(world)));
}

// Four tokens and fewer, which travel as packets; and the rows of a large model.
TEST(EpBytes, PacketsAndWideRows) {
  for (EpCase c : {nvfp4(2), mxfp8(2)}) {
    c.max_tokens = 4;
    ASSERT_NO_FATAL_FAILURE(rounds_of_every_kind(c));
    constexpr u32 kTimes = 7168 / kHidden;
    c.row_bytes *= kTimes;
    c.scale_bytes *= kTimes;
    ASSERT_NO_FATAL_FAILURE(rounds_of_every_kind(c));
  }
}

}  // namespace
}  // namespace crossdock::testing
