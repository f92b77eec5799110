// Dispatches that find all slots held, in the twin through the API: their rows are copied, nothing
// that is held changes, ranks need not agree, and memory is used again.
// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpGroupRig twin_rig(const EpCase& c, u32 slots = 2, ep::CombineBy combine = ep::CombineBy::kPull) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.slots = slots;
  options.ep.combine = combine;
  return EpGroupRig::create(c, options).value();
}

// A handle and what has to be in its memory as long as it is held.
struct Held {
  ep::Handle handle;
  std::shared_ptr<EpInputs> inputs;
  u32 round;
};
void check_all(EpGroupRig& rig, const EpCase& c, const std::deque<Held>& held) {
  for (const Held& h : held)
    ASSERT_NO_FATAL_FAILURE(rig.check(h.handle, EpReference(c, *h.inputs)))
        << "rank " << h.handle.rank() << " round " << h.round
        << (h.handle.copied() ? " (copied)" : "");
}

// Each rank drops what it likes, so that they fall back in different rounds.
void hold_many(const EpCase& c, u32 seed) {
  EpGroupRig rig = twin_rig(c);
  std::mt19937 random(seed);
  std::deque<Held> held;
  u32 copies = 0;
  for (u32 round = 1; round <= 24; ++round) {
    rig.group().core().launcher().set_schedule(weak_schedule(seed * 100 + round));
    const auto inputs = std::make_shared<EpInputs>(c, seed * 100 + round);
    rig.load(*inputs);
    for (ep::Handle& handle : rig.dispatch()) {
      copies += handle.copied();
      held.push_back({std::move(handle), inputs, round});
    }
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    ASSERT_NO_FATAL_FAILURE(check_all(rig, c, held));
    while (held.size() > 40 || (held.size() > 10 && random() % 3 == 0))
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
  }
  EXPECT_GT(copies, 20u);
}
TEST(EpFallBack, WhatIsHeldStaysWhateverIsDropped) {
  hold_many({.world = 2, .max_tokens = 20, .scale_bytes = 8}, 1);
  hold_many({.world = 3,
             .max_tokens = 9,
             .scale_bytes = 12,
             .scales_by_column = true,
             .tokens = {9, 0, 4}},
            2);
}

TEST(EpFallBack, TwentyHandlesAtATimeUseTheSameMemoryAgain) {
  const EpCase c{.world = 2, .max_tokens = 8, .row_bytes = 4096, .combine_bytes = 4096};
  auto options = ep_options(c, symm::Backend::kCpu);
  const u64 copy = ep::sizes(options.ep, c.world)->copy_bytes;
  options.ranks.cpu_local_bytes = 30 * copy + (u64{1} << 20);
  EpGroupRig rig = EpGroupRig::create(c, options).value();
  const EpInputs inputs(c, 3);
  const EpReference reference(c, inputs);
  rig.load(inputs);
  for (u32 turn = 0; turn < 10; ++turn) {
    std::vector<std::vector<ep::Handle>> held;
    for (u32 i = 0; i < 20; ++i)
      held.push_back(rig.dispatch());
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handles : held)
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
    EXPECT_TRUE(held[2][0].copied());
    EXPECT_FALSE(held[1][0].copied());
  }
}

