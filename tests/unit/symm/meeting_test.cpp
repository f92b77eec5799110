// Where the processes of an elastic group meet: what a process does that was away for long, and by
// which number those are called that did not come to the first step.
// SPDX-License-Identifier: Apache-2.0
#include "symm/meeting.hpp"

#include <gmock/gmock.h>
#include <thread>

#include "rendezvous/store.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;

Deadline soon() {
  return Deadline::in(60s);
}

class Meetings : public ::testing::Test {
 protected:
  MeetingPlace place(u32 fewest) const {
    return {.store = "inproc://meetings",
            .name = ::testing::UnitTest::GetInstance()->current_test_info()->name(),
            .fewest = fewest,
            .settle = 200ms};
  }
  std::string key(const std::string& what) const { return place(0).name + "/meet/" + what; }
  std::shared_ptr<rendezvous::Store> store_ =
      rendezvous::open_store("inproc://meetings", soon()).value();
};

// It sat down, and stood still while the others gave that generation up and made many more.
TEST_F(Meetings, OneThatWaitsAtAMeetingThatIsOverGoesToTheNext) {
  std::vector<Meeting> all;
  for (const u32 rank : {0u, 1u, 2u})
    all.push_back(Meeting::open(place(0), 3, {rank}, soon()).value());
  std::vector<u64> met(3);
  const auto attend = [&](u32 rank) {
    return std::thread([&, rank] {
      const auto roster = all[rank].attend(1, Deadline::in(20s));
      EXPECT_TRUE(roster.ok()) << roster.error().describe();
      if (roster.ok()) met[rank] = roster->generation;
    });
  };
  std::thread first = attend(2);
  EXPECT_TRUE(store_->wait(key("1/seat/2"), soon()).ok());
  EXPECT_TRUE(store_->put(key("current"), "5", std::nullopt, soon()).ok());
  EXPECT_TRUE(store_->wait(key("6/seat/2"), Deadline::in(10s)).ok());
  EXPECT_FALSE(store_->get(key("1/seat/2"), soon()).value());
  std::thread second = attend(1);
  std::thread third = attend(0);
  for (std::thread* thread : {&first, &second, &third})
    thread->join();
  EXPECT_THAT(met, ::testing::Each(6u));
}

TEST_F(Meetings, AnOldGenerationIsNeverTheNewest) {
  const auto meeting = Meeting::open(place(0), 2, {0}, soon()).value();
  const auto conclude = [&](u64 generation) {
    meeting.conclude({.generation = generation,
                      .world = 2,
                      .attendees = {{.token = meeting.token(), .ranks = {{0}, {1}}}}},
                     soon());
    return store_->get(key("current"), soon()).value()->value;
  };
  EXPECT_EQ(conclude(5), "5");
  EXPECT_EQ(conclude(2), "5");
  EXPECT_EQ(conclude(6), "6");
}

}  // namespace
}  // namespace crossdock::symm
