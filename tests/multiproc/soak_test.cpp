// A soak of the transfer engine: several processes move random batches between each other's memory
// over shm, tcp and networks with faults, while this one kills, restarts, stops and continues them.
// Every byte is checked, and between the storms that nothing is left over: no transfer, descriptor,
// thread, mapping, region in use, nor memory that grows. See soak_member.hpp.
//
//   SOAK_SECONDS=600 SOAK_SEED=7 build/dev/tests/multiproc/transfer_soak
//
// The seed decides all that the members draw and what is done to them; how these meet, the machine
// decides.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>
#include <cstdlib>
#include <gmock/gmock.h>
#include <memory>
#include <random>
#include <sstream>

#include "base/child_process.hpp"
#include "multiproc/soak_member.hpp"
#include "support/patient_child.hpp"

namespace crossdock::testing::soak {
namespace {

using base::ChildProcess;
using namespace std::chrono_literals;

constexpr auto kStorm = 2s;

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// What a member uses at rest.
struct Use {
  std::size_t descriptors = 0, threads = 0, mappings = 0, heap_bytes = 0;
};

struct MemberProcess {
  std::size_t incarnation = 0;
  std::unique_ptr<ChildProcess> process;
  std::string name;
  std::optional<Use> first;  // at its first rest
  std::uint64_t transfers = 0;
};

class Soak {
 public:
  explicit Soak(std::uint64_t seed) : seed_(seed), random_(seed) {
    for (std::size_t i = 0; i < kMembers; ++i)
      start(i);
  }

  // Everybody runs, and things are done to them.
  void storm() {
    for (auto& member : members_)
      member.process->say("run");
    for (const auto end = Deadline::in(kStorm); !end.passed();) {
      const std::size_t index = draw(0, kMembers - 1);
      if (draw(0, 1) == 0)
        hang(index, std::chrono::milliseconds(draw(20, 600)));
      else if (index != 0)  // that one lives through all, for what grows
        restart(index);
      pass(std::chrono::milliseconds(draw(50, 400)));
    }
  }

  void settle() {
    for (auto& member : members_)
      member.process->say("settle");
    for (auto& member : members_) {
      std::istringstream answer(hear(member));
      std::string word;
      answer >> word >> member.transfers;
      ASSERT_EQ(word, "ok") << answer.str();
    }
  }

  void rest() {
    for (auto& member : members_)
      member.process->say("rest");
    for (auto& member : members_) {
      std::istringstream answer(hear(member));
      std::string word;
      Use use;
      ASSERT_TRUE(answer >> word >> use.descriptors >> use.threads >> use.mappings >>
                  use.heap_bytes)
          << answer.str();
      if (!member.first) member.first = use;
      compare(member, use);
    }
  }

  void end() {
    for (auto& member : members_)
      member.process->say("end");
    for (auto& member : members_) {
      EXPECT_EQ(hear(member), "ok");
      EXPECT_EQ(member.process->wait(), 0);
    }
  }

  [[nodiscard]] std::string story() const {
    std::ostringstream text;
    text << kills_ << " killed, " << hangs_ << " stopped;";
    for (const auto& member : members_)
      text << ' ' << member.transfers;
    text << " transfers of those that are left";
    return text.str();
  }

 private:
  std::size_t draw(std::size_t least, std::size_t most) {
    return least + random_() % (most - least + 1);
  }

  void start(std::size_t index) {
    MemberProcess& member = members_.at(index);
    const std::size_t incarnation = member.process ? member.incarnation + 1 : 0;
    member = MemberProcess();
    member.incarnation = incarnation;
    member.process =
        std::make_unique<ChildProcess>(MemberOptions{index, incarnation, seed_}.arguments());
    member.name = hear(member);
    for (std::size_t i = 0; i < kMembers; ++i) {
      const MemberProcess& other = members_.at(i);
      if (!other.process) continue;
      other.process->say("peer " + std::to_string(index) + " " + member.name);
      member.process->say("peer " + std::to_string(i) + " " + other.name);
    }
  }
  void restart(std::size_t index) {
    members_.at(index).process->signal(SIGKILL);
    (void)members_.at(index).process->wait();
    start(index);
    members_.at(index).process->say("run");
    ++kills_;
  }
  void hang(std::size_t index, std::chrono::milliseconds duration) {
    members_.at(index).process->stop();
    pass(duration);
    members_.at(index).process->signal(SIGCONT);
    ++hangs_;
  }
  // The members go on meanwhile; nothing is waited for.
  static void pass(std::chrono::milliseconds duration) {
    (void)::poll(nullptr, 0, static_cast<int>(duration.count()));
  }
  static std::string hear(MemberProcess& member) { return hear_patiently(*member.process); }

  static void compare(const MemberProcess& member, const Use& use) {
    // The control loop, the hashing and job threads, the dial pool's 16, the transports'.
    constexpr std::size_t kMostThreads = 32;
    // Pools grow for a while, and the heap is never quite as it was.
    const std::size_t room = (512 << 10) + 16 * member.transfers;
    EXPECT_LE(use.descriptors, member.first->descriptors) << member.name;
    EXPECT_LE(use.mappings, member.first->mappings) << member.name;
    EXPECT_LE(use.threads, kMostThreads) << member.name;
    EXPECT_LE(use.heap_bytes, member.first->heap_bytes + room)
        << member.name << " after " << member.transfers << " transfers";
  }

  const std::uint64_t seed_;
  std::mt19937_64 random_;
  std::array<MemberProcess, kMembers> members_;
  std::size_t kills_ = 0, hangs_ = 0;
};

TEST(TransferSoak, EveryByteIsRightAndNothingIsLeft) {
  const std::uint64_t seed = from_environment("SOAK_SEED", std::random_device{}() % 1'000'000);
  const auto seconds = std::chrono::seconds(from_environment("SOAK_SECONDS", 10));
  std::printf("SOAK_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, "SOAK_SEED=" + std::to_string(seed));
  Soak soak(seed);
  for (const auto end = Deadline::in(seconds); !end.passed() && !HasFailure();) {
    soak.storm();
    soak.settle();
    if (HasFailure()) return;
    soak.rest();
  }
  std::printf("%s\n", soak.story().c_str());
  if (!HasFailure()) soak.end();
}

}  // namespace
}  // namespace crossdock::testing::soak

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 4 && arguments[0] == "--role=member")
    return crossdock::testing::soak::member_main(arguments);
  signal(SIGPIPE, SIG_IGN);  // a killed child's stdin
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