// Queued at once: dispatches through the transit one after the other, then the combines of all of
// them, whose inputs go through it too.
TEST(EpFallBack, CombinesOfCopiesInAnyOrder) {
  const EpCase c{.world = 3, .max_tokens = 24, .biases = 1};
  for (u32 seed = 1; seed <= 8; ++seed) {
    EpGroupRig rig = twin_rig(c, 1, seed % 2 == 0 ? ep::CombineBy::kPush : ep::CombineBy::kPull);
    rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(c, seed);
    const EpReference reference(c, inputs);
    rig.load(inputs);
    std::vector<std::vector<ep::Handle>> held;
    for (u32 i = 0; i < 5; ++i)
      held.push_back(rig.dispatch());
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (u32 i = 0; i < held.size(); ++i)
      for (const auto& handle : held[i]) {
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
        rig.write_expert_rows(handle, inputs, i);
      }
    std::vector<symm::LocalMemory> results;
    for (u32 r = 0; r < c.world; ++r)
      results.push_back(rig.rank(r).allocate(held.size() * c.max_tokens * c.combine_bytes).value());
    const auto result = [&](u32 r, u32 i) {
      return results[r].as<u8>() + u64{i} * c.max_tokens * c.combine_bytes;
    };
    for (const u32 i : {3u, 0u, 4u, 2u, 1u})
      for (const auto& handle : held[i])
        ASSERT_NO_FATAL_FAILURE(rig.combine(handle, result(handle.rank(), i)));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (u32 i = 0; i < held.size(); ++i)
      for (u32 r = 0; r < c.world; ++r)
        ASSERT_NO_FATAL_FAILURE(rig.check_rows(r, reference, i, result(r, i)))
            << "seed " << seed << " dispatch " << i;
  }
}

TEST(EpFallBack, ACopyLendsItsRoutingAndTakesOne) {
  const EpCase c{.world = 2, .max_tokens = 20, .scale_bytes = 8};
  EpGroupRig rig = twin_rig(c, 1);
  const EpInputs inputs(c, 7);
  const EpReference reference(c, inputs);
  rig.load(inputs);
  const auto slot = rig.dispatch();
  const auto copy = rig.dispatch();
  const auto copy_like_slot = rig.dispatch_like(slot);
  const auto copy_like_copy = rig.dispatch_like(copy);
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const auto* handles : {&slot, &copy, &copy_like_slot, &copy_like_copy})
    for (const auto& handle : *handles) {
      EXPECT_EQ(handle.copied(), handles != &slot);
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
    }
}

TEST(EpFallBack, ReservedCopiesAreTaken) {
  const EpCase c{.world = 1, .max_tokens = 8};
  EpGroupRig rig = twin_rig(c, 1);
  ASSERT_TRUE(rig.group().reserve_copies(0, 3).ok());
  ASSERT_TRUE(rig.group().reserve_copies(0, 2).ok());
  EXPECT_EQ(rig.group().reserve_copies(1, 2).code(), Code::kInvalidArgument);
  rig.load(EpInputs(c, 1));
  std::vector<std::vector<ep::Handle>> held;
  for (u32 i = 0; i < 5; ++i)
    held.push_back(rig.dispatch());
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.fall_back = false;
  EpGroupRig without = EpGroupRig::create(c, options).value();
  const auto refused = without.group().reserve_copies(0, 1);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("fall_back = false"));
}

// ---- outputs of the caller ---------------------------------------------------------------------

class EpCallerOutput : public ::testing::Test {
 protected:
  EpCallerOutput() {
    auto options = ep_options(case_, symm::Backend::kCpu);
    options.ep.slots = 1;
    options.ep.user_bytes = u64{1} << 20;
    rig_.emplace(EpGroupRig::create(case_, options).value());
    sizes_ = ep::sizes(options.ep, case_.world).value();
  }
  std::byte* memory(u32 rank) { return rig_->group().user_memory(rank)->data(); }
  // Each rank at a place of its own.
  ep::DispatchOptions how(u32 rank) {
    const u64 bytes = rig_->group().output_bytes(rig_->tokens(rank)).value();
    return {.output = memory(rank) + 1024 * rank,
            .output_room = bytes,
            .input = memory(rank) + (1 << 19) + 128 * rank,
            .input_room = sizes_.input_bytes};
  }
  EpCase case_{.world = 3, .max_tokens = 30, .scale_bytes = 12, .biases = 1};
  std::optional<EpGroupRig> rig_;
  ep::Sizes sizes_;
};

