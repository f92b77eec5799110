// Masks that change while a launch of the same rank runs beside, in the twin: nobody's is lost, and
// whatever a launch has of a rank it has all of, or nothing.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_rig.hpp"

namespace crossdock::testing {
namespace {

EpCase beside_case(u32 world) {
  return {.world = world,
          .experts = 4 * world,
          .top_k = 3,
          .max_tokens = 12,
          .combine_bytes = 208,
          .combine_weights = false,
          .blocks = {2},
          .fixed = true};
}

TEST(EpMaskBeside, RanksMaskedSideBySideAreBothMasked) {
  EpRig rig(beside_case(4));
  for (u32 seed = 1; seed <= 4 * kEpSeeds; ++seed) {
    rig.reset();
    rig.launch_mask(0, 2, 2, 0);
    rig.launch_mask(0, 4, 4, 1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    ASSERT_EQ(rig.mask(0).ranks, 6u) << "seed " << seed;
    // One is let in beside, and the other one stays what it is.
    rig.mask(0).late = 2;
    rig.launch_mask(0, 0, 4, 0);
    rig.launch_mask(0, 8, 8, 1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    ASSERT_EQ(rig.mask(0).ranks, 10u) << "seed " << seed;
    ASSERT_EQ(rig.mask(0).late, 2u) << "seed " << seed;
  }
}

}  // namespace
}  // namespace crossdock::testing
