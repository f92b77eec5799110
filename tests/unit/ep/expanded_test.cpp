// Dispatches that copy rows to the places of their choices, in the twin through the API: beside the
// dispatch where the group has SMs for it, else afterwards; against plain loops over what was
// delivered. SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_expanded.hpp"
#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

constexpr u32 kAlignment = 8;

struct Layout {
  bool masked = false;
  bool scales_by_column = false;
  u32 gap = 0;  // bytes between rows
  u32 expand_sms = 2;
  u32 slots = 2;
  bool masks = false;  // of ranks, with a case that is `fixed`
};

ep::GroupOptions expanding(const EpCase& c, const Layout& layout) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.expert_alignment = kAlignment;
  options.ep.expand_sms = layout.expand_sms;
  options.ep.slots = layout.slots;
  if (!layout.masks) return options;
  options.ep.masks = options.ep.mask_late = true;
  options.ep.small_tokens = 0;
  return options;
}

// A rig, and memory for copies of every rank, made for the handles of a first dispatch.
struct ExpandedRig {
  EpGroupRig rig;
  std::vector<ep::Handle> first;
  std::vector<EpExpandedMemory> memory;

  ExpandedRig(const EpCase& c, const Layout& layout)
      : rig(EpGroupRig::create(c, expanding(c, layout)).value()) {
    rig.load(EpInputs(c, 99));
    first = rig.dispatch();
    for (const auto& handle : first) {
      const auto grouped = rig.group().group_rows(handle).value();
      auto shape = expanded_shape(c, handle, grouped, kAlignment, layout.masked);
      shape.scales_by_column = layout.scales_by_column;
      shape.row_gap = layout.gap;
      memory.emplace_back(rig.rank(handle.rank()), handle, grouped, shape);
    }
    EXPECT_TRUE(rig.group().synchronize(ep_soon()).ok());
  }
  // `like`: whose routing is used again; `gone`: ranks that do not come, a bit each.
  std::vector<ep::Handle> dispatch(const std::vector<ep::Handle>* like = nullptr, u32 gone = 0) {
    std::vector<ep::Handle> handles;
    for (u32 r = 0; r < memory.size(); ++r) {
      if ((gone >> r & 1u) != 0) continue;
      const ep::Expanded to = memory[r].to();
      handles.push_back(
          rig.group()
              .dispatch(r, like != nullptr ? rig.tokens_like(r) : rig.tokens(r),
                        {.routing = like != nullptr ? &(*like)[r] : nullptr, .expanded = &to})
              .value());
    }
    return handles;
  }
  void check(const std::vector<ep::Handle>& handles, const EpReference& reference) {
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles) {
      EpExpandedMemory& of = memory[handle.rank()];
      of.take(handle, rig.group().grouped(handle).value());
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference)) << "rank " << handle.rank();
      ASSERT_NO_FATAL_FAILURE(of.check(ep_soon())) << "rank " << handle.rank();
    }
  }
};

void expand(const EpCase& c, u32 seed, const Layout& layout) {
  SCOPED_TRACE("seed " + std::to_string(seed) + (layout.masked ? " masked" : " expanded"));
  ExpandedRig x(c, layout);
  x.rig.group().core().launcher().set_schedule(weak_schedule(seed));
  const EpInputs inputs(c, seed);
  x.rig.load(inputs);
  const auto handles = x.dispatch();
  ASSERT_NO_FATAL_FAILURE(x.check(handles, EpReference(c, inputs)));
}

