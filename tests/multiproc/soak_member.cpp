// See soak_member.hpp. SPDX-License-Identifier: Apache-2.0
#include "multiproc/soak_member.hpp"

#include <deque>
#include <fmt/format.h>
#include <malloc.h>
#include <sstream>

#include "base/child_process.hpp"
#include "multiproc/soak_thread.hpp"
#include "support/process_use.hpp"

namespace crossdock::testing::soak {
namespace {

// Two plain ones, and two whose own transfers meet faults of the network.
constexpr const char* kTransports[kMembers] = {"auto", "tcp", "faulty+tcp", "faulty+shm,tcp"};

EngineOptions engine_options(const MemberOptions& member) {
  return {.config = {{"log.level", "off"},
                     {"control.silence", "5s"},
                     {"transport.faulty.seed", std::to_string(member.seed % 1'000'000)},
                     {"transport.faulty.fail_ppm", "20000"},
                     {"transport.faulty.drop_ppm", "2000"},
                     {"transport.faulty.duplicate_ppm", "20000"},
                     {"transport.faulty.delay_max", "1ms"},
                     {"transport.faulty.reorder", "4"}}};
}

class Member {
 public:
  explicit Member(const MemberOptions& options)
      : engine_(make_engine(kTransports[options.index], engine_options(options))),
        pool_(engine_.allocate(kPoolBytes, {.label = "pool"}).value()),
        mailbox_(engine_.mailbox("soak").value()),
        subscription_(mailbox_.on_message([](const transfer::Message&) {}).value()) {
    for (std::size_t i = 0; i < kThreads; ++i)
      threads_.emplace_back(engine_, directory_, options, i);
    base::say_parent(engine_.name());
  }

  std::string obey(const std::string& line) {
    std::istringstream in(line);
    std::string word, name;
    std::size_t index = 0;
    in >> word;
    if (word == "peer" && in >> index >> name) directory_.set(index, name);
    if (word == "run")
      for (auto& thread : threads_)
        thread.start();
    if (word == "settle") return settle();
    if (word == "rest") return rest();
    if (word == "end") return end();
    return {};
  }

 private:
  std::string settle() {
    std::uint64_t transfers = 0;
    for (auto& thread : threads_) {
      thread.stop();
      if (thread.fault().empty()) thread.settle();
      if (!thread.fault().empty()) return thread.fault();
      transfers += thread.transfers();
    }
    if (const auto left = engine_.pending(); !left.empty())
      return fmt::format("{} transfers are pending that nobody waits for", left.size());
    return fmt::format("ok {}", transfers);
  }

  // The others let go at the same time; a connection ends when both sides have.
  std::string rest() {
    for (auto& thread : threads_)
      thread.let_go();
    for (const auto until = Deadline::in(10s); open_sockets() > sockets_ && !until.passed();)
      std::this_thread::yield();
    if (open_sockets() > sockets_)
      return fmt::format("{} sockets are left, not {}", open_sockets(), sockets_);
    return fmt::format("use {} {} {} {}", open_descriptors(), running_threads(),
                       mappings_of("memfd"), ::mallinfo2().uordblks);
  }

  std::string end() {
    for (auto& thread : threads_)
      if (const auto released = thread.release(); !released.ok())
        return "a source is held: " + released.error().describe();
    if (const auto released = pool_.release(soon()); !released.ok())
      return "the pool is held: " + released.error().describe();
    subscription_.end();
    if (const auto closed = engine_.close(soon()); !closed.ok())
      return "the engine does not close: " + closed.error().describe();
    return "ok";
  }

  Engine engine_;
  Region pool_;
  transfer::Mailbox mailbox_;
  transfer::Subscription subscription_;
  Directory directory_;
  std::deque<SoakThread> threads_;
  const std::size_t sockets_ = open_sockets();  // without a peer
};

// Everything of the engine is gone with it.
std::string difference(const ProcessUse& before, std::size_t memfds) {
  ProcessUse now = process_use();
  for (const auto until = soon(); !until.passed() && now.threads > before.threads;
       now = process_use())
    std::this_thread::yield();  // a thread that was joined may still be listed for an instant
  if (now.descriptors != before.descriptors)
    return fmt::format("{} descriptors, not {}", now.descriptors, before.descriptors);
  if (now.threads != before.threads)
    return fmt::format("{} threads, not {}", now.threads, before.threads);
  if (mappings_of("memfd") != memfds)
    return fmt::format("{} shared mappings, not {}", mappings_of("memfd"), memfds);
  return "ok";
}

}  // namespace

std::vector<std::string> MemberOptions::arguments() const {
  return {"--role=member", std::to_string(index), std::to_string(incarnation),
          std::to_string(seed)};
}

int member_main(const std::vector<std::string>& arguments) {
  const MemberOptions options{std::stoul(arguments.at(1)), std::stoul(arguments.at(2)),
                              std::stoull(arguments.at(3))};
  (void)make_engine();  // what a first engine opens for the process
  const ProcessUse before = process_use();
  const std::size_t memfds = mappings_of("memfd");
  std::optional<Member> member(std::in_place, options);
  std::string line;
  while (base::hear_parent(line)) {
    std::string answer = member->obey(line);
    if (line == "end") {
      member.reset();
      if (answer == "ok") answer = difference(before, memfds);
    }
    if (!answer.empty()) base::say_parent(answer);
    if (line == "end") return answer == "ok" ? 0 : 1;
  }
  return 1;
}

}  // namespace crossdock::testing::soak