TEST_F(EpCallerOutput, RowsArriveThereAndAreCombinedFromThere) {
  EXPECT_EQ(sizes_.user_bytes, u64{1} << 20);
  for (u32 seed = 1; seed <= 4; ++seed) {
    rig_->group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(case_, seed);
    const EpReference reference(case_, inputs);
    rig_->load(inputs);
    // A slot and a copy are held meanwhile, and one rank takes no output of its own.
    const auto slot = rig_->dispatch();
    const auto copy = rig_->dispatch();
    std::vector<ep::Handle> own;
    for (const u32 r : {0u, 1u, 2u})
      own.push_back(
          rig_->group()
              .dispatch(r, rig_->tokens(r), r == seed % 3 ? ep::DispatchOptions{} : how(r))
              .value());
    ASSERT_NO_FATAL_FAILURE(rig_->synchronize());
    for (const auto* handles : {&slot, &copy})
      for (const auto& handle : *handles)
        ASSERT_NO_FATAL_FAILURE(rig_->check(handle, reference));
    for (const auto& handle : own) {
      if (handle.rank() != seed % 3) {
        EXPECT_EQ(handle.received().rows, how(handle.rank()).output);
        EXPECT_FALSE(handle.copied());
      }
      ASSERT_NO_FATAL_FAILURE(rig_->check(handle, reference));
      rig_->write_expert_rows(handle, inputs, seed);
    }
    for (const auto& handle : own)
      ASSERT_NO_FATAL_FAILURE(rig_->combine(handle));
    ASSERT_NO_FATAL_FAILURE(rig_->synchronize());
    for (u32 r = 0; r < case_.world; ++r)
      ASSERT_NO_FATAL_FAILURE(rig_->check_combined(r, reference, seed));
  }
}
TEST_F(EpCallerOutput, WrongPlacesAreRefused) {
  rig_->load(EpInputs(case_, 1));
  const auto refuse = [&](const auto& change, const char* text) {
    ep::DispatchOptions options = how(0);
    change(options);
    const auto got = rig_->group().dispatch(0, rig_->tokens(0), options);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([&](auto& o) { o.output = rig_->combined(0); }, "must lie in user_memory() of rank 0");
  refuse([&](auto& o) { o.output = memory(1); }, "must lie in user_memory() of rank 0");
  refuse([&](auto& o) { o.output = memory(0) + (1 << 20); }, "must lie in user_memory()");
  refuse([&](auto& o) { o.output_room = u64{1} << 40; }, "must lie in user_memory()");
  refuse([&](auto& o) { o.output = memory(0) + 64; }, "must lie on a multiple of 128");
  refuse([&](auto& o) { o.output_room -= 1; }, "the output has room for");
  refuse([&](auto& o) { o.input_room = 128; }, "the input has room for 128 bytes");
  refuse([&](auto& o) { o.input = memory(0) + 4; }, "the input at");
  refuse([&](auto& o) { o.output = nullptr; }, "an input without an output");
  EXPECT_EQ(rig_->group().user_memory(3).code(), Code::kInvalidArgument);
  EXPECT_EQ(rig_->group().output_bytes({.row_bytes = 24}).code(), Code::kInvalidArgument);
}
TEST_F(EpCallerOutput, WithoutAnInputThereIsNoCombine) {
  rig_->load(EpInputs(case_, 1));
  std::vector<ep::Handle> handles;
  for (const u32 r : {0u, 1u, 2u}) {
    auto options = how(r);
    options.input = nullptr;
    handles.push_back(rig_->group().dispatch(r, rig_->tokens(r), options).value());
  }
  ASSERT_NO_FATAL_FAILURE(rig_->synchronize());
  EXPECT_EQ(handles[0].expert_input().rows, nullptr);
  const auto refused = rig_->group().combine(handles[0], {.rows = rig_->combined(0)});
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("DispatchOptions::input"));
}

}  // namespace
}  // namespace crossdock::testing
