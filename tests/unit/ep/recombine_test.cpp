// One dispatch of few tokens combined many times with nothing in between, through the API in the
// twin: sums written again and rows compressed again while peers may still read what was there.
// Each run is compared with one that waits after every call.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"
#include "support/ep_payload.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;
using Handles = std::vector<ep::Handle>;
using ep::Payload;

void expect_ok(const Result<>& done) {
  ASSERT_TRUE(done.ok()) << done.error().describe();
}

// A round of one handle: sums in a format, unless the rows stay as they are, then a combine.
struct Round {
  bool sums;
  Payload written;
  Payload combined;
};
constexpr Round sums_in(Payload payload) {
  return {true, payload, payload};
}
constexpr Round rows_as(Payload payload) {
  return {false, Payload::kBf16, payload};
}
const std::vector<Round> kSums(4, sums_in(Payload::kBf16));
const std::vector<Round> kPackedSums(4, sums_in(Payload::kLogFmt10));
const std::vector<Round> kFormats = {rows_as(Payload::kFp8), rows_as(Payload::kLogFmt10),
                                     rows_as(Payload::kFp8), rows_as(Payload::kBf16),
                                     rows_as(Payload::kLogFmt10)};
const std::vector<Round> kAll = {sums_in(Payload::kFp8),
                                 rows_as(Payload::kLogFmt10),
                                 {true, Payload::kBf16, Payload::kFp8},
                                 sums_in(Payload::kBf16),
                                 sums_in(Payload::kLogFmt10)};

EpCase few(u32 world, u32 tokens) {
  return {.world = world, .max_tokens = tokens, .combine_bytes = 1024, .fixed = true};
}
ep::GroupOptions again_options(const EpCase& c, u32 max_tokens) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.max_tokens = max_tokens;
  options.ep.compressed = true;
  options.ep.expert_alignment = 4;
  return options;
}

// A dispatch of few tokens, and what its experts make of it in every round.
class Again {
 public:
  static constexpr u32 kRounds = 5;
  Again(const EpCase& c, const ep::GroupOptions& options)
      : case_(c), rig_(c, ep::Group::create(options).value()) {
    rig_.load(EpInputs(c, 1));
    for (u32 r = 0; r < c.world; ++r)
      handles_.push_back(
          rig_.group()
              .dispatch(r, rig_.tokens(r), {.path = ep::Path::kSmall, .most_tokens = c.max_tokens})
              .value());
    for (const auto& handle : handles_) {
      const u32 r = handle.rank();
      const u64 places = rig_.group().group_rows(handle).value().places;
      for (u32 k = 0; k < kRounds; ++k) {
        outputs_.push_back(filled(r, places, k + 1));
        results_.push_back(rig_.rank(r).allocate(c.max_tokens * c.combine_bytes).value());
      }
    }
    rig_.synchronize();
    for (const auto& handle : handles_)
      rig_.write_expert_rows(handle, values(handle.rank(), c.world * c.max_tokens, 9));
  }

  [[nodiscard]] ep::Group& group() { return rig_.group(); }
  [[nodiscard]] EpGroupRig& rig() { return rig_; }
  [[nodiscard]] const ep::Handle& handle(u32 r) const { return handles_[r]; }
  [[nodiscard]] void* result(u32 r, u32 k) { return results_[r * kRounds + k].address(); }
  Result<> reduce(u32 r, u32 k, Payload payload) {
    return group().reduce_rows(
        handles_[r],
        {.rows = outputs_[r * kRounds + k].address(), .weighted = true, .payload = payload});
  }
  Result<> combine(u32 r, u32 k, const ep::CombineOptions& how = {}) {
    return group().combine(handles_[r], {.rows = result(r, k)}, how);
  }
  void call(u32 r, u32 k, const Round& round) {
    if (round.sums) {
      ASSERT_NO_FATAL_FAILURE(expect_ok(reduce(r, k, round.written)));
    }
    const bool packed = round.sums && round.written != Payload::kBf16;
    ASSERT_NO_FATAL_FAILURE(
        expect_ok(combine(r, k, {.payload = round.combined, .packed = packed})));
  }
  // [rank * kRounds + round]
  std::vector<std::vector<u8>> results() {
    std::vector<std::vector<u8>> out;
    for (u32 r = 0; r < case_.world; ++r)
      for (u32 k = 0; k < kRounds; ++k)
        out.push_back(symm::download(rig_.rank(r), static_cast<const u8*>(result(r, k)),
                                     u64{case_.tokens_of(r)} * case_.combine_bytes, ep_soon())
                          .value());
    return out;
  }

 private:
  [[nodiscard]] std::vector<u16> values(u32 r, u64 rows, u32 round) const {
    const u32 each = case_.combine_bytes / 2;
    std::vector<u16> out;
    for (u64 i = 0; i < rows * each; ++i)
      out.push_back(
          expert_value(r, 0, static_cast<u32>(i / each), static_cast<u32>(i % each), round));
    return out;
  }
  symm::LocalMemory filled(u32 r, u64 rows, u32 round) {
    const auto made = values(r, rows, round);
    auto memory = rig_.rank(r).allocate(made.size() * 2).value();
    EXPECT_TRUE(symm::upload(rig_.rank(r), memory.as<u16>(), made, ep_soon()).ok());
    return memory;
  }
  EpCase case_;
  EpGroupRig rig_;
  Handles handles_;
  std::vector<symm::LocalMemory> outputs_, results_;
};

