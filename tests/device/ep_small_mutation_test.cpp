// Planted bugs in dispatch and combine of few tokens: the same kernels with one piece of their
// synchronisation left out. Each has to be found within a few seeds, and without a bug all seeds
// have to pass. As in ep_mutation_test.cpp, functions of the vocabulary are replaced by ones that
// leave the piece out when told to. The fence before the flags is not among them: a warp waits for
// its bulk stores after its words, and in the twin all words have left by then.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/packet.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/convert.cuh>

#include "planted_bugs.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::testing {

enum class SmallBug {
  kNone,
  kNoBulkWait,    // flags raised before the rows are written
  kNoFlagWait,    // rows delivered before they have come
  kNoSlotWait,    // rows stored where a peer still reads
  kNoPacketWait,  // packets taken as they are
  kOneEpoch,      // a packet trusted for one epoch, as if its 16 bytes were seen at once
};
inline SmallBug g_bug = SmallBug::kNone;

}  // namespace crossdock::testing

namespace crossdock::device {

using testing::SmallBug;
inline bool left_out(SmallBug bug) {
  return testing::g_bug == bug;
}
template <class Load, class Done>
Came maybe_wait_or_mask(const LaunchCommon& c, const EpMasking& masking, const Expected& expected,
                        const Load& load, const Done& done) {
  if (left_out(SmallBug::kNoFlagWait) && expected.phase == Phase::kSourceFlag) return Came::kYes;
  if (left_out(SmallBug::kNoSlotWait) && expected.phase == Phase::kSlotFree) {
    (void)done(expected.value);
    return Came::kYes;
  }
  return wait_or_mask(c, masking, expected, load, done);
}
// As wait_packets, but a packet is taken for what its second epoch says, or as it is.
template <u32 kCount>
bool trust_packets(const LaunchCommon& c, const Expected& expected,
                   const Packet* const (&packets)[kCount], u32 wanted, Packet (&out)[kCount]) {
  return wait_until(
      c, expected,
      [&] {
        u64 left = 0;
        for (u32 i = 0; i < kCount; ++i) {
          if ((wanted >> i & 1u) == 0) continue;
          out[i] = ptx::ld_relaxed_sys(packets[i]);
          if (word_epoch(out[i].y) != static_cast<u32>(expected.value)) ++left;
        }
        return left_out(SmallBug::kNoPacketWait) ? 0 : left;
      },
      [](u64 left) { return left == 0; });
}
template <u32 kCount, class... PeerOf>
bool maybe_wait_packets(const LaunchCommon& c, const Expected& expected,
                        const Packet* const (&packets)[kCount], u32 wanted, Packet (&out)[kCount],
                        const PeerOf&... peer_of) {
  if (left_out(SmallBug::kOneEpoch) ||
      (left_out(SmallBug::kNoPacketWait) && expected.phase == Phase::kSourceFlag))
    return trust_packets(c, expected, packets, wanted, out);
  return wait_packets(c, expected, packets, wanted, out, peer_of...);
}

namespace ptx {
template <u32 kPending>
void maybe_bulk_wait() {
  if (!left_out(SmallBug::kNoBulkWait)) bulk_wait<kPending>();
}
}  // namespace ptx
}  // namespace crossdock::device

#define wait_or_mask maybe_wait_or_mask
#define wait_packets maybe_wait_packets
#define bulk_wait maybe_bulk_wait
#include "ep_small_rig.hpp"
#undef wait_or_mask
#undef wait_packets
#undef bulk_wait

