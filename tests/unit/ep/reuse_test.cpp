// Dispatches that reuse the routing of an earlier one, in the twin through the API: other rows the
// same ways, their combine, and what is refused or found by the kernels.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpGroupRig twin_rig(const EpCase& c, u32 slots = 2) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.slots = slots;
  return EpGroupRig::create(c, options).value();
}
// Tokens with the choices of `like` and everything else their own.
EpInputs inputs_like(const EpCase& c, const EpInputs& like, u32 seed) {
  EpInputs inputs(c, seed);
  for (u32 rank = 0; rank < c.world; ++rank) {
    inputs.of(rank).ids = like.of(rank).ids;
    inputs.of(rank).weights = like.of(rank).weights;
  }
  return inputs;
}

// A dispatch, then others that reuse its routing, the last that of the one before; each checked and
// combined.
void reuse_and_combine(const EpCase& c, u32 seed) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " seed " + std::to_string(seed));
  EpGroupRig rig = twin_rig(c);
  rig.group().core().launcher().set_schedule(weak_schedule(seed));
  const EpInputs first(c, seed);
  rig.load(first);
  auto handles = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 again = 1; again <= 3; ++again) {
    const EpInputs inputs = inputs_like(c, first, seed + 100 * again);
    const EpReference reference(c, inputs);
    rig.load(inputs);
    handles = rig.dispatch_like(handles);
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference)) << "again " << again;
      rig.write_expert_rows(handle, inputs, again);
    }
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.check_combined(handle.rank(), reference, again));
  }
}

TEST(EpReuse, OtherRowsGoTheSameWaysInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 5u, 8u})
    for (u32 seed = 1; seed <= 2; ++seed) {
      // More tokens than the blocks deal to their warps; blocks differ.
      reuse_and_combine({.world = world,
                         .experts = 2 * world + 3,
                         .max_tokens = 70,
                         .row_bytes = 48,
                         .scale_bytes = 12,
                         .blocks = {3, 2}},
                        seed);
      if (HasFatalFailure()) return;
    }
}
TEST(EpReuse, ThirtyTwoRanks) {
  reuse_and_combine(
      {.world = 32, .experts = 40, .max_tokens = 4, .row_bytes = 16, .blocks = {1, 2}}, 1);
}
TEST(EpReuse, CastRowsAndScalesByColumn) {
  reuse_and_combine({.world = 3,
                     .max_tokens = 20,
                     .row_bytes = 512,
                     .scales_by_column = true,
                     .cast = true,
                     .combine_bytes = 512},
                    1);
  reuse_and_combine({.world = 2, .max_tokens = 20, .scale_bytes = 16, .scales_by_column = true}, 1);
}
TEST(EpReuse, FewTokensNoTokensNoWeightsOddRoutings) {
  reuse_and_combine({.world = 3, .max_tokens = 9, .tokens = {0, 1, 5}, .blocks = {4, 1}}, 1);
  reuse_and_combine({.world = 2, .tokens = {0}}, 1);
  reuse_and_combine({.world = 2, .max_tokens = 9, .weights = false}, 1);
  for (const EpRoutingKind kind : {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked})
    reuse_and_combine({.world = 3, .max_tokens = 40, .routing = kind}, 1);
}

// Queued without the host: what is reused may be gone when its successor runs, and dispatches with
// and without counting alternate.
TEST(EpReuse, QueuedWithOthersAndTheOriginalDropped) {
  const EpCase c{.world = 3, .max_tokens = 40, .scale_bytes = 8};
  for (u32 seed = 1; seed <= 4; ++seed) {
    EpGroupRig rig = twin_rig(c, 3);
    rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(c, seed);
    const EpReference reference(c, inputs);
    rig.load(inputs);
    auto first = rig.dispatch();
    auto second = rig.dispatch_like(first);
    first.clear();
    auto third = rig.dispatch();
    auto fourth = rig.dispatch_like(second);
    second.clear();
    auto fifth = rig.dispatch();
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (auto* handles : {&third, &fourth, &fifth})
      for (const auto& handle : *handles)
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference)) << "seed " << seed;
  }
}
TEST(EpReuse, SelectionsAreCountedOnce) {
  const EpCase c{.world = 2, .experts = 5};
  EpGroupRig rig = twin_rig(c);
  rig.load(EpInputs(c, 1));
  const auto first = rig.dispatch();
  const auto second = rig.dispatch_like(first);
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  const auto counts = second[0].expert_counts(ep_soon()).value();
  EXPECT_EQ(counts, first[0].expert_counts(ep_soon()).value());
  EXPECT_EQ(rig.group().statistics(0, ep_soon())->expert_selections,
            std::vector<std::uint64_t>(counts.begin(), counts.end()));
}

