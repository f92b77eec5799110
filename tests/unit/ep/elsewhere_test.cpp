// Combines of what the experts have put elsewhere than in expert_input(), in the twin through the
// API: one handle many times with nothing in between, whatever memory its rows are in, and groups
// without
// slots of their own. SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

enum class Where { kSlot, kCopy, kCaller };

EpGroupRig rig_for(const EpCase& c, Where where) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.slots = 1;
  if (where == Where::kCaller) {
    const auto sizes = ep::sizes(options.ep, c.world).value();
    options.ep.slots = 0;
    options.ep.fall_back = false;
    options.ep.user_bytes = sizes.rows_bytes + sizes.input_bytes;
  }
  return EpGroupRig::create(c, options).value();
}
// Handles whose rows are where the test wants them; `slots` keeps those that have to be taken
// first.
std::vector<ep::Handle> dispatch_into(EpGroupRig& rig, Where where,
                                      std::vector<ep::Handle>& slots) {
  if (where == Where::kCopy) slots = rig.dispatch();
  if (where != Where::kCaller) return rig.dispatch();
  std::vector<ep::Handle> handles;
  const ep::Sizes& sizes = rig.group().memory();
  for (const u32 r : rig.group().local_ranks()) {
    const auto memory = rig.group().user_memory(r).value();
    handles.push_back(rig.group()
                          .dispatch(r, rig.tokens(r),
                                    {.output = memory.data(),
                                     .output_room = sizes.rows_bytes,
                                     .input = memory.data() + sizes.rows_bytes,
                                     .input_room = sizes.input_bytes})
                          .value());
  }
  return handles;
}

// Everything is queued before anything runs: a round's rows may be copied in only when the peers
// have read those of the round before.
void combine_at_once(const EpCase& c, Where where, u32 seed) {
  SCOPED_TRACE("where " + std::to_string(static_cast<int>(where)) + " seed " +
               std::to_string(seed));
  constexpr u32 kRounds = 4;
  EpGroupRig rig = rig_for(c, where);
  rig.group().core().launcher().set_schedule(weak_schedule(seed));
  const EpInputs inputs(c, seed);
  const EpReference reference(c, inputs);
  rig.load(inputs);
  std::vector<ep::Handle> slots;
  const auto handles = dispatch_into(rig, where, slots);
  std::vector<EpGroupRig::Elsewhere> made;
  std::vector<symm::LocalMemory> outs;
  for (u32 round = 1; round <= kRounds; ++round)
    for (const auto& handle : handles) {
      const u32 r = handle.rank();
      EXPECT_EQ(handle.copied(), where == Where::kCopy);
      made.push_back(rig.expert_rows_elsewhere(r, inputs, round));
      outs.push_back(rig.rank(r).allocate(u64{c.max_tokens} * c.combine_bytes).value());
      const auto done = rig.group().combine(
          handle, {.rows = outs.back().address(),
                   .experts = {made.back().rows.address(), made.back().weights.as<float>()}});
      ASSERT_TRUE(done.ok()) << done.error().describe();
    }
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 i = 0; i < outs.size(); ++i) {
    const u32 rank = handles[i % handles.size()].rank();
    ASSERT_NO_FATAL_FAILURE(rig.check_rows(
        rank, reference, 1 + i / static_cast<u32>(handles.size()), outs[i].address()))
        << "output " << i;
  }
}
TEST(EpElsewhere, AHandleIsCombinedAgainAtOnce) {
  for (const Where where : {Where::kSlot, Where::kCopy, Where::kCaller})
    for (u32 seed = 1; seed <= 6; ++seed) {
      combine_at_once({.world = 3, .max_tokens = 20, .tokens = {20, 0, 7}, .blocks = {3, 1}}, where,
                      seed);
      combine_at_once({.world = 2, .max_tokens = 12}, where, seed);
      if (HasFatalFailure()) return;
    }
}
TEST(EpElsewhere, TheirWeightsAreAddedUpToo) {
  EpCase c{.world = 2, .max_tokens = 12};
  c.combine_weights = true;
  EpGroupRig rig = rig_for(c, Where::kSlot);
  const EpInputs inputs(c, 3);
  rig.load(inputs);
  const auto handles = rig.dispatch();
  std::vector<EpGroupRig::Elsewhere> made;
  std::vector<symm::LocalMemory> sums;
  for (const auto& handle : handles) {
    made.push_back(rig.expert_rows_elsewhere(handle.rank(), inputs, 1));
    sums.push_back(rig.rank(handle.rank()).allocate(u64{c.max_tokens} * c.top_k * 4).value());
    // Rows where they belong, weights elsewhere.
    rig.write_expert_rows(handle, inputs, 1);
    ASSERT_TRUE(rig.group()
                    .combine(handle, {.rows = rig.combined(handle.rank()),
                                      .weights = sums.back().as<float>(),
                                      .experts = {.weights = made.back().weights.as<float>()}})
                    .ok());
  }
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  const EpReference reference(c, inputs);
  for (u32 i = 0; i < handles.size(); ++i) {
    const u64 count = u64{inputs.of(i).tokens} * c.top_k;
    const auto got = symm::download(rig.rank(i), sums[i].as<float>(), count, ep_soon());
    ASSERT_TRUE(got.ok());
    ASSERT_NO_FATAL_FAILURE(reference.check_weights(i, got->data()));
  }
}

TEST(EpElsewhere, MistakesAreNamed) {
  const EpCase c{.world = 1, .max_tokens = 8};
  EpGroupRig rig = rig_for(c, Where::kCaller);
  rig.load(EpInputs(c, 1));
  const auto no_output = rig.group().dispatch(0, rig.tokens(0));
  ASSERT_EQ(no_output.code(), Code::kInvalidArgument);
  EXPECT_THAT(no_output.error().message, HasSubstr("give an output in user_memory()"));
  std::vector<ep::Handle> slots;
  const auto handles = dispatch_into(rig, Where::kCaller, slots);
  const auto odd = rig.group().combine(
      handles[0], {.rows = rig.combined(0), .experts = {.rows = rig.combined(0) + 8}});
  ASSERT_EQ(odd.code(), Code::kInvalidArgument);
  EXPECT_THAT(odd.error().message, HasSubstr("multiple of 16"));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
}

}  // namespace
}  // namespace crossdock::testing
