// One thread of a member of the soak; see soak_member.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "multiproc/soak_member.hpp"
#include "support/engines.hpp"

namespace crossdock::testing::soak {

// The names of the members' engines, which change when one is restarted. Thread-safe.
class Directory {
 public:
  void set(std::size_t index, std::string name) {
    const std::lock_guard lock(mutex_);
    names_.at(index) = std::move(name);
  }
  std::string get(std::size_t index) {
    const std::lock_guard lock(mutex_);
    return names_.at(index);
  }

 private:
  std::mutex mutex_;
  std::array<std::string, kMembers> names_;
};

class SoakThread {
 public:
  // `engine` and `directory` outlive it.
  SoakThread(Engine& engine, Directory& directory, const MemberOptions& member, std::size_t index);

  void start();
  void stop();
  // The others between stop() and start() only. What was wrong first, or nothing.
  [[nodiscard]] const std::string& fault() const { return fault_; }
  [[nodiscard]] std::uint64_t transfers() const { return transfers_; }
  // Every member takes a batch and gives it back.
  void settle();
  void let_go();
  Result<> release();

 private:
  struct Target {
    std::string name;
    std::optional<Peer> peer;
    std::uint64_t area = 0;         // address there
    std::vector<std::byte> shadow;  // what is in it
  };
  struct Range {
    Op op;
    std::size_t at;
    std::size_t length;
  };

  void step();
  bool reach(std::size_t index, Deadline deadline);
  std::vector<Range> draw_ranges();
  TransferOptions draw_options();
  void fill_sources(const std::vector<Range>& ranges);
  std::vector<Request> requests_of(const Target& target, const std::vector<Range>& ranges) const;
  void move(Target& target, const std::vector<Range>& ranges);
  void judge(Target& target, const std::vector<Range>& ranges, const Result<>& result);
  void read_back(Target& target, const std::vector<Range>& ranges);
  bool fetch(Target& target, std::size_t at, std::size_t length, Deadline deadline);
  void expect_mixture(const Target& target, const Range& range, const std::byte* got,
                      const std::vector<std::byte>& other, const char* what);
  void expect_code(const Error& error, bool cancelled);
  void fail(const std::string& why);
  std::size_t draw(std::size_t least, std::size_t most);
  bool one_in(std::size_t n) { return draw(1, n) == 1; }

  Engine& engine_;
  Directory& directory_;
  const MemberOptions member_;
  const std::size_t index_;
  std::mt19937_64 random_;
  Region out_, in_;  // what writes take from and reads fill, at the offsets of the area
  std::vector<std::byte> sent_;
  std::array<Target, kMembers> targets_;
  std::string fault_;
  std::uint64_t transfers_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace crossdock::testing::soak
