// Combines whose rows travel compressed, in the twin through the API: every bit against the plain
// reference, the error against sums in fp64, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"
#include "support/ep_payload.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

constexpr ep::Payload kPayloads[] = {ep::Payload::kFp8, ep::Payload::kLogFmt10};

EpCase few(u32 world, u32 tokens) {
  return {.world = world, .max_tokens = tokens, .combine_bytes = 2048, .fixed = true};
}
EpGroupRig compressed_rig(const EpCase& c) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.compressed = true;
  options.ep.expert_alignment = 4;
  return EpGroupRig::create(c, options).value();
}
std::vector<ep::Handle> dispatch(EpGroupRig& rig, const EpInputs& inputs) {
  rig.load(inputs);
  auto handles = rig.dispatch();
  EXPECT_TRUE(rig.group().synchronize(ep_soon()).ok());
  return handles;
}
void combine_all(EpGroupRig& rig, const std::vector<ep::Handle>& handles,
                 const ep::CombineOptions& how) {
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(rig.combine(handle, rig.combined(handle.rank()), how));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
}

void rounds(const EpCase& c, ep::Payload payload) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " payload " +
               std::to_string(static_cast<u32>(payload)));
  EpGroupRig rig = compressed_rig(c);
  double largest = 0;
  for (u32 seed = 1; seed <= 3; ++seed) {
    rig.group().core().launcher().set_schedule(weak_schedule(seed));
    const EpInputs inputs(c, seed);
    const EpPayloadReference reference(c, inputs, payload);
    const auto handles = dispatch(rig, inputs);
    for (const auto& handle : handles)
      rig.write_expert_rows(handle, reference.expert_rows(handle.rank(), seed));
    ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = payload}));
    for (u32 r = 0; r < c.world; ++r)
      ASSERT_NO_FATAL_FAILURE(reference.check(r, rig.combined_rows(r).data(), seed, &largest));
  }
  // That rows went through the format at all.
  EXPECT_GT(largest, 0.5);
}

TEST(EpCompressed, EveryBitAndTheErrorOfEachFormat) {
  for (const ep::Payload payload : kPayloads) {
    rounds(few(2, 12), payload);
    rounds({.world = 3,
            .max_tokens = 10,
            .combine_bytes = 1024,
            .biases = 2,
            .fixed = true,
            .overlap = true},
           payload);
    EpCase one = few(1, 9);
    one.combine_weights = false;
    rounds(one, payload);
  }
}

// What reduce_rows makes compressed is what a combine makes of the same sums.
TEST(EpCompressed, SumsThatAreWrittenCompressedAreTheSame) {
  const EpCase c{.world = 2, .experts = 6, .max_tokens = 12, .combine_bytes = 1024, .fixed = true};
  for (const ep::Payload payload : kPayloads) {
    EpGroupRig rig = compressed_rig(c);
    const auto handles = dispatch(rig, EpInputs(c, 3));
    std::vector<symm::LocalMemory> outputs;
    const auto reduce = [&](ep::Payload as) {
      for (const auto& handle : handles) {
        const u32 r = handle.rank();
        const u64 places = rig.group().group_rows(handle).value().places;
        std::vector<u16> rows;
        for (u64 i = 0; i < places * c.combine_bytes / 2; ++i)
          rows.push_back(wide_value(r, 0, static_cast<u32>(i / 512), static_cast<u32>(i % 512), 9));
        outputs.push_back(rig.rank(r).allocate(rows.size() * 2).value());
        ASSERT_TRUE(symm::upload(rig.rank(r), outputs.back().as<u16>(), rows, ep_soon()).ok());
        const auto done = rig.group().reduce_rows(
            handle, {.rows = outputs.back().address(), .weighted = true, .payload = as});
        ASSERT_TRUE(done.ok()) << done.error().describe();
      }
    };
    ASSERT_NO_FATAL_FAILURE(reduce(payload));
    ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = payload, .packed = true}));
    const auto packed = rig.combined_rows(0), also = rig.combined_rows(1);
    ASSERT_NO_FATAL_FAILURE(reduce(ep::Payload::kBf16));
    ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = payload}));
    EXPECT_EQ(rig.combined_rows(0), packed);
    EXPECT_EQ(rig.combined_rows(1), also);
    // And the sums in bf16 are still where they were.
    ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {}));
    EXPECT_NE(rig.combined_rows(0), packed);
  }
}