std::vector<std::vector<u8>> run(const EpCase& c, const ep::GroupOptions& options, u32 seed,
                                 bool waits, const std::function<Round(u32, u32)>& round_of,
                                 u32 rounds) {
  Again again(c, options);
  again.group().core().launcher().set_schedule(weak_schedule(seed));
  for (u32 k = 0; k < rounds; ++k) {
    for (u32 r = 0; r < c.world; ++r)
      again.call(r, k, round_of(r, k));
    if (waits) again.rig().synchronize();
  }
  again.rig().synchronize();
  return again.results();
}
void same_without_waiting(const EpCase& c, const ep::GroupOptions& options,
                          const std::vector<Round>& rounds) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " tokens " + std::to_string(c.max_tokens) +
               " of " + std::to_string(options.ep.max_tokens));
  const auto count = static_cast<u32>(rounds.size());
  const auto of = [&](u32, u32 k) { return rounds[k]; };
  const auto want = run(c, options, 1, true, of, count);
  EXPECT_NE(want[0], want[1]) << "rounds differ";
  for (u32 seed = 1; seed <= 2; ++seed)
    ASSERT_EQ(run(c, options, seed, false, of, count), want) << "seed " << seed;
}

// In packets and by flags, with slots of the large path that are larger, and not.
TEST(EpRecombine, SumsOfEveryRoundInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 4u})
    for (const auto& [tokens, most] : {std::pair{5u, 20u}, {10u, 10u}, {10u, 40u}}) {
      const EpCase c = few(world, tokens);
      ASSERT_NO_FATAL_FAILURE(same_without_waiting(c, again_options(c, most), kSums));
    }
}
TEST(EpRecombine, OtherFormatsInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 4u}) {
    const EpCase c = few(world, 10);
    for (const auto* rounds : {&kPackedSums, &kFormats, &kAll})
      ASSERT_NO_FATAL_FAILURE(same_without_waiting(c, again_options(c, 40), *rounds));
  }
}
TEST(EpRecombine, LaunchesThatOverlap) {
  const EpCase c = few(3, 10);
  auto options = again_options(c, 20);
  options.ep.overlap_launches = true;
  ASSERT_NO_FATAL_FAILURE(same_without_waiting(c, options, kAll));
}

// Who writes nothing anew tells by its next combine that it has read.
TEST(EpRecombine, RanksThatWriteInDifferentRounds) {
  for (const u32 world : {2u, 3u}) {
    const EpCase c = few(world, 10);
    const auto options = again_options(c, 20);
    const auto of = [&](u32 r, u32 k) {
      return Round{(r + k) % world == 0, Payload::kBf16, Payload::kBf16};
    };
    const auto want = run(c, options, 1, true, of, 5);
    for (u32 seed = 1; seed <= 3; ++seed)
      ASSERT_EQ(run(c, options, seed, false, of, 5), want) << "seed " << seed;
  }
}

TEST(EpRecombine, HalvesWithSumsBetweenTheCombines) {
  const EpCase c = few(3, 10);
  const auto want =
      run(c, again_options(c, 20), 1, true, [](u32, u32) { return sums_in(Payload::kBf16); }, 4);
  Again again(c, again_options(c, 20));
  again.group().core().launcher().set_schedule(weak_schedule(4));
  for (u32 k = 0; k < 4; ++k)
    for (u32 r = 0; r < c.world; ++r) {
      ASSERT_NO_FATAL_FAILURE(expect_ok(again.reduce(r, k, Payload::kBf16)));
      ASSERT_NO_FATAL_FAILURE(expect_ok(again.group().combine_send(again.handle(r))));
      // The others read what has been told.
      const auto refused = again.reduce(r, k, Payload::kBf16);
      ASSERT_EQ(refused.code(), Code::kInvalidArgument);
      EXPECT_THAT(refused.error().message, HasSubstr("waits for its combine_receive()"));
      ASSERT_NO_FATAL_FAILURE(
          expect_ok(again.group().combine_receive(again.handle(r), {.rows = again.result(r, k)})));
    }
  again.rig().synchronize();
  EXPECT_EQ(again.results(), want);
}

// Nobody waits for a rank that is masked.
TEST(EpRecombine, WithoutAMaskedRank) {
  const EpCase c = few(3, 10);
  auto options = again_options(c, 20);
  options.ep.masks = true;
  std::vector<std::vector<u8>> want;
  for (const bool waits : {true, false, false}) {
    Again again(c, options);
    again.group().core().launcher().set_schedule(weak_schedule(waits ? 1 : 5));
    for (const u32 r : {0u, 2u})
      ASSERT_NO_FATAL_FAILURE(expect_ok(again.group().mask(r, 1, true)));
    for (u32 k = 0; k < 4; ++k) {
      for (const u32 r : {0u, 2u})
        ASSERT_NO_FATAL_FAILURE(again.call(r, k, sums_in(Payload::kBf16)));
      if (waits) again.rig().synchronize();
    }
    again.rig().synchronize();
    if (waits) want = again.results();
    EXPECT_EQ(again.results(), want);
  }
}

TEST(EpRecombine, ARankThatDoesNotGoOnIsNamed) {
  const EpCase c = few(2, 10);
  Again again(c, again_options(c, 20));
  for (const u32 r : {0u, 1u})
    ASSERT_NO_FATAL_FAILURE(again.call(r, 0, sums_in(Payload::kBf16)));
  ASSERT_NO_FATAL_FAILURE(again.call(0, 1, sums_in(Payload::kBf16)));
  const auto done = again.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kPeerLost) << done.error().describe();
  EXPECT_THAT(done.error().message,
              HasSubstr("for rank 1 to read what the slot held before: it has come to 0, and 1"));
}

}  // namespace
}  // namespace crossdock::testing