// ---- masks --------------------------------------------------------------------------------------

// Rank 2 and the others mask each other, or let each other in again.
void set_apart(EpGroupRig& rig, bool apart) {
  for (const u32 r : {0u, 1u}) {
    ASSERT_TRUE(rig.group().mask(r, 2, apart).ok());
    ASSERT_TRUE(rig.group().mask(2, r, apart).ok());
  }
}
// What `rank` sees when they are apart.
EpInputs seen_apart(const EpInputs& all, u32 rank) {
  return rank == 2 ? all.without(0).without(1) : all.without(2);
}
// A round in which they may be apart, with the routing of `like` if there is one, checked against
// what each rank is to see.
std::vector<ep::Handle> masked_round(EpGroupRig& rig, const EpCase& c, const EpInputs& inputs,
                                     const std::vector<ep::Handle>* like, bool apart) {
  rig.load(inputs);
  std::vector<ep::Handle> handles;
  for (u32 r = 0; r < c.world; ++r)
    handles.push_back(
        like == nullptr
            ? rig.group().dispatch(r, rig.tokens(r), {.path = ep::Path::kLarge}).value()
            : rig.group().dispatch(r, rig.tokens_like(r), {.routing = &(*like)[r]}).value());
  rig.synchronize();
  for (const auto& handle : handles) {
    const u32 r = handle.rank();
    const EpInputs seen = apart ? seen_apart(inputs, r) : inputs;
    rig.check(handle, EpReference(c, seen));
    if (::testing::Test::HasFatalFailure()) break;
    rig.write_expert_rows(handle, seen, 1);
  }
  if (::testing::Test::HasFatalFailure()) return handles;
  for (const auto& handle : handles)
    rig.combine(handle);
  rig.synchronize();
  for (u32 r = 0; r < c.world; ++r)
    rig.check_combined(r, EpReference(c, apart ? seen_apart(inputs, r) : inputs), 1);
  return handles;
}
EpGroupRig masking_rig(const EpCase& c) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.slots = 2;
  options.ep.masks = true;
  return EpGroupRig(c, ep::Group::create(options).value());
}
const EpCase kApart{
    .world = 3, .experts = 7, .max_tokens = 40, .combine_weights = false, .fixed = true};

TEST(EpReuse, ARankThatIsMaskedSinceIsNotCounted) {
  for (const u32 experts : {7u, 300u})  // of fewer than a warp's, and of several warps'
    for (u32 seed = 1; seed <= 4; ++seed) {
      EpCase c = kApart;
      c.experts = experts;
      EpGroupRig rig = masking_rig(c);
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      const EpInputs inputs(c, seed);
      auto handles = masked_round(rig, c, inputs, nullptr, false);
      ASSERT_NO_FATAL_FAILURE(set_apart(rig, true));
      for (u32 again = 0; again < 2 && !HasFatalFailure(); ++again)
        handles = masked_round(rig, c, inputs, &handles, true);
      if (HasFatalFailure()) return;
    }
}
// Where ranks were left out of the first dispatch, they are left out of those like it; the slots
// still have what other dispatches left there.
TEST(EpReuse, ARankThatIsLetInSinceHasNoRows) {
  for (u32 seed = 1; seed <= 4; ++seed) {
    EpGroupRig rig = masking_rig(kApart);
    rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(kApart, seed);
    for (u32 slot = 0; slot < 2; ++slot)
      masked_round(rig, kApart, EpInputs(kApart, 100 + seed), nullptr, false);
    ASSERT_NO_FATAL_FAILURE(set_apart(rig, true));
    const auto handles = masked_round(rig, kApart, inputs, nullptr, true);
    ASSERT_NO_FATAL_FAILURE(set_apart(rig, false));
    masked_round(rig, kApart, inputs, &handles, true);
    if (HasFailure()) return;
  }
}