// All formats share the packed rows of a slot: what a combine in between has compressed there is
// not what reduce_rows() wrote.
TEST(EpCompressed, SumsThatAnotherFormatHasReplacedAreRefused) {
  const EpCase c{.world = 2, .experts = 6, .max_tokens = 12, .combine_bytes = 1024, .fixed = true};
  EpGroupRig rig = compressed_rig(c);
  const auto handles = dispatch(rig, EpInputs(c, 3));
  std::vector<symm::LocalMemory> outputs;
  for (const auto& handle : handles) {
    const u64 places = rig.group().group_rows(handle).value().places;
    outputs.push_back(rig.rank(handle.rank()).allocate(places * c.combine_bytes).value());
  }
  for (const ep::Payload payload : kPayloads)
    for (const ep::Payload between : kPayloads) {
      for (const auto& handle : handles)
        ASSERT_TRUE(
            rig.group()
                .reduce_rows(handle, {.rows = outputs[handle.rank()].address(), .payload = payload})
                .ok());
      // Once packed, combined as often as is wanted; rows of bf16 lie elsewhere.
      for (u32 i = 0; i < 2; ++i) {
        ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = payload, .packed = true}));
        ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {}));
      }
      ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = between}));
      for (const auto& handle : handles) {
        const auto refused = rig.group().combine(handle, {.rows = rig.combined(handle.rank())},
                                                 {.payload = payload, .packed = true});
        ASSERT_EQ(refused.code(), Code::kInvalidArgument);
        EXPECT_THAT(refused.error().message, HasSubstr("no longer there"));
      }
    }
}

TEST(EpCompressed, HalvesOfTwoBatchesAndFormatsInTurns) {
  const EpCase c = few(2, 10);
  EpGroupRig rig = compressed_rig(c);
  for (u32 turn = 1; turn <= 3; ++turn) {
    rig.group().core().launcher().set_schedule(weak_schedule(turn));
    const EpInputs inputs(c, turn);
    rig.load(inputs);
    std::vector<ep::Handle> batches[2] = {rig.dispatch(), rig.dispatch()};
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    const ep::Payload of[2] = {static_cast<ep::Payload>(turn % 3),
                               static_cast<ep::Payload>((turn + 1) % 3)};
    for (u32 i = 0; i < 2; ++i)
      for (const auto& handle : batches[i]) {
        const EpPayloadReference reference(c, inputs, of[i]);
        rig.write_expert_rows(handle, reference.expert_rows(handle.rank(), i));
        const auto sent = rig.group().combine_send(handle, {.payload = of[i]});
        ASSERT_TRUE(sent.ok()) << sent.error().describe();
      }
    for (const u32 i : {1u, 0u}) {
      for (const auto& handle : batches[i])
        ASSERT_TRUE(
            rig.group().combine_receive(handle, {.rows = rig.combined(handle.rank())}).ok());
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (u32 r = 0; r < c.world; ++r)
        ASSERT_NO_FATAL_FAILURE(
            EpPayloadReference(c, inputs, of[i]).check(r, rig.combined_rows(r).data(), i));
    }
  }
}

// An infinity or a NaN is not lost: its group is NaN, or it is.
TEST(EpCompressed, WhatIsNoNumberComesOutAsNone) {
  const EpCase c{.world = 1,
                 .experts = 1,
                 .top_k = 1,
                 .max_tokens = 9,
                 .combine_bytes = 1024,
                 .tokens = {9},
                 .fixed = true};
  EpInputs inputs(c, 1);
  std::fill(inputs.of(0).ids.begin(), inputs.of(0).ids.end(), 0);
  for (const ep::Payload payload : kPayloads)
    for (const u16 odd : {u16{0x7f80}, u16{0xff80}, u16{0x7fc0}}) {
      EpGroupRig rig = compressed_rig(c);
      const auto handles = dispatch(rig, inputs);
      std::vector<u16> rows(u64{9} * 512, bf16_of(1.5f));
      rows[512 + 130] = odd;
      rig.write_expert_rows(handles[0], rows);
      ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = payload}));
      const auto bytes = rig.combined_rows(0);
      const auto* got = reinterpret_cast<const u16*>(bytes.data());
      const bool alone = payload == ep::Payload::kFp8 && odd == 0x7fc0;
      for (u32 i = 0; i < 9 * 512; ++i) {
        const bool hit = alone ? i == 512 + 130 : i / 128 == 5;
        if (hit) {
          ASSERT_TRUE(std::isnan(from_bf16(got[i]))) << i;
        } else {
          ASSERT_EQ(got[i], bf16_of(1.5f)) << i;
        }
      }
    }
}

