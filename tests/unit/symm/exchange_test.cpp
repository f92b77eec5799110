// Exchanges: over a store, over functions of the caller; what they do with wrong answers.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <gmock/gmock.h>
#include <thread>

#include <crossdock/symm/exchange.hpp>

#include "rendezvous/store.hpp"
#include "support/symm_members.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(30s);
}

TEST(StoreExchange, GathersAgainAndAgainAndLeavesOneEntryAMember) {
  const char* const url = "inproc://symm-exchange";
  const auto store = rendezvous::open_store(url, soon()).value();
  std::vector<std::thread> threads;
  for (std::uint32_t m = 0; m < 3; ++m)
    threads.emplace_back([&, m] {
      const auto exchange = open_store_exchange(url, "g", {m, 3}, soon()).value();
      for (int round = 0; round < 20; ++round) {
        const auto parts =
            exchange->all_gather(std::to_string(m) + "/" + std::to_string(round), soon());
        ASSERT_TRUE(parts.ok()) << parts.error().describe();
        for (std::uint32_t peer = 0; peer < 3; ++peer)
          ASSERT_EQ((*parts)[peer], std::to_string(peer) + "/" + std::to_string(round));
      }
    });
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(store->list("g/", soon())->size(), 3u);
}

TEST(StoreExchange, NamesWhoDidNotComeAndRefusesAUsedName) {
  const char* const url = "inproc://symm-missing";
  const auto exchange = open_store_exchange(url, "g", {1, 3}, soon()).value();
  const auto parts = exchange->all_gather("x", Deadline::in(500ms));
  ASSERT_EQ(parts.code(), Code::kDeadline);
  EXPECT_THAT(parts.error().message, HasSubstr("of 3 processes these did not come in time: 0, 2"));
  EXPECT_EQ(exchange->describe(), "store inproc://symm-missing, name g");

  const auto alone = open_store_exchange(url, "once", {0, 1}, soon()).value();
  EXPECT_TRUE(alone->all_gather("x", soon()).ok());
  const auto again = open_store_exchange(url, "once", {0, 1}, soon()).value();
  EXPECT_THAT(again->all_gather("x", soon()).error().message, HasSubstr("use a new name"));
}

TEST(StoreExchange, WrongArgumentsAreRefused) {
  EXPECT_EQ(open_store_exchange("inproc://a", "", {0, 1}, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(open_store_exchange("inproc://a", "g", {1, 1}, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(open_store_exchange("nowhere", "g", {0, 1}, soon()).code(), Code::kInvalidArgument);
}

// What MPI_Allgather does, between threads.
FixedAllGather fixed(testing::Meeting& meeting, std::uint32_t member) {
  return [&meeting, member](const void* send, void* receive, std::size_t bytes,
                            Deadline deadline) -> Result<> {
    CROSSDOCK_TRY(parts,
                  meeting.all_gather(member, {static_cast<const char*>(send), bytes}, deadline));
    for (std::size_t m = 0; m < parts.size(); ++m) {
      if (parts[m].size() != bytes) return invalid_argument("sizes differ: not what MPI allows");
      std::memcpy(static_cast<char*>(receive) + m * bytes, parts[m].data(), bytes);
    }
    return {};
  };
}

TEST(FixedExchange, CarriesPartsOfAnyLength) {
  testing::Meeting meeting(4);
  std::vector<std::thread> threads;
  for (std::uint32_t m = 0; m < 4; ++m)
    threads.emplace_back([&, m] {
      const auto exchange = make_fixed_exchange({m, 4}, fixed(meeting, m)).value();
      for (std::size_t factor : {0u, 1u, 1000u}) {
        const auto parts = exchange->all_gather(std::string(m * factor, char('a' + m)), soon());
        ASSERT_TRUE(parts.ok()) << parts.error().describe();
        for (std::uint32_t peer = 0; peer < 4; ++peer)
          ASSERT_EQ((*parts)[peer], std::string(peer * factor, char('a' + peer)));
      }
    });
  for (auto& thread : threads)
    thread.join();
}

TEST(FunctionExchange, WrongAnswersAreTold) {
  EXPECT_EQ(make_exchange({0, 1}, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(make_fixed_exchange({0, 1}, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(make_exchange({2, 2}, [](auto, auto) { return std::vector<std::string>(); }).code(),
            Code::kInvalidArgument);
  const auto answers = [](std::vector<std::string> parts) {
    return make_exchange({1, 2}, [parts](std::string_view, Deadline) { return parts; })
        .value()
        ->all_gather("mine", soon());
  };
  EXPECT_TRUE(answers({"other", "mine"}).ok());
  EXPECT_THAT(answers({"mine"}).error().message, HasSubstr("1 parts for 2 members"));
  EXPECT_THAT(answers({"mine", "other"}).error().message, HasSubstr("own bytes as part 1"));
  // A size that nobody can have sent must not become an allocation.
  const auto huge = make_fixed_exchange(
      {0, 1}, [](const void*, void* receive, std::size_t bytes, Deadline) -> Result<> {
        std::memset(receive, 0x7f, bytes);
        return {};
      });
  EXPECT_EQ((*huge)->all_gather("x", soon()).code(), Code::kCorrupt);
}

}  // namespace
}  // namespace crossdock::symm
