// Dispatch and combine in halves, through the API in the twin: two batches in flight, halves called
// twice, never, and in the wrong order; a handful of tokens in packets, and more by flags.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;
using Handles = std::vector<ep::Handle>;

// Few enough for packets, and too many.
constexpr u32 kFew = 4, kMore = 12;

EpCase halves_case(u32 world, u32 tokens) {
  return {.world = world, .max_tokens = tokens, .biases = 1, .fixed = true};
}
Handles send(EpGroupRig& rig) {
  Handles handles;
  for (const u32 r : rig.group().local_ranks())
    handles.push_back(rig.group().dispatch_send(r, rig.tokens(r)).value());
  return handles;
}
void expect_ok(const Result<>& done) {
  ASSERT_TRUE(done.ok()) << done.error().describe();
}
void expect_refused(const Result<>& done, const char* text) {
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr(text));
}
void add_up(EpGroupRig& rig, const ep::Handle& handle, const symm::LocalMemory& bias, u8* rows) {
  expect_ok(rig.group().combine_receive(handle, {.rows = rows, .bias = {bias.address(), nullptr}}));
}

// By a dispatch's number it is known what has been told of it, and 0 is that of none.
TEST(EpHalves, NumbersOfDispatchesBeginAgainWithoutNone) {
  ep::Tickets tickets(0xfffffffe);
  EXPECT_EQ(tickets.next(), 0xffffffffu);
  EXPECT_EQ(tickets.next(), 1u);
  EXPECT_EQ(tickets.next(), 2u);
  EXPECT_EQ(ep::Tickets().next(), 1u);
}

// send A, send B, receive A, receive B; tell A, tell B, add A, add B: no half waits for what comes
// later in its stream.
TEST(EpHalves, TwoBatchesInFlight) {
  for (const u32 tokens : {kFew, kMore}) {
    SCOPED_TRACE(tokens);
    const EpCase c = halves_case(3, tokens);
    EpGroupRig rig(c, ep::Group::create(ep_options(c, symm::Backend::kCpu)).value());
    std::vector<symm::LocalMemory> bias;
    for (u32 r = 0; r < c.world; ++r) {
      std::vector<u16> values;
      for (u32 i = 0; i < c.max_tokens * c.combine_bytes / 2; ++i)
        values.push_back(bias_value(0, r, i / (c.combine_bytes / 2), i % (c.combine_bytes / 2)));
      bias.push_back(rig.rank(r).allocate(values.size() * 2).value());
      ASSERT_TRUE(symm::upload(rig.rank(r), bias[r].as<u16>(), values, ep_soon()).ok());
    }
    for (u32 turn = 1; turn <= 4; ++turn) {
      rig.group().core().launcher().set_schedule(weak_schedule(turn));
      const EpInputs inputs(c, turn);
      const EpReference reference(c, inputs);
      rig.load(inputs);
      const Handles batches[2] = {send(rig), send(rig)};
      for (const Handles& batch : batches)
        for (const auto& handle : batch)
          ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().dispatch_receive(handle)));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      std::vector<symm::LocalMemory> rows;
      for (u32 b = 0; b < 2; ++b)
        for (const auto& handle : batches[b]) {
          ASSERT_NO_FATAL_FAILURE(rig.check(handle, reference));
          rig.write_expert_rows(handle, inputs, turn + b);
          rows.push_back(
              rig.rank(handle.rank()).allocate(u64{c.max_tokens} * c.combine_bytes).value());
        }
      for (const Handles& batch : batches)
        for (const auto& handle : batch)
          ASSERT_NO_FATAL_FAILURE(expect_ok(rig.group().combine_send(handle)));
      for (u32 b = 0; b < 2; ++b)
        for (const auto& handle : batches[b])
          ASSERT_NO_FATAL_FAILURE(
              add_up(rig, handle, bias[handle.rank()], rows[b * c.world + handle.rank()].as<u8>()));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (u32 b = 0; b < 2; ++b)
        for (u32 r = 0; r < c.world; ++r)
          ASSERT_NO_FATAL_FAILURE(
              rig.check_rows(r, reference, turn + b, rows[b * c.world + r].address()));
    }
  }
}

TEST(EpHalves, ASecondHalfThatIsNeverCalledHarmsNobody) {
  for (const u32 tokens : {kFew, kMore}) {
    const EpCase c = halves_case(2, tokens);
    EpGroupRig rig(c, ep::Group::create(ep_options(c, symm::Backend::kCpu)).value());
    const EpInputs inputs(c, 1);
    rig.load(inputs);
    for (u32 turn = 0; turn < 5; ++turn) {
      (void)send(rig);  // dropped at once
      const Handles kept = rig.dispatch();
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (const auto& handle : kept)
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, inputs)));
    }
  }
}