namespace crossdock::testing {
namespace {

// A consumer in the stream of the rank: what it reads is what dispatch has delivered. One block.
struct EpReaderParams {
  const u8* block;
  u8* copy;
  u64 bytes;
};
void reader(const EpReaderParams& p) {
  for (u64 i = thread_index(); i < p.bytes / 4; i += block_size())
    ptx::st_weak(reinterpret_cast<u32*>(p.copy) + i,
                 ptx::ld_weak(reinterpret_cast<const u32*>(p.block) + i));
}

// The tokens of a round: the same ways as in all rounds of the slot, other rows and scales.
EpInputs inputs_of(const EpInputs& slot, const EpCase& c, u32 round) {
  EpInputs out = slot;
  for (u32 rank = 0; rank < c.world; ++rank) {
    for (u8& byte : out.of(rank).rows)
      byte = static_cast<u8>(byte + 37 * round);
    for (u8& byte : out.of(rank).scales)
      byte = static_cast<u8>(byte + 41 * round);
  }
  return out;
}
const u8* upload(EpSmallRig& rig, u32 rank, const std::vector<u8>& bytes) {
  auto* memory = rig.ranks().local<u8>(rank, bytes.size() + 16);
  std::copy(bytes.begin(), bytes.end(), memory);
  return memory;
}

// Dispatches alone, three in each slot: two, then the kernels that read them, and again. So a rank
// may come back to a slot while a slower one still reads it.
void dispatches(u64 seed, bool packets) {
  constexpr u32 kRounds = 6;
  const EpCase c{.world = 3,
                 .max_tokens = packets ? 4u : 24u,
                 .row_bytes = 16,
                 .scale_bytes = 60,
                 .fixed = true};
  EpSmallRig rig(c);
  std::vector<EpInputs> inputs;
  for (u32 slot = 0; slot < EpSmallRig::kSlots; ++slot) {
    inputs.emplace_back(c, static_cast<u32>(seed) * EpSmallRig::kSlots + slot);
    rig.load(inputs[slot], slot);
  }
  const u64 bytes = c.output().bytes;
  std::vector<u8*> copies;
  for (u32 rank = 0; rank < c.world; ++rank)
    for (u32 round = 0; round < kRounds; ++round) {
      const EpInputs now = inputs_of(inputs[round % EpSmallRig::kSlots], c, round);
      rig.params(rank, round).input.rows = upload(rig, rank, now.of(rank).rows);
      rig.params(rank, round).input.scales = upload(rig, rank, now.of(rank).scales);
      if (packets) rig.launch_packets<false>(rank, round);
      if (!packets) rig.launch<kSmallPlain>(rank, round);
      copies.push_back(rig.ranks().local<u8>(rank, bytes));
      for (u32 read = round - 1; round % 2 != 0 && read <= round; ++read)
        rig.ranks().launch(
            rank, {1, 32, 0, "reader"}, reader,
            EpReaderParams{rig.output(rank, read), copies[rank * kRounds + read], bytes});
    }
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 rank = 0; rank < c.world; ++rank)
    for (u32 round = 0; round < kRounds; ++round) {
      EpDelivered got = rig.delivered(rank, round);
      got.block = copies[rank * kRounds + round];
      const EpInputs sent = inputs_of(inputs[round % EpSmallRig::kSlots], c, round);
      ASSERT_NO_FATAL_FAILURE(EpReference(c, sent).check(rank, got));
    }
}
void by_flags(u64 seed) {
  dispatches(seed, false);
}
void in_packets(u64 seed) {
  dispatches(seed, true);
}

using Scenario = void (*)(u64 seed);
// The first failure of a run, or nothing.
std::string failure_of(Scenario run, SmallBug bug, u64 seed) {
  g_bug = bug;
  const std::string failure = first_failure([&] { run(seed); });
  g_bug = SmallBug::kNone;
  return failure;
}

struct Planted {
  const char* name;
  SmallBug bug;
  Scenario run;
};
class EpSmallMutation : public ::testing::TestWithParam<Planted> {};

TEST_P(EpSmallMutation, IsFoundWithinThirtyTwoSeeds) {
  if (twin::kTsan) GTEST_SKIP() << "TSan takes the place of the weak-memory model";
  const Planted planted = GetParam();
  expect_found(planted.name, [&](u64 seed) { return failure_of(planted.run, planted.bug, seed); });
}
INSTANTIATE_TEST_SUITE_P(Bugs, EpSmallMutation,
                         ::testing::Values(Planted{"no_bulk_wait", SmallBug::kNoBulkWait, by_flags},
                                           Planted{"no_flag_wait", SmallBug::kNoFlagWait, by_flags},
                                           Planted{"no_slot_wait", SmallBug::kNoSlotWait, by_flags},
                                           Planted{"no_packet_wait", SmallBug::kNoPacketWait,
                                                   in_packets},
                                           Planted{"one_epoch", SmallBug::kOneEpoch, in_packets}),
                         [](const auto& given) { return std::string(given.param.name); });

TEST(EpSmallMutationControl, WithoutABugAllSeedsPass) {
  for (const Scenario run : {by_flags, in_packets})
    for (u64 seed = 1; seed <= 16; ++seed)
      ASSERT_EQ(failure_of(run, SmallBug::kNone, seed), "") << "seed " << seed;
}

}  // namespace
}  // namespace crossdock::testing
