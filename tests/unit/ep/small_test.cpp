// The path for few tokens through the API, in the twin: rounds, slots in turns, rows by expert with
// gaps between the sources, both paths in one loop, arguments that are wrong, memory.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_expanded.hpp"
#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpGroupRig twin_rig(const EpCase& c) {
  return EpGroupRig::create(c, symm::Backend::kCpu).value();
}

TEST(EpSmallGroup, RoundsInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 5u}) {
    SCOPED_TRACE(world);
    EpGroupRig rig = twin_rig({.world = world,
                               .max_tokens = 20,
                               .scale_bytes = 16,
                               .biases = 2,
                               .fixed = true,
                               .overlap = true});
    for (u32 seed = 1; seed <= 3; ++seed) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      ASSERT_NO_FATAL_FAILURE(rig.round(seed));
    }
  }
}
TEST(EpSmallGroup, CastsAndTakesWideIds) {
  EpGroupRig rig = twin_rig({.world = 2,
                             .max_tokens = 20,
                             .row_bytes = 512,
                             .cast = true,
                             .wide_ids = true,
                             .combine_bytes = 512,
                             .fixed = true});
  for (u32 seed = 1; seed <= 3; ++seed)
    ASSERT_NO_FATAL_FAILURE(rig.round(seed));
}

// Batches of few tokens, by flags, and of a handful, in packets, have the same slots.
TEST(EpSmallGroup, BatchesOfAllSizesTakeTurns) {
  EpCase c{.world = 2, .max_tokens = 24, .blocks = {1}, .fixed = true};
  EpGroupRig rig = twin_rig(c);
  u32 round = 0;
  for (const u32 tokens : {24u, 24u, 5u, 5u, 24u, 5u, 24u, 24u, 5u, 24u}) {
    SCOPED_TRACE("round " + std::to_string(++round) + " of " + std::to_string(tokens) + " tokens");
    c.tokens = {tokens};
    const EpInputs inputs(c, round);
    const EpReference reference(c, inputs);
    rig.load(inputs);
    std::vector<ep::Handle> handles;
    for (const u32 r : {0u, 1u})
      handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.most_tokens = tokens}).value());
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
      rig.write_expert_rows(handle, inputs, round);
    }
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.check_combined(handle.rank(), reference, round));
  }
}
TEST(EpSmallGroup, AThirdDispatchIsRefusedUntilTheFirstIsGivenBack) {
  const EpCase c{.world = 2, .fixed = true};
  EpGroupRig rig = twin_rig(c);
  const EpInputs inputs(c, 1);
  rig.load(inputs);
  auto first = rig.dispatch();
  const auto second = rig.dispatch();
  EXPECT_NE(first[0].received().rows, second[0].received().rows);
  const auto refused = rig.group().dispatch(0, rig.tokens(0));
  ASSERT_EQ(refused.code(), Code::kBusy);
  EXPECT_THAT(refused.error().message, HasSubstr("2 small slots of rank 0 are used in turns"));
  void* rows = first[0].received().rows;
  first.clear();
  const auto third = rig.dispatch();
  EXPECT_EQ(third[0].received().rows, rows);
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  const EpReference reference(c, inputs);
  for (const auto* handles : {&second, &third})
    for (const auto& handle : *handles)
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
}

TEST(EpSmallGroup, TwoDispatchesThenTwoCombinesInBothOrdersAndAgain) {
  const EpCase c{.world = 3, .max_tokens = 12, .biases = 1, .fixed = true};
  EpGroupRig rig = twin_rig(c);
  for (u32 turn = 1; turn <= 4; ++turn) {
    rig.group().core().launcher().set_schedule(weak_schedule(turn));
    const EpInputs inputs(c, turn);
    const EpReference reference(c, inputs);
    rig.load(inputs);
    const auto first = rig.dispatch();
    const auto second = rig.dispatch();
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto* handles : {&first, &second})
      for (const auto& handle : *handles) {
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
        rig.write_expert_rows(handle, inputs, handles == &first ? 1 : 2);
      }
    for (const u32 round : turn % 2 == 0 ? std::vector<u32>{2, 1} : std::vector<u32>{1, 2, 1}) {
      for (const auto& handle : round == 1 ? first : second)
        ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (u32 r = 0; r < c.world; ++r)
        ASSERT_NO_FATAL_FAILURE(rig.check_combined(r, reference, round));
    }
  }
}

TEST(EpSmallGroup, SmallAndLargePathsInOneLoop) {
  EpCase c{.world = 3, .max_tokens = 12};
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.small_tokens = c.max_tokens;
  EpGroupRig rig(c, ep::Group::create(options).value());
  const EpInputs inputs(c, 1);
  rig.load(inputs);
  EpCase fixed = c;
  fixed.fixed = true;
  const EpReference large(c, inputs), small(fixed, inputs);
  for (u32 turn = 0; turn < 8; ++turn) {
    rig.group().core().launcher().set_schedule(weak_schedule(turn));
    const bool few = turn % 3 != 0;
    std::vector<ep::Handle> handles;
    for (u32 r = 0; r < c.world; ++r)
      handles.push_back(
          rig.group()
              .dispatch(r, rig.tokens(r), {.path = few ? ep::Path::kAuto : ep::Path::kLarge})
              .value());
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles) {
      EXPECT_EQ(handle.received().source_stride, few ? c.max_tokens : 0);
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, few ? small : large));
      ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
    }
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
}