TEST(EpHalves, HalvesTwiceOrInTheWrongOrderAreRefused) {
  for (const u32 tokens : {kFew, kMore}) {
    EpCase c = halves_case(1, tokens);
    c.biases = 0;
    c.combine_weights = false;
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ep.expert_alignment = 4;
    EpGroupRig rig(c, ep::Group::create(options).value());
    rig.load(EpInputs(c, 1));
    const Handles sent = send(rig);
    const ep::Combined to{.rows = rig.combined(0)};
    ep::Group& group = rig.group();
    expect_refused(group.combine(sent[0], to), "call dispatch_receive() first");
    expect_refused(group.combine_send(sent[0]), "call dispatch_receive() first");
    EXPECT_THAT(group.group_rows(sent[0]).error().message, HasSubstr("dispatch_receive() first"));
    expect_ok(group.dispatch_receive(sent[0]));
    expect_refused(group.dispatch_receive(sent[0]), "have been received");
    expect_refused(group.combine_receive(sent[0], to), "call combine_send() first");
    expect_ok(group.combine_send(sent[0]));
    expect_refused(group.combine_send(sent[0]), "waits for its combine_receive()");
    expect_refused(group.combine(sent[0], to), "waits for its combine_receive()");
    expect_ok(group.combine_receive(sent[0], to));
    expect_refused(group.combine_receive(sent[0], to), "call combine_send() first");
    expect_ok(group.combine(sent[0], to));
    const Handles whole = rig.dispatch();
    expect_refused(group.dispatch_receive(whole[0]), "have been received");
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
  EpCase large{.world = 1, .max_tokens = 8};
  EpGroupRig rig(large, ep::Group::create(ep_options(large, symm::Backend::kCpu)).value());
  rig.load(EpInputs(large, 1));
  EXPECT_EQ(rig.group().dispatch_send(0, rig.tokens(0)).code(), Code::kInvalidArgument);
}

// On the large path the second half takes its epoch to be the last that was told: another combine
// between the halves would add up the rows of the wrong one.
TEST(EpHalves, OneCombineOfManyTokensIsOpenAtATime) {
  const EpCase c{.world = 2, .max_tokens = 12, .combine_weights = false};
  EpGroupRig rig(c, ep::Group::create(ep_options(c, symm::Backend::kCpu)).value());
  const EpInputs inputs(c, 1);
  rig.load(inputs);
  ep::Group& group = rig.group();
  const Handles first = rig.dispatch(), second = rig.dispatch();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const auto& handle : first)
    rig.write_expert_rows(handle, inputs, 1);
  for (const auto& handle : second)
    rig.write_expert_rows(handle, inputs, 2);
  for (const auto& handle : first)
    expect_ok(group.combine_send(handle));
  for (const auto& handle : second) {
    const ep::Combined to{.rows = rig.combined(handle.rank())};
    expect_refused(group.combine_send(handle), "of another handle");
    expect_refused(group.combine(handle, to), "of another handle");
    expect_refused(group.combine_receive(handle, to), "call combine_send() first");
  }
  for (const auto& handle : first)
    expect_ok(group.combine_receive(handle, {.rows = rig.combined(handle.rank())}));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 r = 0; r < c.world; ++r)
    ASSERT_NO_FATAL_FAILURE(rig.check_combined(r, EpReference(c, inputs), 1));
}

// A handle that is dropped between the halves does not spoil the next sums: they are refused.
TEST(EpHalves, ACombineThatIsNeverReceivedIsNoticedAndAResetHelps) {
  for (const bool few : {false, true}) {
    SCOPED_TRACE(few);
    const EpCase c{.world = 1, .max_tokens = 8, .combine_weights = false, .fixed = few};
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ep.small_slots = 1;
    EpGroupRig rig(c, ep::Group::create(options).value());
    rig.load(EpInputs(c, 1));
    ep::Group& group = rig.group();
    const ep::Combined to{.rows = rig.combined(0)};
    {
      const Handles dropped = rig.dispatch();
      expect_ok(group.combine_send(dropped[0]));
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    }
    {
      const Handles next = rig.dispatch();
      expect_refused(group.combine(next[0], to), "reset() the group");
      expect_refused(group.combine_send(next[0]), "reset() the group");
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    }
    expect_ok(group.reset(ep_soon()));
    const Handles good = rig.dispatch();
    expect_ok(group.combine(good[0], to));
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
}

}  // namespace
}  // namespace crossdock::testing
