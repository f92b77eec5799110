// The map under the in-process store and both servers: keys, values, revisions, leases. Does no
// waiting and reads no clock: the owner passes the time and asks when the next lease ends.
// Thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {

class KeyTable {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Limits {
    std::size_t max_keys = 1u << 20;
    std::size_t max_bytes = std::size_t{1} << 30;  // of keys and values
  };

  KeyTable() = default;
  explicit KeyTable(const Limits& limits) : limits_(limits) {}

  // The new revision; kNoMemory when a limit would be passed.
  Result<std::uint64_t> put(std::string_view key, std::string_view value, Lease lease, Time now);
  [[nodiscard]] const Entry* get(std::string_view key, Time now);
  void remove(std::string_view key);
  [[nodiscard]] std::vector<std::string> list(std::string_view prefix, Time now);
  // The new revision, or nothing when the key is not at `expected`.
  Result<std::optional<std::uint64_t>> compare_and_put(std::string_view key, std::uint64_t expected,
                                                       std::string_view value, Time now);
  // False when the key is not at `expected`.
  bool compare_and_remove(std::string_view key, std::uint64_t expected, Time now);

 private:
  struct Item {
    Entry entry;
    std::optional<Time> expiry;
  };
  using Items = std::map<std::string, Item, std::less<>>;

  // Drops every entry whose lease has ended.
  void expire(Time now);
  void erase(Items::iterator it);

  Limits limits_;
  Items items_;
  std::set<std::pair<Time, std::string>> expiries_;
  std::size_t num_bytes_ = 0;
  std::uint64_t last_revision_ = 0;
};

}  // namespace crossdock::rendezvous