// A handful of tokens travels in packets: exactly as the experts left them.
TEST(EpCompressed, PacketsStayAsTheyAre) {
  const EpCase c = few(2, 6);
  EpGroupRig rig = compressed_rig(c);
  const EpInputs inputs(c, 1);
  const EpReference reference(c, inputs);
  const auto handles = dispatch(rig, inputs);
  for (const auto& handle : handles)
    rig.write_expert_rows(handle, inputs, 1);
  ASSERT_NO_FATAL_FAILURE(combine_all(rig, handles, {.payload = ep::Payload::kLogFmt10}));
  for (u32 r = 0; r < c.world; ++r)
    ASSERT_NO_FATAL_FAILURE(reference.check_combined(r, rig.combined_rows(r).data(), 1));
}

TEST(EpCompressed, RanksWithDifferentPayloadsNameEachOther) {
  const EpCase c = few(2, 9);
  EpGroupRig rig = compressed_rig(c);
  auto handles = dispatch(rig, EpInputs(c, 1));
  ASSERT_NO_FATAL_FAILURE(rig.combine(handles[0], rig.combined(0), {.payload = ep::Payload::kFp8}));
  ASSERT_NO_FATAL_FAILURE(rig.combine(handles[1], rig.combined(1)));
  const auto done = rig.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("in a combine the same payload"));
  handles.clear();
  ASSERT_TRUE(rig.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.round(2));
}

TEST(EpCompressed, WrongArgumentsNameRuleValueAndFix) {
  const auto refused = [](const Result<>& got, const char* text) {
    ASSERT_EQ(got.code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  EpGroupRig plain = EpGroupRig::create(few(1, 9), symm::Backend::kCpu).value();
  const auto theirs = dispatch(plain, EpInputs(few(1, 9), 1));
  const ep::Combined to{.rows = plain.combined(0)};
  refused(plain.group().combine(theirs[0], to, {.payload = ep::Payload::kFp8}),
          "a group made with compressed = false");
  const EpCase c = few(1, 9);
  EpGroupRig rig = compressed_rig(c);
  const auto handles = dispatch(rig, EpInputs(c, 1));
  refused(rig.group().combine(handles[0], to, {.payload = static_cast<ep::Payload>(7)}),
          "payload = 7 must be one of");
  refused(rig.group().combine(handles[0], to, {.payload = ep::Payload::kFp8, .packed = true}),
          "no reduce_rows() of this handle has written rows of that payload");
  refused(rig.group().combine_send(handles[0], {.packed = true}), "packed = true");
  const auto large = rig.group().dispatch(0, rig.tokens(0), {.path = ep::Path::kLarge}).value();
  refused(rig.group().combine(large, to, {.payload = ep::Payload::kFp8}),
          "of the path for few tokens");
  const auto sizes = [&](ep::Options options, u32 world, const char* text) {
    options.experts = 64;
    options.compressed = true;
    const auto got = ep::sizes(options, world);
    ASSERT_EQ(got.code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  sizes({.top_k = 2, .max_tokens = 8, .hidden = 640, .small_tokens = 8}, 2,
        "hidden = 640 must be a multiple of 512 for compressed = true: pad the rows to 1024");
  sizes({.top_k = 2, .max_tokens = 8, .hidden = 512}, 2, "set small_tokens");
  sizes({.top_k = 32, .max_tokens = 8, .hidden = 512, .small_tokens = 8}, 32,
        "tokens of at most 21 rows");
}

}  // namespace
}  // namespace crossdock::testing