TEST(EpExpanded, EveryLayoutOfEveryRoutingBesideAndAfterwards) {
  u32 seed = 0;
  for (const EpRoutingKind kind : {EpRoutingKind::kRandom, EpRoutingKind::kOneExpert,
                                   EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    for (const bool masked : {false, true})
      for (const u32 expand_sms : {0u, 2u}) {
        ++seed;
        expand({.world = 2,
                .experts = 7,
                .max_tokens = 30,
                .row_bytes = 64 + 16 * (seed % 3),
                .scale_bytes = 12,
                .scales_by_column = seed % 3 == 0,
                .routing = kind},
               seed,
               {.masked = masked,
                .scales_by_column = seed / 2 % 2 == 0,
                .gap = 16 * (seed % 2),
                .expand_sms = expand_sms});
        if (HasFatalFailure()) return;
      }
}
TEST(EpExpanded, LargeRowsManyChoicesWideIdsNoWeights) {
  expand({.world = 2, .max_tokens = 12, .row_bytes = 7184, .combine_bytes = 64}, 1, {});
  expand({.world = 2, .max_tokens = 5, .row_bytes = 32768, .combine_bytes = 64}, 2,
         {.masked = true});
  expand({.world = 3, .experts = 40, .top_k = 32, .max_tokens = 9, .wide_ids = true}, 3, {});
  expand({.world = 2, .weights = false, .tokens = {0}}, 4, {});
  expand({.world = 2, .max_tokens = 10, .row_bytes = 512, .cast = true, .combine_bytes = 512}, 5,
         {});
}
// With one slot, which the first dispatch holds.
TEST(EpExpanded, RowsThatAreCopiedOutAreCopiedByExpertToo) {
  expand({.world = 2, .experts = 5, .max_tokens = 14, .scale_bytes = 8}, 6, {.slots = 1});
}
TEST(EpExpanded, FewTokensAreCopiedAfterwards) {
  expand({.world = 3, .experts = 7, .max_tokens = 14, .scale_bytes = 12, .fixed = true}, 7, {});
}
// Beside the dispatch too, from what the earlier one has delivered, which may be a copy.
TEST(EpExpanded, AReusedRoutingIsCopiedBesideToo) {
  for (const bool masks : {false, true})
    for (const u32 slots : {1u, 3u}) {
      const EpCase c{
          .world = 2, .experts = 6, .max_tokens = 20, .tokens = {20, 13}, .fixed = masks};
      ExpandedRig x(c, {.slots = slots, .masks = masks});
      EpInputs inputs(c, 8);
      x.rig.load(inputs);
      const auto handles = x.dispatch();
      ASSERT_NO_FATAL_FAILURE(x.check(handles, EpReference(c, inputs)));
      for (u32 seed = 9; seed < 12; ++seed) {
        x.rig.group().core().launcher().set_schedule(weak_schedule(seed));
        EpInputs others(c, seed);
        for (u32 r = 0; r < c.world; ++r) {
          others.of(r).ids = inputs.of(r).ids;
          others.of(r).weights = inputs.of(r).weights;
        }
        x.rig.load(others);
        for (EpExpandedMemory& m : x.memory)
          m.fill(ep_soon());
        const auto again = x.dispatch(&handles);
        ASSERT_NO_FATAL_FAILURE(x.check(again, EpReference(c, others))) << seed;
      }
    }
}
// Beside the dispatch as after it, byte by byte.
TEST(EpExpanded, MaskedRanksAreLeftOut) {
  const EpCase c{.world = 3,
                 .experts = 7,
                 .max_tokens = 17,
                 .scale_bytes = 12,
                 .tokens = {17, 4, 9},
                 .fixed = true};
  for (const bool masked : {false, true})
    for (const u32 expand_sms : {0u, 2u}) {
      SCOPED_TRACE(expand_sms);
      ExpandedRig x(c, {.masked = masked, .expand_sms = expand_sms, .masks = true});
      x.first.clear();  // nobody is let in while a handle waits for its combine
      EpInputs seen(c, 0);
      for (u32 round = 0; round < 6; ++round) {
        // Nobody; rank 1, which the others have masked; and rank 2, which kernels mask.
        const u32 gone = round < 2 ? 0b000 : round < 4 ? 0b010 : 0b110;
        x.rig.group().core().launcher().set_schedule(weak_schedule(round + 1));
        for (const u32 r : {0u, 2u})
          ASSERT_TRUE(x.rig.group().mask(r, 1, round >= 2).ok());
        const EpInputs all(c, round);
        x.rig.load(all);
        seen = all;
        for (u32 r = 0; r < c.world; ++r)
          if ((gone >> r & 1u) != 0) seen = seen.without(r);
        for (EpExpandedMemory& m : x.memory)
          m.fill(ep_soon());
        const auto handles = x.dispatch(nullptr, gone);
        ASSERT_NO_FATAL_FAILURE(x.check(handles, EpReference(c, seen))) << "round " << round;
      }
      EXPECT_EQ(x.rig.group().masked(0, ep_soon()).value(), 0b110u);
    }
}
// Launches in turns with and without copies, replays of which nobody waits.
TEST(EpExpanded, TurnsWithAndWithoutCopies) {
  const EpCase c{.world = 3, .experts = 8, .max_tokens = 40};
  ExpandedRig x(c, {});
  x.first.clear();
  for (u32 round = 0; round < 6; ++round) {
    x.rig.group().core().launcher().set_schedule(weak_schedule(round + 1));
    const EpInputs inputs(c, round);
    x.rig.load(inputs);
    if (round % 3 == 1) {
      const auto plain = x.rig.dispatch();
      ASSERT_NO_FATAL_FAILURE(x.rig.synchronize());
      for (const auto& handle : plain) {
        ASSERT_NO_FATAL_FAILURE(x.rig.check(handle, EpReference(c, inputs)));
        EXPECT_THAT(x.rig.group().grouped(handle).error().message, HasSubstr("group_rows() first"));
      }
      continue;
    }
    for (EpExpandedMemory& m : x.memory)
      m.fill(ep_soon());
    const auto handles = x.dispatch();
    ASSERT_NO_FATAL_FAILURE(x.check(handles, EpReference(c, inputs))) << "round " << round;
  }
}

TEST(EpExpanded, TheRuleTakesHalfAsManyAgainAsKeepPace) {
  EXPECT_EQ(ep::default_expand_sms(4, 8), 40u);
  EXPECT_EQ(ep::default_expand_sms(1, 8), 104u);
  EXPECT_EQ(ep::default_expand_sms(1, 1), 32u);
  EXPECT_EQ(ep::default_expand_sms(8, 8), 24u);
  const EpCase c{.world = 4, .experts = 1000, .top_k = 8};
  ep::Options options = expanding(c, {.expand_sms = ep::kAutoSms}).ep;
  const auto bytes = [&](u32 expand_sms) {
    options.expand_sms = expand_sms;
    const auto got = ep::sizes(options, c.world).value();
    return std::pair(got.control_bytes, got.local_bytes);
  };
  EXPECT_EQ(bytes(ep::kAutoSms), bytes(40));
  EXPECT_NE(bytes(ep::kAutoSms), bytes(0));
  options.experts = 1100;  // more than 256 a rank: copies follow
  EXPECT_EQ(bytes(ep::kAutoSms), bytes(0));
}

// ---- mistakes ----------------------------------------------------------------------------------

TEST(EpExpanded, OptionsThatDoNotGoTogetherAreRefused) {
  const EpCase c{.world = 2, .experts = 8};
  const auto refuse = [&](const auto& change, const char* text) {
    auto options = expanding(c, {});
    change(options.ep);
    const auto got = ep::Group::create(options);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](ep::Options& o) { o.expert_alignment = 0; }, "expand_sms = 2 needs expert_alignment");
  refuse([](ep::Options& o) { o.experts = 600; }, "at most 256 experts a rank, not 300");
  refuse([](ep::Options& o) { o.expand_sms = 161; }, "expand_sms = 161 must be at most 160");
}
TEST(EpExpanded, WrongPlanesAreRefusedBeforeAnythingIsSent) {
  const EpCase c{.world = 1, .experts = 4, .max_tokens = 8, .weights = false};
  EpGroupRig rig = EpGroupRig::create(c, expanding(c, {})).value();
  rig.load(EpInputs(c, 1));
  auto memory = rig.rank(0).allocate(1 << 12).value();
  const auto refuse = [&](const ep::Expanded& to, const char* text) {
    const auto got = rig.group().dispatch(0, rig.tokens(0), {.expanded = &to});
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  u8* at = memory.as<u8>();
  refuse({.places = 64, .rows = at + 8}, "multiples of 16");
  refuse({.places = 64, .scales = at}, "the dispatch had no scales");
  refuse({.places = 64, .weights = memory.as<float>()}, "the dispatch had no weights");
  const ep::Expanded to{.places = 64, .rows = at};
  EXPECT_THAT(rig.group().dispatch_send(0, rig.tokens(0), {.expanded = &to}).error().message,
              HasSubstr("small"));
  auto plain = ep_options(c, symm::Backend::kCpu);
  EpGroupRig without = EpGroupRig::create(c, plain).value();
  without.load(EpInputs(c, 1));
  EXPECT_THAT(without.group().dispatch(0, without.tokens(0), {.expanded = &to}).error().message,
              HasSubstr("expert_alignment = 0"));
}
TEST(EpExpanded, TooLittleRoomIsAFaultAndNothingIsCopied) {
  const EpCase c{.world = 1, .experts = 2, .max_tokens = 20, .routing = EpRoutingKind::kOneExpert};
  EpGroupRig rig = EpGroupRig::create(c, expanding(c, {})).value();
  rig.load(EpInputs(c, 1));
  auto rows = rig.rank(0).allocate(80 * c.row_bytes).value();
  std::memset(rows.address(), 0xee, rows.bytes());
  const ep::Expanded to{.places = 79, .rows = rows.address()};  // 80 choices
  const auto handle = rig.group().dispatch(0, rig.tokens(0), {.expanded = &to}).value();
  const auto done = rig.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument) << done.error().describe();
  EXPECT_THAT(done.error().message, HasSubstr("room for 79"));
  for (u64 i = 0; i < rows.bytes(); ++i)
    ASSERT_EQ(rows.as<u8>()[i], 0xee);
}

}  // namespace
}  // namespace crossdock::testing
