// ep::Group in the twin through its API: rounds of dispatch and combine, slots, counts on the host,
// statistics, options and arguments that are wrong, faults as errors, the list of kernel variants.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>

#include <crossdock/ep/group.hpp>

#include "jit/kernel_list.hpp"
#include "support/ep_group_rig.hpp"
#include "support/symm_members.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpGroupRig twin_rig(const EpCase& c) {
  return EpGroupRig::create(c, symm::Backend::kCpu).value();
}

TEST(EpGroup, RoundsOfDispatchAndCombineInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 5u}) {
    SCOPED_TRACE(world);
    EpGroupRig rig = twin_rig({.world = world, .max_tokens = 40, .scale_bytes = 16, .biases = 2});
    for (u32 seed = 1; seed <= 3; ++seed) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      ASSERT_NO_FATAL_FAILURE(rig.round(seed));
    }
  }
}
TEST(EpGroup, CastsAndTakesWideIds) {
  EpGroupRig rig = twin_rig({.world = 2,
                             .max_tokens = 20,
                             .row_bytes = 512,
                             .cast = true,
                             .wide_ids = true,
                             .combine_bytes = 512});
  for (u32 seed = 1; seed <= 3; ++seed)
    ASSERT_NO_FATAL_FAILURE(rig.round(seed));
}

TEST(EpGroup, RoundsByPushWithOverlappingLaunches) {
  for (const u32 world : {1u, 2u, 4u}) {
    SCOPED_TRACE(world);
    EpGroupRig rig = twin_rig({.world = world,
                               .max_tokens = 40,
                               .biases = 1,
                               .blocks = {3, 2},
                               .push = true,
                               .overlap = true});
    for (u32 seed = 1; seed <= 3; ++seed) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      ASSERT_NO_FATAL_FAILURE(rig.round(seed));
    }
  }
}
TEST(EpGroup, CountsAreNotToldToTheHostWhenNotWanted) {
  const EpCase c{.world = 2, .host_counts = false};
  EpGroupRig rig = twin_rig(c);
  const EpInputs inputs(c, 3);
  rig.load(inputs);
  auto handles = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  ASSERT_NO_FATAL_FAILURE(rig.check(handles[0], EpReference(c, inputs)));
  for (const Code code :
       {handles[0].rows(ep_soon()).code(), handles[0].expert_counts(ep_soon()).code()})
    EXPECT_EQ(code, Code::kInvalidArgument);
}

TEST(EpGroup, SlotsAreHeldByHandlesAndGivenBack) {
  const EpCase c{.world = 2};
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.fall_back = false;
  EpGroupRig rig(c, ep::Group::create(options).value());
  rig.load(EpInputs(c, 1));
  auto first = rig.dispatch();
  auto second = rig.dispatch();
  EXPECT_NE(first[0].received().rows, second[0].received().rows);
  const auto refused = rig.group().dispatch(0, rig.tokens(0));
  ASSERT_EQ(refused.code(), Code::kBusy);
  EXPECT_THAT(refused.error().message, HasSubstr("all 2 slots of rank 0"));
  void* rows = first[0].received().rows;
  first.clear();
  auto third = rig.dispatch();
  EXPECT_EQ(third[0].received().rows, rows);
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  const EpInputs inputs(c, 1);
  const EpReference reference(c, inputs);
  for (const auto& handle : third)
    ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
}

TEST(EpGroup, TwoDispatchesThenTwoCombinesInBothOrders) {
  const EpCase c{.world = 3, .max_tokens = 20, .biases = 1};
  for (const bool reversed : {false, true}) {
    EpGroupRig rig = twin_rig(c);
    rig.group().core().launcher().set_schedule(weak_schedule(reversed));
    const EpInputs inputs(c, 1);
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
    for (const u32 round : reversed ? std::vector<u32>{2, 1} : std::vector<u32>{1, 2}) {
      for (const auto& handle : round == 1 ? first : second)
        ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (u32 r = 0; r < c.world; ++r)
        ASSERT_NO_FATAL_FAILURE(rig.check_combined(r, reference, round));
    }
  }
}
TEST(EpGroup, TwoGroupsInterleave) {
  const EpCase c{.world = 2, .max_tokens = 12}, d{.world = 2, .experts = 6, .max_tokens = 7};
  EpGroupRig one = twin_rig(c), other = twin_rig(d);
  for (u32 seed = 1; seed <= 3; ++seed) {
    const EpInputs of_one(c, seed), of_other(d, seed);
    one.load(of_one);
    other.load(of_other);
    const auto first = one.dispatch();
    const auto second = other.dispatch();
    ASSERT_NO_FATAL_FAILURE(other.synchronize());
    ASSERT_NO_FATAL_FAILURE(one.synchronize());
    for (const auto& handle : first)
      ASSERT_NO_FATAL_FAILURE(one.check(handle, EpReference(c, of_one)));
    for (const auto& handle : second)
      ASSERT_NO_FATAL_FAILURE(other.check(handle, EpReference(d, of_other)));
  }
}
TEST(EpGroup, RowsOfThirtyTwoKibibytes) {
  EpGroupRig rig = twin_rig(
      {.world = 3, .max_tokens = 5, .row_bytes = 32768, .combine_bytes = 32768, .biases = 1});
  ASSERT_NO_FATAL_FAILURE(rig.round(1));
}

