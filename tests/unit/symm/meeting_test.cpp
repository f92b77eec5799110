// Where the processes of an elastic group meet: what a process does that was away for long, and by
// which number those are called that did not come to the first step.
// SPDX-License-Identifier: Apache-2.0
#include "symm/meeting.hpp"

#include <gmock/gmock.h>
#include <thread>

#include "rendezvous/store.hpp"
#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(60s);
}

class Meetings : public ::testing::Test {
 protected:
  MeetingPlace place(u32 fewest, std::chrono::milliseconds settle = 200ms) const {
    return {.store = "inproc://meetings",
            .name = ::testing::UnitTest::GetInstance()->current_test_info()->name(),
            .fewest = fewest,
            .settle = settle};
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

// The seat of rank 1 is vacant, so the third process at the meeting is not that of rank 2.
TEST_F(Meetings, OneThatDiesAfterTheMeetingIsNamedByItsRank) {
  device::SymmetricLayout layout;
  (void)layout.add("data", 64);
  const MeetingPlace at = place(2, 1500ms);  // in which three threads of a busy machine come
  const auto of = [&](u32 rank) {
    return GroupOptions{
        .world = 4, .ranks = {{.rank = rank}}, .backend = Backend::kCpu, .place = at};
  };
  std::unique_ptr<Group> other;
  std::thread thread([&] { other = Group::create(of(2), layout).value(); });
  const auto group = Group::create(of(0), layout).value();
  thread.join();
  auto doomed = Meeting::open(at, 4, {3}, soon()).value();
  thread = std::thread([&] { (void)doomed.attend(2, soon()); });
  Result<> theirs;
  std::thread reform([&] { theirs = other->reform(Deadline::in(5s)); });
  const Result<> mine = group->reform(Deadline::in(5s));
  for (std::thread* t : {&thread, &reform})
    t->join();
  for (const Result<>& done : {mine, theirs}) {
    ASSERT_EQ(done.code(), Code::kDeadline);
    EXPECT_THAT(done.error().message,
                AllOf(HasSubstr("did not come in time: 2"),
                      HasSubstr("process 1 has rank 2; process 2 has rank 3")));
  }
}

}  // namespace
}  // namespace crossdock::symm
