// See keeper.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "kv/keeper.hpp"

#include "kv/pool_core.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {
namespace {

// Those whose receiver is gone and whose pages a sender may still write to: they keep the pool, and
// with it the memory. Never destroyed, since the senders outlive this process's statics as well.
class Abandoned {
 public:
  static Abandoned& all() {
    static auto* const abandoned = new Abandoned;
    return *abandoned;
  }
  void hold(std::shared_ptr<Keeper> keeper) {
    const std::lock_guard lock(mutex_);
    keepers_.insert(std::move(keeper));
  }
  void let_go(const std::shared_ptr<Keeper>& keeper) {
    const std::lock_guard lock(mutex_);
    keepers_.erase(keeper);
  }

 private:
  std::mutex mutex_;
  std::set<std::shared_ptr<Keeper>> keepers_;
};

}  // namespace

Result<std::shared_ptr<Keeper>> Keeper::create(transfer::Engine& engine, const PagePool& pool) {
  std::shared_ptr<Keeper> keeper(new Keeper(pool.core_));
  CROSSDOCK_TRY(
      losses, engine.watch_peers([weak = std::weak_ptr(keeper)](const transfer::Message& message) {
        if (message.kind != transfer::Message::Kind::kPeerLost) return;
        if (const auto self = weak.lock()) self->on_peer_lost(message.peer_instance);
      }));
  keeper->losses_ = std::move(losses);
  return keeper;
}

Keeper::KeptPtr Keeper::keep(PageLease lease) {
  auto kept = std::make_shared<Kept>();
  kept->lease = std::move(lease);
  const std::lock_guard lock(mutex_);
  kept_.insert(kept);
  return kept;
}

void Keeper::doubt(const KeptPtr& kept, std::uint64_t instance) {
  const std::lock_guard lock(mutex_);
  kept->in_doubt.insert(instance);
}

void Keeper::clear(const KeptPtr& kept, std::uint64_t instance) {
  const std::lock_guard lock(mutex_);
  const auto found = kept->in_doubt.find(instance);
  if (found != kept->in_doubt.end()) kept->in_doubt.erase(found);
}

void Keeper::end(const KeptPtr& kept) {
  const std::lock_guard lock(mutex_);
  kept_.erase(kept);
  kept->lease.reset();
}

void Keeper::on_peer_lost(std::uint64_t instance) {
  const std::lock_guard lock(mutex_);
  for (const auto& kept : kept_)
    kept->in_doubt.erase(instance);
  if (abandoned_) end_quiet();
}

std::set<std::uint64_t> Keeper::in_doubt() {
  std::set<std::uint64_t> all;
  const std::lock_guard lock(mutex_);
  for (const auto& kept : kept_)
    all.insert(kept->in_doubt.begin(), kept->in_doubt.end());
  return all;
}

// A message of an engine that is handled after its loss was told puts it in doubt when nobody will
// tell again. So who has no session now is not in doubt; of who has one the loss will be told.
void Keeper::abandon(const transfer::Engine& engine) {
  std::set<std::uint64_t> gone = in_doubt();
  std::erase_if(gone, [&](std::uint64_t instance) { return engine.opened_by(instance); });
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
  for (const auto& kept : kept_)
    std::erase_if(kept->in_doubt, [&](std::uint64_t instance) { return gone.contains(instance); });
  Abandoned::all().hold(shared_from_this());
  end_quiet();
}

// With the mutex held, of a receiver that is gone.
void Keeper::end_quiet() {
  for (auto it = kept_.begin(); it != kept_.end();) {
    if (!(*it)->in_doubt.empty()) {
      ++it;
      continue;
    }
    (*it)->lease.reset();
    it = kept_.erase(it);
  }
  if (kept_.empty()) Abandoned::all().let_go(shared_from_this());
}

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
