// Masks through the API, in the twin: a rank is left out and let in again, others are read and
// cleared; mistakes.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpGroupRig masking_rig(const EpCase& c, bool late = false) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.masks = true;
  options.ep.mask_late = late;
  return EpGroupRig(c, ep::Group::create(options).value());
}
// Few tokens in packets or by flags, and the large path.
EpCase mask_case(u32 world, u32 tokens) {
  return {.world = world, .max_tokens = tokens, .combine_weights = false, .fixed = true};
}
struct PathOf {
  u32 tokens;
  ep::Path path;
};
constexpr PathOf kPaths[] = {{4, ep::Path::kSmall}, {12, ep::Path::kSmall}, {12, ep::Path::kLarge}};

void expect_ok(const Result<>& done) {
  ASSERT_TRUE(done.ok()) << done.error().describe();
}
// One round of all ranks but `gone`, whose share the others do without.
void round(EpGroupRig& rig, const EpCase& c, ep::Path path, u32 seed, u32 gone) {
  const EpInputs all(c, seed);
  const EpInputs seen = gone == kNoPeer ? all : all.without(gone);
  rig.load(all);
  std::vector<ep::Handle> handles;
  for (u32 r = 0; r < c.world; ++r)
    if (r != gone)
      handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.path = path}).value());
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const auto& handle : handles) {
    ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, seen)));
    rig.write_expert_rows(handle, seen, seed);
  }
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(rig.check_combined(handle.rank(), EpReference(c, seen), seed));
}