// Every value goes through: of the rows to the experts, of the experts' through the sum.
TEST(EpGroup, NotANumberAndInfinityPass) {
  const EpCase c{.world = 2, .experts = 2, .top_k = 2, .max_tokens = 4};
  EpGroupRig rig = twin_rig(c);
  EpInputs inputs(c, 1);
  for (u32 r = 0; r < c.world; ++r)
    for (u32 t = 0; t < inputs.of(r).tokens; ++t) {
      inputs.of(r).ids[t * 2] = 0;
      inputs.of(r).ids[t * 2 + 1] = t == 3 ? -1 : 1;
    }
  rig.load(inputs);
  const auto handles = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  // Of ranks 0 and 1: NaN + 1, inf + 1, inf - inf, -inf alone.
  constexpr u16 kOne = 0x3f80, kNan = 0x7fc0, kInfinity = 0x7f80, kMinusInfinity = 0xff80;
  constexpr u16 kMade[2][4] = {{kNan, kInfinity, kInfinity, kMinusInfinity},
                               {kOne, kOne, kMinusInfinity, kOne}};
  for (const auto& handle : handles) {
    ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, inputs)));
    const u32 rows = handle.rows(ep_soon()).value();
    for (u32 row = 0; row < rows; ++row)
      for (u32 i = 0; i < c.combine_bytes / 2; ++i)
        static_cast<u16*>(handle.expert_input().rows)[row * c.combine_bytes / 2 + i] =
            kMade[handle.rank()][handle.received().tokens[row]];
  }
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 r = 0; r < c.world; ++r)
    for (u32 t = 0; t < inputs.of(r).tokens; ++t)
      for (u32 i = 0; i < c.combine_bytes / 2; ++i) {
        const float got =
            from_bf16(reinterpret_cast<const u16*>(rig.combined(r))[t * c.combine_bytes / 2 + i]);
        if (t == 0 || t == 2) {
          ASSERT_NE(got, got) << "token " << t;
        } else {
          ASSERT_EQ(got, t == 1 ? INFINITY : -INFINITY) << "token " << t;
        }
      }
}

TEST(EpGroup, HandlesOutliveTheGroup) {
  const EpCase c{.world = 1};
  std::optional<EpGroupRig> rig(twin_rig(c));
  rig->load(EpInputs(c, 1));
  auto handles = rig->dispatch();
  ASSERT_NO_FATAL_FAILURE(rig->synchronize());
  rig.reset();
  EXPECT_GT(handles[0].rows(ep_soon()).value(), 0u);
}

