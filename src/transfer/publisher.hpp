// Where an engine's name becomes an address: "p2p" (the name is the address) or an entry in a
// store. The entry carries the instance, has a lease and is put again in time, so that a dead
// engine's entry vanishes and a restarted store gets it back. Blocking; open() and the job thread
// call it. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "rendezvous/store.hpp"

namespace crossdock::transfer::detail {

struct SegmentRecord {
  std::string address;  // of the control port
  std::uint64_t instance = 0;
};

class Publisher {
 public:
  // `store`: "p2p" or a store's URL; kInvalidArgument lists what there is.
  static Result<std::unique_ptr<Publisher>> create(const std::string& store, Deadline deadline);

  [[nodiscard]] bool peer_to_peer() const noexcept { return store_ == nullptr; }
  // Puts the record of `name`, at first and again before `lease` ends, whatever happened to the
  // store meanwhile. The last engine to take a name has it: open() compares instances. A plain HTTP
  // service holds no leases: there the entry stays until it is withdrawn. The first success says
  // which it is. Precondition: one call at a time.
  Result<> publish(const std::string& name, const SegmentRecord& record,
                   std::chrono::nanoseconds lease, Deadline deadline);
  // Whether the entry vanishes by itself; known once it was published.
  [[nodiscard]] bool leased() const noexcept { return leased_; }
  [[nodiscard]] std::string describe() const { return store_ ? store_->describe() : "p2p"; }
  Result<> withdraw(const std::string& name, const SegmentRecord& record, Deadline deadline);
  // kNotFound names the store; with p2p the name itself is parsed as an address.
  Result<SegmentRecord> find(const std::string& name, Deadline deadline);

 private:
  std::shared_ptr<rendezvous::Store> store_;
  std::atomic<bool> leased_{true};
  bool published_ = false;  // leased_ is settled
};

}  // namespace crossdock::transfer::detail
