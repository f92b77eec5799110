// Keeper: the leases of a receiver's requests, and which senders may still write to their pages.
// While the receiver lives it decides when a lease ends. Leases of a receiver that is gone end with
// the proof that no sender touches the pages any more: the loss of each engine in doubt, which the
// keeper watches for itself; until then it outlives its receiver and keeps the pool. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <crossdock/kv/page_pool.hpp>
#include <crossdock/transfer/engine.hpp>

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

class Keeper : public std::enable_shared_from_this<Keeper> {
 public:
  // What one request holds.
  struct Kept {
    PageLease lease;
    std::multiset<std::uint64_t> in_doubt;  // engines, by instance
  };
  using KeptPtr = std::shared_ptr<Kept>;

  static Result<std::shared_ptr<Keeper>> create(transfer::Engine& engine, const PagePool& pool);

  KeptPtr keep(PageLease lease);
  // From now on this engine may write to the pages; clear() says that it does not any more.
  void doubt(const KeptPtr& kept, std::uint64_t instance);
  void clear(const KeptPtr& kept, std::uint64_t instance);
  // The receiver knows that nobody touches the pages: the lease ends.
  void end(const KeptPtr& kept);
  // The receiver goes: what is in doubt stays until there is proof, the rest ends. `engine` is the
  // one that was passed to create().
  void abandon(const transfer::Engine& engine);

 private:
  explicit Keeper(std::shared_ptr<PoolCore> pool) : pool_(std::move(pool)) {}
  void on_peer_lost(std::uint64_t instance);
  std::set<std::uint64_t> in_doubt();
  void end_quiet();

  const std::shared_ptr<PoolCore> pool_;
  transfer::Subscription losses_;
  std::mutex mutex_;
  std::set<KeptPtr> kept_;
  bool abandoned_ = false;
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