TEST(EpMasks, ARankIsLeftOutReadAndCleared) {
  for (const auto& [tokens, path] : kPaths) {
    SCOPED_TRACE(tokens);
    const EpCase c = mask_case(3, tokens);
    EpGroupRig rig = masking_rig(c);
    ASSERT_NO_FATAL_FAILURE(round(rig, c, path, 1, kNoPeer));
    auto told = rig.rank(0).allocate(c.world * 4).value();
    for (const u32 r : {0u, 2u})
      ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().mask(r, 1, true)));
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().read_mask(0, told.as<std::int32_t>())));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    EXPECT_THAT(std::vector<i32>(told.as<i32>(), told.as<i32>() + 3),
                ::testing::ElementsAre(0, 1, 0));
    EXPECT_EQ(rig.group().masked(2, ep_soon()).value(), 2u);
    for (u32 seed = 2; seed <= 6; ++seed) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      ASSERT_NO_FATAL_FAILURE(round(rig, c, path, seed, 1));
    }
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().mask(0, 1, false)));
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(2)));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    EXPECT_EQ(rig.group().masked(0, ep_soon()).value(), 0u);
    EXPECT_EQ(rig.group().masked(2, ep_soon()).value(), 0u);
  }
}
// It goes on with the same calls meanwhile, alone, and is let in again.
TEST(EpMasks, ARankComesBack) {
  for (const auto& [tokens, path] : kPaths) {
    SCOPED_TRACE(tokens);
    const EpCase c = mask_case(2, tokens);
    EpGroupRig rig = masking_rig(c);
    for (u32 seed = 1; seed <= 9; ++seed) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      const bool apart = seed % 3 == 0;
      for (u32 r = 0; r < 2; ++r)
        ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().mask(r, 1 - r, apart)));
      const EpInputs all(c, seed);
      rig.load(all);
      std::vector<ep::Handle> handles;
      for (u32 r = 0; r < 2; ++r)
        handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.path = path}).value());
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (const auto& handle : handles) {
        const EpInputs seen = apart ? all.without(1 - handle.rank()) : all;
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, seen))) << seed;
        rig.write_expert_rows(handle, seen, seed);
      }
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (const auto& handle : handles) {
        const EpInputs seen = apart ? all.without(1 - handle.rank()) : all;
        ASSERT_NO_FATAL_FAILURE(rig.check_combined(handle.rank(), EpReference(c, seen), seed));
      }
    }
  }
}
TEST(EpMasks, ARankThatDoesNotComeIsMaskedByTheKernel) {
  for (const auto& [tokens, path] : kPaths) {
    SCOPED_TRACE(tokens);
    const EpCase c = mask_case(3, tokens);
    EpGroupRig rig = masking_rig(c, true);
    rig.group().core().launcher().set_schedule(weak_schedule(1));
    ASSERT_NO_FATAL_FAILURE(round(rig, c, path, 1, 2));
    EXPECT_EQ(rig.group().masked(0, ep_soon()).value(), 4u);
    EXPECT_EQ(rig.group().masked(1, ep_soon()).value(), 4u);
    ASSERT_NO_FATAL_FAILURE(round(rig, c, path, 2, 2));
  }
}
TEST(EpMasks, NobodyIsLetInBetweenTheHalvesOfACombine) {
  for (const auto& [tokens, path] : kPaths) {
    const EpCase c = mask_case(2, tokens);
    EpGroupRig rig = masking_rig(c);
    rig.load(EpInputs(c, 1));
    std::vector<ep::Handle> handles;
    for (u32 r = 0; r < 2; ++r)
      handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.path = path}).value());
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().combine_send(handles[0])));
    const auto refused = rig.group().clear_mask(0);
    ASSERT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("waits for its combine_receive()"));
    // To mask one is no such thing.
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().mask(0, 1, true)));
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().mask(1, 0, true)));
  }
}
void expect_refused(const Result<>& got, const char* text) {
  ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
  EXPECT_THAT(got.error().message, HasSubstr(text));
}
TEST(EpMasks, NobodyIsLetInBetweenTheHalvesOfADispatch) {
  for (const u32 tokens : {4u, 12u}) {
    const EpCase c = mask_case(2, tokens);
    EpGroupRig rig = masking_rig(c);
    rig.load(EpInputs(c, 1));
    std::vector<ep::Handle> handles;
    for (u32 r = 0; r < 2; ++r)
      handles.push_back(rig.group().dispatch_send(r, rig.tokens(r), {}).value());
    ASSERT_NO_FATAL_FAILURE(
        expect_refused(rig.group().clear_mask(0), "waits for its dispatch_receive()"));
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().dispatch_receive(handle)));
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(0)));
    // One that nobody receives any more.
    {
      const auto sent = rig.group().dispatch_send(0, rig.tokens(0), {}).value();
    }
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(0)));
    {
      const auto sent = rig.group().dispatch_send(1, rig.tokens(1), {}).value();
    }
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
}
// With late masks the handle does not know who was left out, so that a rank that is let in would be
// asked for rows that it has not got.
TEST(EpMasks, NobodyIsLetInBetweenADispatchWithLateMasksAndItsCombine) {
  for (const auto& [tokens, path] : kPaths) {
    SCOPED_TRACE(tokens);
    const EpCase c = mask_case(2, tokens);
    EpGroupRig rig = masking_rig(c, true);
    rig.load(EpInputs(c, 1));
    const auto dispatch_all = [&, path = path] {
      std::vector<ep::Handle> handles;
      for (u32 r = 0; r < 2; ++r)
        handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.path = path}).value());
      return handles;
    };
    auto handles = dispatch_all();
    ASSERT_NO_FATAL_FAILURE(
        expect_refused(rig.group().mask(0, 1, false), "has not been combined yet"));
    ASSERT_NO_FATAL_FAILURE(expect_refused(rig.group().clear_mask(1), "has not been combined yet"));
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
    for (u32 r = 0; r < 2; ++r)
      ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(r)));
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(
          expect_refused(rig.group().combine(handle, {.rows = rig.combined(handle.rank())}),
                         "has let others in since the handle's dispatch"));
    handles = dispatch_all();
    handles.clear();
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(0)));
    handles = dispatch_all();
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
    ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().clear_mask(0)));
  }
}
TEST(EpMasks, MistakesAreRefused) {
  const EpCase c{.world = 2, .max_tokens = 4, .fixed = true};
  EpGroupRig rig = masking_rig(c);
  const auto refuse = [](const Result<>& got, const char* text) {
    ASSERT_EQ(got.code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse(rig.group().mask(0, 0, true), "rank 0 cannot go on without itself");
  refuse(rig.group().mask(0, 2, true), "peer = 2 must be one of the 2 ranks");
  refuse(rig.group().mask(5, 0, true), "rank 5 is not one of");
  refuse(rig.group().read_mask(0, nullptr), "must be i32 [2]");
  std::int32_t told[2];
  refuse(rig.group().read_mask(99, told), "rank 99 is not one of");
  auto options = ep_options(c, symm::Backend::kCpu);
  EpGroupRig without(c, ep::Group::create(options).value());
  refuse(without.group().mask(0, 1, true), "made with masks = false");
  options.ep.mask_late = true;
  EXPECT_THAT(ep::sizes(options.ep, 4).error().message, HasSubstr("needs masks = true"));
  options.ep.masks = true;
  options.ep.combine = ep::CombineBy::kPush;
  EXPECT_THAT(ep::sizes(options.ep, 4).error().message, HasSubstr("needs combine = kPull"));
}

}  // namespace
}  // namespace crossdock::testing