TEST(EpGroup, StatisticsAddUp) {
  const EpCase c{.world = 2, .experts = 5};
  EpGroupRig rig = twin_rig(c);
  std::vector<std::uint64_t> sums(3, 0);
  for (u32 seed = 1; seed <= 3; ++seed) {
    rig.load(EpInputs(c, seed));
    auto handles = rig.dispatch();
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    const auto counts = handles[0].expert_counts(ep_soon()).value();
    for (u32 e = 0; e < counts.size(); ++e)
      sums[e] += counts[e];
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
  const auto got = rig.group().statistics(0, ep_soon()).value();
  EXPECT_EQ(got.expert_selections, sums);
  ASSERT_EQ(got.source_wait_ns.size(), 2u);
  // Rank 0 cannot have had the other's rows without waiting for them: time goes on while it polls.
  EXPECT_GT(got.source_wait_ns[1], 0u);
  ASSERT_EQ(got.combine_wait_ns.size(), 2u);
  EXPECT_GT(got.combine_wait_ns[1], 0u);
  const auto kept = rig.group().statistics_memory(0).value();
  EXPECT_EQ(std::vector<std::uint64_t>(kept.expert_selections, kept.expert_selections + 3), sums);
  EXPECT_EQ(kept.source_wait_ns[1], got.source_wait_ns[1]);
  EXPECT_EQ(kept.combine_wait_ns[1], got.combine_wait_ns[1]);
  EXPECT_EQ(rig.group().statistics_memory(2).code(), Code::kInvalidArgument);
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.statistics = false;
  EpGroupRig without = EpGroupRig::create(c, options).value();
  ASSERT_NO_FATAL_FAILURE(without.round(1));
  EXPECT_EQ(without.group().statistics_memory(0)->expert_selections, nullptr);
  EXPECT_THAT(without.group().statistics(0, ep_soon()).error().message,
              HasSubstr("statistics = false"));
  EXPECT_EQ(rig.group().statistics(2, ep_soon()).code(), Code::kInvalidArgument);
}

// ---- mistakes ----------------------------------------------------------------------------------

TEST(EpGroup, WrongOptionsSayTheRuleTheValueAndTheFix) {
  const ep::Options good{.experts = 8, .top_k = 2, .max_tokens = 16, .hidden = 256};
  ASSERT_TRUE(ep::sizes(good, 4).ok());
  const auto refuse = [&](const auto& change, u32 world, const char* text) {
    ep::Options options = good;
    change(options);
    const auto got = ep::sizes(options, world);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](auto&) {}, 33, "world = 33 must be 1 to 32");
  refuse([](auto& o) { o.experts = 0; }, 4, "experts = 0");
  refuse([](auto& o) { o.top_k = 33; }, 4, "top_k = 33 must be 1 to 32");
  refuse([](auto& o) { o.max_tokens = 0; }, 4, "max_tokens = 0");
  refuse([](auto& o) { o.hidden = 7000; }, 4, "pad to 7040");
  refuse([](auto& o) { o.hidden = 12; }, 4, "pad the rows to 16");
  refuse([](auto& o) { o.hidden = 16640; }, 4, "at most 32768");
  refuse([](auto& o) { o.row_bytes = 100; }, 4, "multiple of 16");
  refuse([](auto& o) { o.scale_bytes = 30; }, 4, "pad to 32");
  refuse([](auto& o) { o.slots = 0; }, 4, "slots = 0");
  refuse([](auto& o) { o.dispatch_sms_of = {4, 0, 4, 4}; }, 4, "dispatch_sms = 0");
  refuse([](auto& o) { o.combine_sms_of = {1, 2}; }, 4, "has 2 numbers for 4 ranks");
  refuse([](auto& o) { o.combine = ep::CombineBy::kPush, o.combine_sms = 1; }, 4,
         "combine_sms = 1 by push must be at least 2");
  refuse(
      [](auto& o) {
        o.combine = ep::CombineBy::kPush;
        o.combine_sms = o.combine_send_sms = 4;
      },
      4, "more than combine_send_sms = 4");
  refuse([](auto& o) { o.max_tokens = 40000, o.dispatch_sms = 4; }, 4, "dispatch_sms = 4 must be");
}

TEST(EpGroup, DefaultSmsFollowTheShareThatStays) {
  EXPECT_EQ(ep::default_dispatch_sms(2), 18u);
  EXPECT_EQ(ep::default_dispatch_sms(4), 12u);
  EXPECT_EQ(ep::default_dispatch_sms(8), 11u);
  EXPECT_EQ(ep::default_combine_sms(2), 12u);
  EXPECT_EQ(ep::default_combine_sms(4), 8u);
  EXPECT_EQ(ep::default_combine_sms(32), 8u);
}

TEST(EpGroup, SizesAreTheRowsThatCanArrive) {
  const ep::Options options{.experts = 256, .top_k = 8, .max_tokens = 4096, .hidden = 7168};
  const auto sizes = ep::sizes(options, 4).value();
  const double rows = 4.0 * 4096 * 7168 * 2;
  EXPECT_EQ(sizes.capacity, 16384u);
  EXPECT_LT(static_cast<double>(sizes.rows_bytes), 1.1 * rows);
  EXPECT_LT(static_cast<double>(sizes.input_bytes), 1.1 * rows);
  const auto slot = sizes.rows_bytes + sizes.input_bytes;
  EXPECT_EQ(sizes.transit_bytes, slot);
  EXPECT_EQ(sizes.window_bytes, sizes.control_bytes + options.slots * slot + sizes.transit_bytes);
  EXPECT_LT(static_cast<double>(sizes.copy_bytes), 2 * 1.1 * rows);
  EXPECT_LT(sizes.control_bytes, 1u << 20);
}

