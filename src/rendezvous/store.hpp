// The metadata store: where engines publish their addresses and ranks find each other. A small map
// from keys to values with revisions and leases, behind one interface:
//
//   inproc://name         shared by the engines of one process
//   file:///directory     one file a key, for processes that share a directory
//   tcp://host:port       a StoreServer (`crossdock store --tcp --listen host:port`)
//   http://host:port/path an HTTP service: GET, PUT, DELETE with ?key= (`crossdock store --http`)
//
// Stores are thread-safe; every call keeps its deadline and reports a store that is down, slow or
// talks nonsense as an Error. Nothing runs in the background on the client's side.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::rendezvous {

inline constexpr std::size_t kMaxKeyBytes = 512;  // any bytes, at least one
inline constexpr std::size_t kMaxValueBytes = 16u << 20;

struct Entry {
  std::string value = {};
  // Grows with every change of the store, never repeats for a key, never 0. A plain HTTP service
  // without ETags has none: then it is derived from the value.
  std::uint64_t revision = 0;
};

// How long an entry lives without being put again; unset: until it is removed.
using Lease = std::optional<std::chrono::milliseconds>;

class Store {
 public:
  virtual ~Store() = default;

  Result<> put(std::string_view key, std::string_view value, Lease lease, Deadline deadline);
  // Nothing when the key does not exist.
  Result<std::optional<Entry>> get(std::string_view key, Deadline deadline);
  // Removing what does not exist is a success.
  Result<> remove(std::string_view key, Deadline deadline);
  // The keys that begin with `prefix`, sorted; all keys for an empty one.
  Result<std::vector<std::string>> list(std::string_view prefix, Deadline deadline);
  // Waits until the key exists. A store that goes away meanwhile is tried again until the deadline.
  Result<Entry> wait(std::string_view key, Deadline deadline);
  // Puts only when the key is at `expected_revision` (0: does not exist). False: it is not.
  Result<bool> compare_and_put(std::string_view key, std::uint64_t expected_revision,
                               std::string_view value, Deadline deadline);
  // Removes only when the key is at `expected_revision`. False: it is not, or does not exist.
  Result<bool> compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                  Deadline deadline);

  // The URL it was opened with.
  [[nodiscard]] virtual std::string describe() const = 0;

 private:
  // Key, value and lease were checked.
  virtual Result<> do_put(std::string_view key, std::string_view value, Lease lease,
                          Deadline deadline) = 0;
  virtual Result<std::optional<Entry>> do_get(std::string_view key, Deadline deadline) = 0;
  virtual Result<> do_remove(std::string_view key, Deadline deadline) = 0;
  virtual Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline deadline) = 0;
  virtual Result<Entry> do_wait(std::string_view key, Deadline deadline) = 0;
  virtual Result<bool> do_compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                          std::string_view value, Deadline deadline) = 0;
  virtual Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                             Deadline deadline) = 0;
};

// Opens a store by URL. tcp and http keep trying to reach the server until the deadline, so that
// ranks may start before it. kInvalidArgument for a URL of no known scheme lists those there are.
Result<std::shared_ptr<Store>> open_store(std::string_view url, Deadline deadline);

// --- for rank bootstrap -------------------------------------------------------------------------

// Which of `world` ranks calls, in what exchange. A name is used for one exchange in the life of a
// store: its keys stay, so that a slow rank still finds them.
struct Gathering {
  std::string name;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  const char* noun = "ranks";  // what members are called in messages
};

// Every rank's bytes, by rank. Errors: kDeadline names the ranks that did not come, or the store;
// kIncompatible when ranks disagree on the world's size; kInvalidArgument when a rank is taken.
Result<std::vector<std::string>> all_gather(Store& store, const Gathering& gathering,
                                            std::string_view bytes, Deadline deadline);
// Returns when every rank has called it.
Result<> barrier(Store& store, const Gathering& gathering, Deadline deadline);

}  // namespace crossdock::rendezvous
