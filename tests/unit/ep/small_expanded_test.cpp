// Dispatches of few tokens whose rows are copied to the places of their choices in the same launch,
// in the twin through the API: whole and in halves, every layout, masks, a lack of room; against
// plain loops over what was delivered, and against the lists of group_rows.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_expanded.hpp"
#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

constexpr u32 kAlignment = 4;

struct Layout {
  bool masked = true;
  bool scales_by_column = false;
  bool halves = false;
  u32 sms = 4;
  u32 gap = 0;  // bytes between rows
};

// A rig, and memory for copies of every rank.
struct FewRig {
  EpGroupRig rig;
  Layout layout;
  std::vector<EpExpandedMemory> memory;

  template <class Change>
  FewRig(const EpCase& c, const Layout& of, const Change& change)
      : rig(make(c, of, change)), layout(of) {
    rig.load(EpInputs(c, 99));
    const auto handles = rig.dispatch();
    for (const auto& handle : handles) {
      const auto grouped = rig.group().group_rows(handle).value();
      auto shape = expanded_shape(c, handle, grouped, kAlignment, of.masked);
      shape.scales_by_column = of.scales_by_column;
      shape.row_gap = of.gap;
      memory.emplace_back(rig.rank(handle.rank()), handle, grouped, shape);
    }
    EXPECT_TRUE(rig.group().synchronize(ep_soon()).ok());
  }
  template <class Change>
  static EpGroupRig make(const EpCase& c, const Layout& of, const Change& change) {
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ep.expert_alignment = kAlignment;
    options.ep.small_expand_sms = of.sms;
    change(options.ep);
    return EpGroupRig::create(c, options).value();
  }
  std::vector<ep::Handle> dispatch() {
    std::vector<ep::Handle> handles;
    for (u32 r = 0; r < memory.size(); ++r) {
      const ep::Expanded to = memory[r].to();
      if (!layout.halves) {
        handles.push_back(rig.group().dispatch(r, rig.tokens(r), {.expanded = &to}).value());
        continue;
      }
      handles.push_back(rig.group().dispatch_send(r, rig.tokens(r)).value());
      const auto received = rig.group().dispatch_receive(handles.back(), to);
      EXPECT_TRUE(received.ok()) << received.error().describe();
    }
    return handles;
  }
  template <class T>
  std::vector<T> get(u32 r, const T* from, u64 count) {
    return symm::download(rig.rank(r), from, count, ep_soon()).value();
  }
  // What a combine needs of the lists, as far as there are rows.
  std::vector<u32> lists_of(const ep::Handle& handle, u32 experts, u32 top_k) {
    const u32 r = handle.rank();
    const auto grouped = rig.group().grouped(handle).value();
    const auto& got = handle.received();
    auto out = get(r, grouped.offsets, experts + 1);
    const auto ends = get(r, got.source_ends, rig.group().world());
    const auto positions = get(r, grouped.positions, u64{got.capacity} * top_k);
    const auto ids = get(r, got.ids, u64{got.capacity} * top_k);
    for (u64 choice = 0; choice < positions.size(); ++choice) {
      const u64 row = choice / top_k;
      if (row < ends[row / got.source_stride] && ids[choice] >= 0) out.push_back(positions[choice]);
    }
    return out;
  }
  void check(const std::vector<ep::Handle>& handles, const EpCase& c, const EpInputs& inputs) {
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    for (const auto& handle : handles) {
      EpExpandedMemory& of = memory[handle.rank()];
      of.take(handle, rig.group().grouped(handle).value());
      ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, inputs))) << handle.rank();
      ASSERT_NO_FATAL_FAILURE(of.check(ep_soon())) << "rank " << handle.rank();
      const u32 experts = c.expert_map().count(handle.rank());
      const auto made = lists_of(handle, experts, c.top_k);
      ASSERT_TRUE(rig.group().group_rows(handle).ok());
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      ASSERT_EQ(lists_of(handle, experts, c.top_k), made) << "rank " << handle.rank();
    }
  }
};

void rounds(EpCase c, const Layout& layout) {
  c.fixed = true;
  SCOPED_TRACE("world " + std::to_string(c.world) + (layout.masked ? " masked" : " expanded") +
               (layout.halves ? " halves" : ""));
  FewRig x(c, layout, [](ep::Options&) {});
  for (u32 seed = 1; seed <= 3; ++seed) {
    x.rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(c, seed);
    x.rig.load(inputs);
    for (EpExpandedMemory& of : x.memory)
      of.fill(ep_soon());
    const auto handles = x.dispatch();
    ASSERT_NO_FATAL_FAILURE(x.check(handles, c, inputs));
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(x.rig.combine(handle));
    ASSERT_NO_FATAL_FAILURE(x.rig.synchronize());
  }
}