TEST(EpGroup, PushTakesStagingAsLargeAsTheOutputsOfASlot) {
  ep::Options options{.experts = 256, .top_k = 8, .max_tokens = 4096, .hidden = 7168};
  EXPECT_EQ(ep::sizes(options, 4).value().staging_bytes, 0u);
  const auto pull = ep::sizes(options, 4).value();
  options.combine = ep::CombineBy::kPush;
  const auto push = ep::sizes(options, 4).value();
  EXPECT_NEAR(static_cast<double>(push.staging_bytes), 4.0 * 4096 * 7168 * 2, 1e6);
  EXPECT_EQ(push.window_bytes, pull.window_bytes + push.staging_bytes);
  EXPECT_EQ(ep::sizes(options, 1).value().staging_bytes, 0u);
  // By size: pull, which no push has outrun so far.
  options.combine = ep::CombineBy::kBySize;
  options.combine_sms = 24;
  EXPECT_EQ(ep::sizes(options, 4).value().staging_bytes, 0u);
}

TEST(EpGroup, WrongTokensAreRefused) {
  const EpCase c{.world = 2, .max_tokens = 8, .combine_bytes = 256};
  EpGroupRig rig = twin_rig(c);
  rig.load(EpInputs(c, 1));
  const auto refuse = [&](const auto& change, const char* text) {
    ep::Tokens tokens = rig.tokens(0);
    change(tokens);
    const auto got = rig.group().dispatch(0, tokens);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](auto& t) { t.count = 9; }, "9 tokens are more than the max_tokens = 8");
  refuse([](auto& t) { t.row_bytes = 40; }, "row_bytes = 40");
  refuse([](auto& t) { t.row_bytes = 4096; }, "do not fit the slots");
  refuse([](auto& t) { t.cast = true; }, "a group made with cast = true");
  refuse([](auto& t) { t.rows = nullptr; }, "rows at");
  refuse([](auto& t) { t.rows = static_cast<const u8*>(t.rows) + 4; }, "multiples of 16");
  refuse([](auto& t) { t.row_stride = 24; }, "stride of 24");
  refuse([](auto& t) { t.scale_bytes = 6; }, "multiple of 4");
  refuse([](auto& t) { t.ids = nullptr; }, "ids at");
  EXPECT_EQ(rig.group().dispatch(2, rig.tokens(0)).code(), Code::kInvalidArgument);
}

TEST(EpGroup, CombineRefusesForeignHandlesAndBadOutputs) {
  const EpCase c{.world = 1};
  EpGroupRig rig = twin_rig(c), other = twin_rig(c);
  rig.load(EpInputs(c, 1));
  const auto handles = rig.dispatch();
  const auto foreign = other.group().combine(handles[0], {.rows = other.combined(0)});
  ASSERT_EQ(foreign.code(), Code::kInvalidArgument);
  EXPECT_THAT(foreign.error().message, HasSubstr("another group"));
  EXPECT_EQ(rig.group().combine(handles[0], {.rows = rig.combined(0) + 8}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(rig.group().combine(handles[0], {}).code(), Code::kInvalidArgument);
  auto* const odd = reinterpret_cast<float*>(rig.combined(0) + 2);
  const auto refused = rig.group().combine(handles[0], {.rows = rig.combined(0), .weights = odd});
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("must begin on a multiple of 4: they are f32"));
}

TEST(EpGroup, AnIdOutOfRangeIsAnErrorThatNamesTokenAndId) {
  const EpCase c{.world = 3};
  EpGroupRig rig = twin_rig(c);
  EpInputs inputs(c, 1);
  inputs.of(1).ids[5 * c.top_k + 1] = 99;
  rig.load(inputs);
  {
    const auto handles = rig.dispatch();
    const auto done = rig.group().synchronize(ep_soon());
    ASSERT_FALSE(done.ok());
    bool named = false;
    for (const u32 r : rig.group().local_ranks()) {
      const auto fault = rig.rank(r).check();
      ASSERT_FALSE(fault.ok()) << r;
      if (fault.code() != Code::kInvalidArgument) {
        EXPECT_THAT(fault.error().message, HasSubstr("rank 1 has failed"));
        continue;
      }
      named = r == 1;
      EXPECT_THAT(fault.error().message, HasSubstr("token 5 of rank 1 chooses expert 99"));
    }
    EXPECT_TRUE(named);
    // The rows' number is an error too, at once.
    EXPECT_FALSE(handles[0].expert_counts(ep_soon()).ok());
  }
  ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.round(2));
}

