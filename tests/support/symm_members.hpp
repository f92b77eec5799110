// Several processes of a symmetric group, played by threads of one test: each gets an Exchange and
// a number.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <crossdock/symm/exchange.hpp>

#include "support/process_use.hpp"

namespace crossdock::testing {

// An all-gather between threads. Who does not come makes the others end at their deadline.
class Meeting {
 public:
  explicit Meeting(std::uint32_t members) : members_(members), calls_(members, 0) {}

  Result<std::vector<std::string>> all_gather(std::uint32_t member, std::string_view bytes,
                                              Deadline deadline) {
    std::unique_lock lock(mutex_);
    auto& round = rounds_[calls_[member]++];
    round.resize(members_);
    round[member] = std::make_unique<std::string>(bytes);
    changed_.notify_all();
    const auto complete = [&] {
      for (const auto& part : round)
        if (!part) return false;
      return true;
    };
    if (!changed_.wait_until(lock, deadline.when(), complete))
      return make_error(Code::kDeadline, "somebody did not come to the meeting");
    std::vector<std::string> parts;
    for (const auto& part : round)
      parts.push_back(*part);
    return parts;
  }
  std::shared_ptr<symm::Exchange> exchange(std::uint32_t member) {
    return symm::make_exchange({member, members_},
                               [this, member](std::string_view bytes, Deadline deadline) {
                                 return all_gather(member, bytes, deadline);
                               })
        .value();
  }

 private:
  std::uint32_t members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::vector<std::unique_ptr<std::string>>> rounds_;
  std::vector<std::uint64_t> calls_;
};

// Calls `body(member, exchange)` on a thread for each member and waits for all.
inline void run_members(
    std::uint32_t members,
    const std::function<void(std::uint32_t, std::shared_ptr<symm::Exchange>)>& body) {
  Meeting meeting(members);
  std::vector<std::thread> threads;
  for (std::uint32_t m = 0; m < members; ++m)
    threads.emplace_back([&, m] { body(m, meeting.exchange(m)); });
  for (auto& thread : threads)
    thread.join();
}

// Sanitizers keep freed memory for a while, and need addresses of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif

// Whether a process that used `before` has not grown by more than some noise.
inline void expect_no_growth(const ProcessUse& before, const ProcessUse& after) {
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.threads, before.threads);
  if (kUnderSanitizer) return;
  EXPECT_LE(after.mappings, before.mappings + 4);
  EXPECT_LE(after.resident_kib, before.resident_kib + 8192);
}

}  // namespace crossdock::testing