// ---- mistakes ----------------------------------------------------------------------------------

TEST(EpReuse, WrongHandlesAreRefused) {
  const EpCase c{.world = 2, .max_tokens = 8};
  EpGroupRig rig = twin_rig(c), other = twin_rig(c);
  rig.load(EpInputs(c, 1));
  other.load(EpInputs(c, 1));
  auto handles = rig.dispatch();
  const auto refuse = [&](EpGroupRig& on, u32 rank, const ep::Tokens& tokens,
                          const ep::Handle& like, const char* text) {
    const auto got = on.group().dispatch(rank, tokens, {.routing = &like});
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse(rig, 0, rig.tokens_like(0), handles[1], "routing is of rank 1");
  refuse(other, 0, other.tokens_like(0), handles[0], "another group");
  ep::Tokens fewer = rig.tokens_like(0);
  --fewer.count;
  refuse(rig, 0, fewer, handles[0], "routing is of 8 tokens, and these are 7");
  refuse(rig, 0, rig.tokens(0), handles[0], "leave ids and weights empty");
  const ep::Handle moved = std::move(handles[0]);
  refuse(rig, 0, rig.tokens_like(0), handles[0], "moved from");
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
  refuse(rig, 0, rig.tokens_like(0), moved, "before the group's reset()");
  const auto combined = rig.group().combine(moved, {.rows = rig.combined(0)});
  ASSERT_EQ(combined.code(), Code::kInvalidArgument);
  EXPECT_THAT(combined.error().message, HasSubstr("before the group's reset()"));
  handles.clear();
}

void expect_reuse_fault(EpGroupRig& rig, u32 seed) {
  const auto done = rig.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument) << "seed " << seed;
  EXPECT_THAT(done.error().message, HasSubstr("all ranks give the handle of the same earlier"));
  ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.round(seed));
}
TEST(EpReuse, ARankThatCountsAmongOthersThatDoNotIsFound) {
  const EpCase c{.world = 3, .max_tokens = 20};
  for (u32 seed = 1; seed <= 4; ++seed) {
    EpGroupRig rig = twin_rig(c);
    rig.group().core().launcher().set_schedule(weak_schedule(seed));
    rig.load(EpInputs(c, seed));
    const auto handles = rig.dispatch();
    std::vector<ep::Handle> second;
    for (const u32 r : {0u, 1u, 2u})
      second.push_back(
          r == seed % 3
              ? rig.group().dispatch(r, rig.tokens(r)).value()
              : rig.group().dispatch(r, rig.tokens_like(r), {.routing = &handles[r]}).value());
    ASSERT_NO_FATAL_FAILURE(expect_reuse_fault(rig, seed));
  }
}
TEST(EpReuse, RanksWithDifferentRoutingsAreFound) {
  const EpCase c{.world = 2, .max_tokens = 20};
  EpGroupRig rig = twin_rig(c, 3);
  rig.load(EpInputs(c, 1));
  const auto one = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  rig.load(EpInputs(c, 2));
  const auto two = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  std::vector<ep::Handle> third;
  third.push_back(rig.group().dispatch(0, rig.tokens_like(0), {.routing = &one[0]}).value());
  third.push_back(rig.group().dispatch(1, rig.tokens_like(1), {.routing = &two[1]}).value());
  ASSERT_NO_FATAL_FAILURE(expect_reuse_fault(rig, 3));
}

}  // namespace
}  // namespace crossdock::testing
