// Scales of a cast that ranks choose differently, f32 or ue8m0, are found before anybody uses the
// rows.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <crossdock/ep/group.hpp>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

// Also where the sizes of both kinds of scales look alike in the few bits that ranks compare.
TEST(EpCastScales, RanksWithOtherScalesOfACastAreFound) {
#ifdef CROSSDOCK_SANITIZE_THREAD
  // Rows that two ranks lay out differently overlap at the receiver: the mistake that is found
  // here, and a race by rights.
  const std::vector<u32> kTokens = {10, 0};
#else
  const std::vector<u32> kTokens = {10, 9};
#endif
  for (const u32 hidden : {128u, 2048u, 3072u, 7168u})
    for (const auto path : {ep::Path::kSmall, ep::Path::kLarge}) {
      SCOPED_TRACE(hidden);
      const EpCase c{.world = 2,
                     .max_tokens = 10,
                     .row_bytes = 2 * hidden,
                     .cast = true,
                     .combine_bytes = 2 * hidden,
                     .tokens = kTokens};
      auto options = ep_options(c, symm::Backend::kCpu);
      options.ep.small_tokens = c.max_tokens;
      EpGroupRig rig = EpGroupRig::create(c, options).value();
      rig.load(EpInputs(c, 1));
      std::vector<ep::Handle> handles;
      for (const u32 r : {0u, 1u}) {
        ep::Tokens tokens = rig.tokens(r);
        tokens.cast_ue8m0 = r == 1;
        handles.push_back(rig.group().dispatch(r, tokens, {.path = path}).value());
      }
      const auto done = rig.group().synchronize(ep_soon());
      ASSERT_EQ(done.code(), Code::kInvalidArgument);
      EXPECT_THAT(done.error().message, HasSubstr("cast and cast_ue8m0"));
    }
}
// Whatever the rows are, of which the sizes above are samples.
TEST(EpCastScales, ScalesOfOneByteNeverLookLikeThoseOfFour) {
  for (u32 hidden = kEpScaleGroup; hidden <= 32768; hidden += kEpScaleGroup) {
    const auto layout = [&](bool ue8m0) {
      return ep_output_layout({.capacity = 8,
                               .row_bytes = hidden,
                               .scale_bytes = ep::cast_scale_bytes(hidden, ue8m0),
                               .scales_by_column = false,
                               .top_k = 2,
                               .cast_ue8m0 = ue8m0});
    };
    const auto four = layout(false), one = layout(true);
    ASSERT_NE(EpPlaceWord::shape_of(four), EpPlaceWord::shape_of(one)) << hidden;
    ASSERT_NE(EpHeader::shape_of(four), EpHeader::shape_of(one)) << hidden;
  }
}

}  // namespace
}  // namespace crossdock::testing
