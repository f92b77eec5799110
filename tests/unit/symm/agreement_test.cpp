// The rules by which processes agree on a group: every disagreement names both sides.
// SPDX-License-Identifier: Apache-2.0
#include "symm/agreement.hpp"

#include <gmock/gmock.h>

#include <crossdock/symm/group_options.hpp>

namespace crossdock::symm {
namespace {

using message::Proposal;
using ::testing::AllOf;
using ::testing::HasSubstr;

Proposal proposal(std::uint32_t rank, std::uint32_t world) {
  Proposal p{.library = "0.1.0",
             .first_rank = rank,
             .world = world,
             .backend = static_cast<std::uint8_t>(Backend::kGpu),
             .window_bytes = 4096,
             .host = "host-a",
             .socket = "socket-" + std::to_string(rank)};
  p.areas = {{"barrier", 0, 256}, {"rows", 256, 3840}};
  p.ranks = {{rank, "GPU-" + std::to_string(rank), "NVIDIA H200", 90}};
  return p;
}

Result<Agreement> agree_on(const std::vector<Proposal>& proposals) {
  std::vector<std::string> parts;
  for (const Proposal& p : proposals)
    parts.push_back(message::encode(p).value());
  return agree(parts);
}

// Two ranks of which the second is changed by `change`.
template <class Change>
Result<Agreement> disagree(Change&& change) {
  Proposal second = proposal(1, 2);
  change(second);
  return agree_on({proposal(0, 2), second});
}

TEST(Agreement, PlacesEveryRank) {
  Proposal a = proposal(3, 5);
  a.ranks = {{3, "GPU-a", "H", 90}, {0, "GPU-b", "H", 90}};
  Proposal b = proposal(1, 5);
  b.ranks = {{1, "GPU-c", "H", 90}, {2, "GPU-d", "H", 90}, {4, "GPU-e", "H", 90}};
  const auto agreement = agree_on({a, b});
  ASSERT_TRUE(agreement.ok()) << agreement.error().describe();
  EXPECT_EQ(agreement->member_of_rank, (std::vector<std::uint32_t>{0, 1, 1, 0, 1}));
  EXPECT_EQ(agreement->sharing, Sharing::kDescriptor);
  EXPECT_EQ(agreement->ranks_of(1), "ranks 1, 2, 4");
  EXPECT_EQ(agree_on({proposal(0, 1)})->sharing, Sharing::kNone);
  EXPECT_EQ(agree_on({proposal(0, 1)})->ranks_of(0), "rank 0");
  // The digest tells groups apart.
  b.socket = "another";
  EXPECT_NE(agree_on({a, b})->digest, agreement->digest);
}

TEST(Agreement, NamesBothSidesOfADisagreement) {
  struct Case {
    std::function<void(Proposal&)> change;
    Code code;
    std::vector<const char*> texts;
  };
  const std::vector<Case> cases = {
      {[](Proposal& p) { p.world = 4; },
       Code::kIncompatible,
       {"rank 1 says the world has 4 ranks, rank 0 says 2"}},
      {[](Proposal& p) { p.window_bytes = 8192; },
       Code::kIncompatible,
       {"rank 1 asks for a window of 8192 bytes, rank 0 for 4096 bytes"}},
      {[](Proposal& p) { p.areas[1].bytes = 3000; },
       Code::kIncompatible,
       {"areas differ from number 1 on: 'rows' of 3000 bytes at 256 and 'rows' of 3840 bytes"}},
      {[](Proposal& p) { p.areas.pop_back(); }, Code::kIncompatible, {"number 1 on: nothing and"}},
      {[](Proposal& p) { p.backend = 1; },
       Code::kIncompatible,
       {"rank 1 runs on the CPU, rank 0 on the GPU"}},
      {[](Proposal& p) { p.library = "0.2.0"; },
       Code::kIncompatible,
       {"rank 1 has crossdock 0.2.0, rank 0 has 0.1.0: install one version"}},
      {[](Proposal& p) { p.protocol = 9; },
       Code::kIncompatible,
       {"rank 1 speaks protocol 9", "rank 0 speaks 3"}},
      {[](Proposal& p) { p.ranks[0].device = "GPU-0"; },
       Code::kInvalidArgument,
       {"rank 0 and rank 1 are on the same GPU, GPU-0"}},
      {[](Proposal& p) { p.ranks[0] = {1, "GPU-1", "NVIDIA B200", 100}; },
       Code::kIncompatible,
       {"rank 1 is on NVIDIA B200 (sm_100), rank 0 on NVIDIA H200 (sm_90)"}},
      {[](Proposal& p) { p.ranks[0].rank = 0; },
       Code::kInvalidArgument,
       {"rank 0 is given twice: to process 0 and process 1 of 2"}},
      {[](Proposal& p) { p.ranks[0].rank = 7; },
       Code::kInvalidArgument,
       {"rank 7 of process 1 is outside a world of 2 ranks"}},
      {[](Proposal& p) { p.ranks.clear(); },
       Code::kInvalidArgument,
       {"rank 1 of a world of 2 belongs to none of the 2 processes"}},
      {[](Proposal& p) { p.host = "host-b"; },
       Code::kUnsupported,
       {"rank 1 is not on the host of rank 0", "host-b; host-a", "fabric handles"}},
      {[](Proposal& p) { p.failure = message::Failure{9, 1, "no memory for it"}; },
       Code::kNoMemory,
       {"rank 1 failed: no memory for it"}},
      {[](Proposal& p) { p.failure = message::Failure{777, 1, "nonsense"}; },
       Code::kInternal,
       {"rank 1 failed: nonsense"}},
  };
  for (const Case& c : cases) {
    const auto verdict = disagree(c.change);
    ASSERT_EQ(verdict.code(), c.code) << c.texts[0];
    for (const char* text : c.texts)
      EXPECT_THAT(verdict.error().message, HasSubstr(text));
  }
}

TEST(Agreement, RanksShareAGpuWhereAllProcessesAllowIt) {
  Proposal a = proposal(0, 2);
  Proposal b = proposal(1, 2);
  b.ranks[0].device = a.ranks[0].device;
  EXPECT_EQ(agree_on({a, b}).code(), Code::kInvalidArgument);
  a.share_gpus = 1;
  const auto differ = agree_on({a, b});
  ASSERT_EQ(differ.code(), Code::kIncompatible);
  EXPECT_THAT(differ.error().message, HasSubstr("rank 1 has symm.share_gpus = false, rank 0 has "
                                                "true: set it alike in all processes"));
  b.share_gpus = 1;
  EXPECT_TRUE(agree_on({a, b}).ok());
}

TEST(Agreement, FabricHandlesBridgeHosts) {
  Proposal a = proposal(0, 2);
  Proposal b = proposal(1, 2);
  b.host = "host-b";
  a.fabric = b.fabric = 1;
  EXPECT_EQ(agree_on({a, b})->sharing, Sharing::kFabric);
  b.fabric = 0;
  EXPECT_EQ(agree_on({a, b}).code(), Code::kUnsupported);
  a.backend = b.backend = static_cast<std::uint8_t>(Backend::kCpu);
  b.fabric = 1;
  EXPECT_EQ(agree_on({a, b}).code(), Code::kUnsupported) << "host memory has no fabric handles";
}

TEST(Agreement, SomethingElseThanAProposalIsNamed) {
  for (const char* nonsense : {"", "GET / HTTP/1.1", "XSYM"}) {
    const auto verdict = agree({message::encode(proposal(0, 2)).value(), nonsense});
    ASSERT_EQ(verdict.code(), Code::kIncompatible);
    EXPECT_THAT(verdict.error().message,
                HasSubstr("what process 1 of 2 said is no proposal for a symmetric group"));
  }
  // What a newer protocol has after the common fields is not read.
  Proposal newer = proposal(1, 2);
  newer.protocol = message::kProtocol + 1;
  const auto verdict =
      agree({message::encode(proposal(0, 2)).value(), message::encode(newer).value() + "and more"});
  EXPECT_THAT(verdict.error().message, HasSubstr("speaks protocol 4"));
}

TEST(Agreement, SeatsOfElasticGroupsMayBeVacant) {
  Proposal a = proposal(0, 3);
  Proposal b = proposal(2, 3);
  a.elastic = b.elastic = 1;
  a.generation = b.generation = 5;
  a.token = 70;
  b.token = 72;
  const auto agreement = agree_on({a, b});
  ASSERT_TRUE(agreement.ok()) << agreement.error().describe();
  EXPECT_EQ(agreement->member_of_rank, (std::vector<std::uint32_t>{0, kVacant, 1}));
  EXPECT_EQ(agreement->token_of(2), 72u);
  EXPECT_EQ(agreement->token_of(1), 0u);
  EXPECT_EQ(agree_on({a})->sharing, Sharing::kDescriptor) << "others may come later";
  b.generation = 4;
  const auto older = agree_on({a, b});
  ASSERT_EQ(older.code(), Code::kIncompatible);
  EXPECT_THAT(older.error().message,
              HasSubstr("rank 2 makes generation 4 of an elastic group, rank 0 generation 5 of"));
  EXPECT_THAT(disagree([](Proposal& p) { p.elastic = 1; }).error().message,
              HasSubstr("rank 0 generation 0 of a fixed one"));
}

TEST(Agreement, WorldsOutsideTheLimitsAreRefused) {
  EXPECT_EQ(agree_on({proposal(0, 0)}).code(), Code::kInvalidArgument);
  EXPECT_EQ(agree_on({proposal(0, 1025)}).code(), Code::kInvalidArgument);
}

TEST(Messages, SurviveTheWayThere) {
  Proposal p = proposal(1, 2);
  p.failure = message::Failure{5, 1, std::string(5000, 'x')};
  const auto back = message::decode_proposal(message::encode(p).value()).value();
  EXPECT_EQ(back.areas[1].name, "rows");
  EXPECT_EQ(back.ranks[0].device, "GPU-1");
  EXPECT_EQ(back.failure->text.size(), message::kLongestText) << "cut, not refused";
  message::Outcome outcome{.agreement = 77, .step = 3, .allocated_bytes = 1 << 21};
  outcome.windows = {{4, std::string(64, 'f')}};
  const auto got = message::decode_outcome(message::encode(outcome).value()).value();
  EXPECT_EQ(got.agreement, 77u);
  EXPECT_EQ(got.windows[0].fabric.size(), 64u);
  EXPECT_FALSE(got.failure.has_value());
  EXPECT_FALSE(message::decode_outcome(message::encode(p).value()).ok());
  const auto windows =
      message::decode_windows(message::encode(message::Windows{9, 1, {3, 5}}).value()).value();
  EXPECT_EQ(windows.ranks, (std::vector<std::uint32_t>{3, 5}));
  const message::Attendee attendee{.token = 7, .ranks = {{2}, {4}}};
  EXPECT_EQ(message::decode_attendee(message::encode(attendee).value())->ranks[1].rank, 4u);
  const message::Roster roster{.generation = 3, .world = 5, .attendees = {attendee}};
  const auto listed = message::decode_roster(message::encode(roster).value()).value();
  EXPECT_EQ(listed.generation, 3u);
  EXPECT_EQ(listed.attendees[0].token, 7u);
  EXPECT_FALSE(message::encode(message::Roster{.generation = 3, .world = 5}).ok()) << "nobody";
  EXPECT_FALSE(message::encode(message::Attendee{.token = 7}).ok()) << "of no rank";
}

}  // namespace
}  // namespace crossdock::symm