void every_layout(bool halves) {
  for (u32 seed = 1; seed <= 2; ++seed) {
    rounds({.world = 2,
            .experts = 7,
            .max_tokens = 12,
            .row_bytes = 64 + 16 * (seed % 3),
            .scale_bytes = 12,
            .scales_by_column = (seed % 2 == 0) == halves},
           {.masked = seed == 1,
            .scales_by_column = seed == 2,
            .halves = halves,
            .sms = 2 * seed,
            .gap = 16 * (seed % 2)});
    if (::testing::Test::HasFatalFailure()) return;
  }
}
TEST(EpFewCopies, EveryLayout) {
  every_layout(false);
}
TEST(EpFewCopies, EveryLayoutInHalves) {
  every_layout(true);
}
TEST(EpFewCopies, OtherWorldsAndRows) {
  rounds({.world = 1, .experts = 3, .max_tokens = 10}, {.sms = 3});
  rounds({.world = 3, .experts = 2, .max_tokens = 10, .tokens = {10, 0, 3}}, {.sms = 1});
  rounds({.world = 2, .max_tokens = 9, .row_bytes = 7184, .weights = false}, {});
  rounds({.world = 2, .max_tokens = 10, .row_bytes = 512, .cast = true, .combine_bytes = 512}, {});
}
TEST(EpFewCopies, EveryRouting) {
  for (const EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    rounds({.world = 2, .experts = 6, .max_tokens = 10, .routing = kind}, {.masked = false});
}
// Tokens in packets are copied afterwards, with the same results.
TEST(EpFewCopies, PacketsAreCopiedAfterwards) {
  for (const bool halves : {false, true})
    rounds({.world = 2, .experts = 5, .max_tokens = 6, .scale_bytes = 8}, {.halves = halves});
}
// A rank that is masked has no rows and no choices, whatever it told before.
TEST(EpFewCopies, MaskedRanksHaveNoPlaces) {
  EpCase c{.world = 3, .experts = 6, .max_tokens = 10, .fixed = true};
  FewRig x(c, {}, [](ep::Options& o) { o.masks = true; });
  const u32 gone = 2;
  for (u32 seed = 1; seed <= 4; ++seed) {
    x.rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const bool apart = seed % 2 == 0;
    const EpInputs all(c, seed);
    const EpInputs seen = apart ? all.without(gone) : all;
    x.rig.load(all);
    for (EpExpandedMemory& of : x.memory)
      of.fill(ep_soon());
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 peer = 0; peer < c.world; ++peer)
        if (peer != rank && (rank == gone || peer == gone)) {
          ASSERT_TRUE(x.rig.group().mask(rank, peer, apart).ok());
        }
    auto handles = x.dispatch();
    if (apart) {
      ASSERT_NO_FATAL_FAILURE(x.rig.synchronize());
      handles.pop_back();
    }
    ASSERT_NO_FATAL_FAILURE(x.check(handles, c, seen)) << "seed " << seed;
  }
}
// Too little room is the fault of that rank alone, and nothing is written.
TEST(EpFewCopies, ALackOfRoomIsNamedAndHarmsNobodyElse) {
  const EpCase c{.world = 2,
                 .experts = 4,
                 .max_tokens = 10,
                 .routing = EpRoutingKind::kOneExpert,
                 .fixed = true};
  FewRig x(c, {}, [](ep::Options&) {});
  const EpInputs inputs(c, 1);
  x.rig.load(inputs);
  for (EpExpandedMemory& of : x.memory)
    of.fill(ep_soon());
  std::vector<ep::Handle> handles;
  for (u32 r = 0; r < 2; ++r) {
    ep::Expanded to = x.memory[r].to();
    if (r == 1) to.rows_per_expert = 3;
    handles.push_back(x.rig.group().dispatch(r, x.rig.tokens(r), {.expanded = &to}).value());
  }
  const auto done = x.rig.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("rank 1 has 76 choices to place"));
  ASSERT_NO_FATAL_FAILURE(x.rig.check(handles[0], EpReference(c, inputs)));
}
TEST(EpFewCopies, WrongOptionsAreNamed) {
  const auto refused = [](ep::Options options, const char* text) {
    options.experts = 600;
    options.top_k = 2;
    options.max_tokens = 8;
    options.hidden = 128;
    options.small_expand_sms = 8;
    const auto got = ep::sizes(options, 2);
    ASSERT_EQ(got.code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refused({.small_tokens = 8}, "small_expand_sms = 8 needs small_tokens = 8 and expert_alignment");
  refused({.small_tokens = 8, .expert_alignment = 1}, "at most 256 experts a rank, not 300");
}

}  // namespace
}  // namespace crossdock::testing