TEST(EpGroup, RanksWithDifferentRowsAreFound) {
  const EpCase c{.world = 3, .scale_bytes = 8};
  EpGroupRig rig = twin_rig(c);
  const auto expect = [&](const auto& change, const char* text) {
    rig.load(EpInputs(c, 1));
    std::vector<ep::Handle> handles;
    for (const u32 r : {0u, 1u, 2u}) {
      ep::Tokens tokens = rig.tokens(r);
      if (r == 1) change(tokens);
      handles.push_back(rig.group().dispatch(r, tokens).value());
    }
    const auto done = rig.group().synchronize(ep_soon());
    ASSERT_EQ(done.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(done.error().message, HasSubstr(text));
    handles.clear();
    ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
    ASSERT_NO_FATAL_FAILURE(rig.round(2));
  };
  expect([](auto& t) { t.row_bytes = 32; }, "rank 0 has rows of 64 bytes and rank 1 of 32");
  expect([](auto& t) { t.scale_bytes = 0; }, "or their scales differ");
  expect([](auto& t) { t.scales_by_column = true; }, "or their scales differ");
}

TEST(EpGroup, ARankThatDoesNotCallIsNamed) {
  const EpCase c{.world = 3};
  EpGroupRig rig = twin_rig(c);
  rig.load(EpInputs(c, 1));
  std::vector<ep::Handle> handles;
  for (const u32 r : {0u, 2u})
    handles.push_back(rig.group().dispatch(r, rig.tokens(r)).value());
  const auto done = rig.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kPeerLost) << done.error().describe();
  EXPECT_THAT(done.error().message, HasSubstr("rank 1"));
  handles.clear();
  ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.round(2));
}

// The twin has to see every access, so its ranks are in one process.
TEST(EpGroup, SeveralProcessesWithoutGpusAreRefused) {
  const EpCase c{.world = 2};
  run_members(2, [&](u32 member, std::shared_ptr<symm::Exchange> exchange) {
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ranks.ranks = {{.rank = member}};
    options.ranks.exchange = std::move(exchange);
    const auto refused = ep::Group::create(options);
    ASSERT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_THAT(refused.error().message, HasSubstr("all ranks of the group in one process"));
  });
}

// ---- the list ----------------------------------------------------------------------------------

TEST(EpGroup, EveryVariantIsInTheKernelList) {
  const auto known = jit::known_kernels().value();
  const auto listed = [&](const jit::KernelSpec& spec) {
    return std::any_of(known.begin(), known.end(), [&](const jit::KernelSpec& k) {
      return k.sm == 90 && k.expression() == spec.expression();
    });
  };
  for (const auto& config : ep::dispatch_variants()) {
    const auto ref = ep::dispatch_kernel(config).value();
    EXPECT_TRUE(listed(ref.spec)) << ref.spec.expression();
  }
  for (const auto& config : ep::dispatch_variants(true)) {
    const auto ref = ep::expanded_dispatch_kernel(config).value();
    EXPECT_TRUE(listed(ref.spec)) << ref.spec.expression();
  }
  for (const bool pushes : {false, true})
    EXPECT_TRUE(listed(ep::combine_kernel(pushes).spec));
  EXPECT_TRUE(listed(ep::group_rows_kernel().spec));
  for (const bool packs : {false, true})
    EXPECT_TRUE(listed(ep::reduce_rows_kernel(packs).spec));
  EXPECT_TRUE(listed(ep::await_reads_kernel().spec));
  for (const auto payload : {EpPayload::kBf16, EpPayload::kFp8, EpPayload::kLogFmt10})
    EXPECT_TRUE(listed(ep::small_combine_kernel(payload).spec));
  EXPECT_TRUE(listed(ep::expand_rows_kernel().spec));
  EXPECT_TRUE(listed(ep::copy_rows_kernel().spec));
}

}  // namespace
}  // namespace crossdock::testing