// Slots of the two paths differ in size: all that goes with a handle of few tokens lies in its own.
TEST(EpSmallGroup, FewerTokensThanTheLargePathTakes) {
  for (const u32 world : {1u, 2u, 3u, 4u})
    for (const u32 tokens : {4u, 12u}) {
      SCOPED_TRACE("world " + std::to_string(world) + " tokens " + std::to_string(tokens));
      const EpCase c{.world = world, .max_tokens = tokens, .biases = 1, .fixed = true};
      auto options = ep_options(c, symm::Backend::kCpu);
      options.ep.max_tokens = 64 * tokens;
      EpGroupRig rig(c, ep::Group::create(options).value());
      const EpInputs inputs(c, world);
      const EpReference reference(c, inputs);
      rig.load(inputs);
      std::vector<ep::Handle> held;
      std::vector<std::vector<u8>> rows;
      const auto received = [&](const ep::Handle& handle) {
        const auto& got = handle.received();
        return symm::download(rig.rank(handle.rank()), static_cast<const u8*>(got.rows),
                              u64{got.capacity} * got.row_bytes, ep_soon())
            .value();
      };
      for (u32 r = 0; r < world; ++r)
        held.push_back(rig.group().dispatch(r, rig.tokens(r), {.path = ep::Path::kLarge}).value());
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (const auto& handle : held)
        rows.push_back(received(handle));
      for (u32 turn = 1; turn <= 3; ++turn) {
        std::vector<ep::Handle> handles;
        for (u32 r = 0; r < world; ++r)
          handles.push_back(
              rig.group()
                  .dispatch(r, rig.tokens(r), {.path = ep::Path::kSmall, .most_tokens = tokens})
                  .value());
        ASSERT_NO_FATAL_FAILURE(rig.synchronize());
        for (const auto& handle : handles) {
          ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
          rig.write_expert_rows(handle, inputs, turn);
        }
        for (const auto& handle : handles)
          ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
        ASSERT_NO_FATAL_FAILURE(rig.synchronize());
        for (u32 r = 0; r < world; ++r) {
          ASSERT_NO_FATAL_FAILURE(rig.check_combined(r, reference, turn));
          EXPECT_EQ(received(held[r]), rows[r]);
        }
      }
    }
}

TEST(EpSmallGroup, WrongArgumentsNameRuleValueAndFix) {
  const EpCase c{.world = 2, .max_tokens = 8, .fixed = true};
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.max_tokens = 32;
  options.ep.small_tokens = 8;
  EpGroupRig rig({.world = 2, .max_tokens = 32}, ep::Group::create(options).value());
  rig.load(EpInputs({.world = 2, .max_tokens = 32}, 1));
  ep::Tokens tokens = rig.tokens(0);
  const auto expect = [&](const ep::DispatchOptions& how, const char* text) {
    const auto refused = rig.group().dispatch(0, tokens, how);
    ASSERT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr(text));
  };
  expect({.path = ep::Path::kSmall}, "Path::kSmall with 32 tokens");
  expect({.most_tokens = 8}, "32 tokens are more than most_tokens = 8");
  tokens.count = 4;
  expect({.path = ep::Path::kSmall, .output = rig.combined(0)}, "neither routing nor output");
  for (const auto& [wrong, text] : std::vector<std::pair<ep::Options, const char*>>{
           {{.experts = 4, .top_k = 2, .max_tokens = 8, .hidden = 128, .small_tokens = 9},
            "small_tokens = 9 must be at most"},
           {{.experts = 4,
             .top_k = 2,
             .max_tokens = 8,
             .hidden = 128,
             .small_tokens = 8,
             .small_slots = 5},
            "small_slots = 5 must be 1 to 4"},
           {{.experts = 4, .top_k = 2, .max_tokens = 8, .hidden = 128, .slots = 0},
            "slots = 0 must be 1 to 16"}}) {
    const auto refused = ep::sizes(wrong, 2);
    ASSERT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr(text));
  }
}

// The figure of a decode step: 128 tokens a rank, hidden 7168, top 8 of 256, four ranks.
TEST(EpSmallGroup, ADecodeGroupTakesLessThanFortyMegabytes) {
  const auto sizes = ep::sizes({.experts = 256,
                                .top_k = 8,
                                .max_tokens = 128,
                                .hidden = 7168,
                                .slots = 0,
                                .fall_back = false,
                                .small_tokens = 128},
                               4)
                         .value();
  EXPECT_LE(sizes.window_bytes + sizes.local_bytes, 40'000'000u);
  EXPECT_GE(sizes.window_bytes, sizes.small_bytes);
  EXPECT_EQ(sizes.transit_bytes, 0u);
}

}  // namespace
}  // namespace crossdock::testing
