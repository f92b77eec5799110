// The rails of a peer: which transports reach it, dialling, dialling again, attaching regions.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "transfer/engine_core.hpp"
#include "transfer/peer_core.hpp"

namespace crossdock::transfer::detail {
transport::PeerInfo PeerCore::info_for(const transport::Transport& transport) const {
  transport::PeerInfo info{.name = name_,
                           .instance = welcome_.instance_id,
                           .host = welcome_.host,
                           .address = {},
                           .dial = {}};
  for (const auto& offer : welcome_.transports)
    if (offer.name == base_name(transport.name())) info.address = offer.address;
  // By value: a transport may keep the PeerInfo longer than this object lives.
  info.dial = [engine = std::weak_ptr(engine_), address = address_, token = welcome_.data_token](
                  std::uint16_t lane, Deadline deadline) -> Result<base::UniqueFd> {
    const auto alive = engine.lock();
    if (!alive) return make_error(Code::kClosed, "the engine is closed");
    CROSSDOCK_TRY(where, base::parse_host_port(address));
    CROSSDOCK_TRY(greeting, dial(where, alive->identity(),
                                 {.purpose = wire::Purpose::kData,
                                  .rail = lane,
                                  .token = token,
                                  .interrupt = alive->interrupt()},
                                 deadline));
    return std::move(greeting.fd);
  };
  return info;
}

Result<std::shared_ptr<RailSet>> PeerCore::dial_set(std::size_t slot, Deadline deadline) {
  transport::Transport& transport = *engine_->transports()[slot];
  const bool offered = std::any_of(
      welcome_.transports.begin(), welcome_.transports.end(),
      [&](const wire::TransportOffer& offer) { return offer.name == base_name(transport.name()); });
  if (!offered)
    return make_error(Code::kUnreachable, fmt::format("peer '{}' does not offer transport {}",
                                                      name_, base_name(transport.name())));
  const auto info = info_for(transport);
  CROSSDOCK_CHECK_OK(transport.reaches(info));
  // Destroyed on the control loop: the last user may be one of the transport's own threads, which
  // must not join itself.
  std::shared_ptr<RailSet> set(new RailSet, [engine = std::weak_ptr(engine_)](RailSet* raw) {
    auto owned = std::make_shared<std::unique_ptr<RailSet>>(raw);
    if (const auto alive = engine.lock()) alive->loop().post([owned] { owned->reset(); });
  });
  set->counted = RailCount::add(engine_->rail_count());
  set->transport = &transport;
  set->slot = slot;
  set->link = link_->hold();
  // It ended just now: what runs on these rails would not keep the peer from seeing that.
  if (!set->link) return lost_error();
  for (std::uint32_t rail = 0; rail < transport.num_rails(); ++rail) {
    CROSSDOCK_TRY(endpoint, transport.connect(info, rail, deadline));
    set->rails.push_back(std::move(endpoint));
  }
  return set;
}

std::shared_ptr<RailSet> PeerCore::set_at(std::size_t slot) const {
  const std::lock_guard lock(mutex_);
  return sets_[slot];
}

// The first time, the best transport that reaches the peer; later, the same one again.
Result<> PeerCore::redial(Deadline deadline) {
  const std::lock_guard dialling(dial_mutex_);
  if (primary_) return dial_into(*primary_, deadline);
  std::string reasons;
  for (std::size_t slot = 0; slot < engine_->transports().size(); ++slot) {
    const auto dialled =
        dial_into(slot, deadline, reasons.empty() ? "" : fmt::format("; not by {}", reasons));
    if (dialled.ok()) {
      primary_ = slot;
      return {};
    }
    const Error& why = dialled.error();
    if (!alive() || why.code == Code::kDeadline || why.code == Code::kDenied) return why;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ",
                           engine_->transports()[slot]->name(), why.message);
  }
  return Error{.code = Code::kUnreachable,
               .scope = Scope::kPeer,
               .retry = Retry::kLater,
               .message = fmt::format("no transport reaches peer '{}': {}", name_, reasons)};
}

// What the old rails know of the peer's regions is replaced with them, so nothing may run there any
// more. They have failed already; their shards end at once and are tried again on the new ones.
Result<> PeerCore::drain(RailSet& set, Deadline deadline) {
  set.sever(Error{.code = Code::kUnreachable,
                  .scope = Scope::kTransfer,
                  .retry = Retry::kLater,
                  .message = fmt::format("the rails to peer '{}' are being dialled again", name_)});
  if (set.wait_empty(deadline)) return {};
  return make_error(Code::kDeadline,
                    fmt::format("the old rails to peer '{}' did not come to rest", name_));
}

Result<> PeerCore::dial_into(std::size_t slot, Deadline deadline, std::string_view note) {
  if (!alive()) return lost_error();
  const auto old = set_at(slot);
  if (old) {
    if (!old->down.load()) return {};
    CROSSDOCK_CHECK_OK(drain(*old, deadline));
  }
  CROSSDOCK_TRY(set, dial_set(slot, deadline));
  if (old) engine_->count_redial();
  CROSSDOCK_LOG(engine_->log(), kInfo, "peer '{}' is reached by {} with {} rails{}", name_,
                set->transport->name(), set->rails.size(), note);
  const std::lock_guard attaching(attach_mutex_);
  // The new rails know no region yet.
  const auto regions = regions_.snapshot();
  for (const auto& region : *regions)
    region->attached[slot].reset();
  const std::lock_guard lock(mutex_);
  if (lost_) return *lost_;
  sets_[slot] = std::move(set);
  return {};
}

// Shared memory may reach some regions only (the kernel forbids the rest): those go another way.
Result<> PeerCore::cover_regions(Deadline deadline) {
  std::vector<RemoteRegionPtr> uncovered;
  std::string note;
  const auto regions = regions_.snapshot();  // held: another one takes its place at any time
  for (const auto& region : *regions) {
    const auto reached = rails_for(*region);
    // Its owner may take it back at any time, and need not keep it for what this still looks at.
    if (reached.ok() || region->revoked.load()) continue;
    if (note.empty())
      note = fmt::format("; without it some memory is not: {}", reached.error().message);
    uncovered.push_back(region);
  }
  std::optional<Error> not_now;
  for (std::size_t slot = 0; slot < engine_->transports().size() && !uncovered.empty(); ++slot) {
    if (set_at(slot)) continue;
    const std::lock_guard dialling(dial_mutex_);
    if (const auto dialled = dial_into(slot, deadline, note); !dialled.ok()) {
      if (dialled.error().retry != Retry::kNo) not_now = dialled.error();
      continue;
    }
    const auto set = set_at(slot);
    if (!set) break;  // the peer died meanwhile
    std::erase_if(uncovered, [&](const RemoteRegionPtr& r) {
      return r->revoked.load() || attach(*set, *r).ok();
    });
  }
  for (const auto& region : uncovered) {
    auto reached = rails_for(*region);
    if (reached.ok() || region->revoked.load()) continue;
    if (!alive()) return lost_error();
    // A way that may be back soon: that the others cannot reach the memory is not the reason.
    if (not_now) return *not_now;
    return std::move(reached).error();
  }
  return {};
}

void PeerCore::redial_later() {
  if (redialling_.exchange(true)) return;
  const bool posted = engine_->dials().post(this, [weak = weak_from_this()](bool go_on) {
    const auto self = weak.lock();
    if (!self) return;
    if (!go_on) return self->redialling_.store(false);
    const auto deadline = Deadline::in(self->engine_->settings().connect_timeout);
    auto done = self->redial(deadline);
    if (done.ok()) done = self->cover_regions(deadline);
    if (!done.ok())
      CROSSDOCK_LOG_ONCE(self->engine_->log(), kWarn, "redial " + self->name_,
                         "cannot dial peer '{}' again: {}", self->name_, done.error().message);
    self->redialling_.store(false);
  });
  if (!posted) redialling_.store(false);
}

Error PeerCore::rails_changed() const {
  return Error{.code = Code::kUnreachable,
               .scope = Scope::kPeer,
               .retry = Retry::kLater,
               .message = fmt::format("the rails to peer '{}' are being dialled again", name_)};
}

Result<> PeerCore::attach(RailSet& set, transport::RemoteRegion& region) {
  const std::lock_guard lock(attach_mutex_);
  // Replaced since it was looked up: what it attaches would be taken for the new rails'.
  if (set_at(set.slot).get() != &set) return rails_changed();
  // detach() comes after that was set, and waits for this: nothing is attached after it. What the
  // region had on other rails is not to be used any more either.
  if (region.revoked.load()) return revoked_error();
  if (region.attached[set.slot]) return {};
  std::optional<transport::RemoteAccess> access;
  for (const auto& rail : set.rails) {
    CROSSDOCK_TRY(got, rail->attach(region));
    access = got;
  }
  region.attached[set.slot] = access;
  return {};
}

void PeerCore::detach(transport::RemoteRegion& region) {
  const std::lock_guard attach_lock(attach_mutex_);
  for (std::size_t slot = 0; slot < transport::kMaxTransports; ++slot) {
    auto set = set_at(slot);
    if (!set || !region.attached[slot]) continue;
    for (const auto& rail : set->rails)
      rail->detach(region);
    region.attached[slot].reset();
  }
}

Result<std::shared_ptr<RailSet>> PeerCore::rails_for(transport::RemoteRegion& region) {
  if (!alive()) return lost_error();
  bool any_down = false;
  std::optional<Error> last;
  for (std::size_t slot = 0; slot < engine_->transports().size(); ++slot) {
    auto set = set_at(slot);
    if (!set) continue;
    if (set->down.load()) {
      any_down = true;
      continue;
    }
    auto attached = attach(*set, region);
    if (attached.ok()) {
      if (any_down) redial_later();  // a better way may be back
      return set;
    }
    last = std::move(attached).error();
  }
  if (any_down) {
    redial_later();
    return rails_changed();
  }
  if (last && last->code == Code::kUnsupported) redial_later();  // registered after open()
  if (last) return *last;
  return make_error(Code::kUnreachable, fmt::format("no transport reaches peer '{}'", name_));
}

Result<> PeerCore::redial(const RailSet& lost, Deadline deadline) {
  const std::lock_guard dialling(dial_mutex_);
  return dial_into(lost.slot, deadline);
}

Result<std::shared_ptr<RailSet>> PeerCore::another_set(const RailSet& failed,
                                                       transport::RemoteRegion& region,
                                                       bool last_try, Deadline deadline) {
  const bool fallback = engine_->settings().fallback;
  std::optional<Error> why;
  if (!fallback || !last_try) {
    auto again = redial(failed, deadline);
    const auto set = again.ok() ? set_at(failed.slot) : nullptr;
    if (set && attach(*set, region).ok()) return set;
    why = again.ok() ? rails_changed() : std::move(again).error();
  }
  if (!fallback) return *why;
  if (auto set = fall_back(failed, region, deadline)) return set;
  if (why) return *why;
  return make_error(Code::kUnreachable, fmt::format("no transport after {} reaches peer '{}'",
                                                    failed.transport->name(), name_));
}

std::shared_ptr<RailSet> PeerCore::fall_back(const RailSet& failed, transport::RemoteRegion& region,
                                             Deadline deadline) {
  for (std::size_t slot = failed.slot + 1; slot < engine_->transports().size(); ++slot) {
    {
      const std::lock_guard dialling(dial_mutex_);
      if (!dial_into(slot, deadline).ok()) continue;
    }
    auto set = set_at(slot);
    if (!set || !attach(*set, region).ok()) continue;
    CROSSDOCK_LOG_ONCE(engine_->log(), kWarn, "fallback " + name_,
                       "peer '{}': {} failed, transfers fall back to {}", name_,
                       failed.transport->name(), set->transport->name());
    engine_->count_fallback();
    return set;
  }
  return nullptr;
}

std::string PeerCore::transport_name() const {
  const std::lock_guard lock(mutex_);
  for (const auto& set : sets_)
    if (set && !set->down.load()) return std::string(set->transport->name());
  return {};
}

}  // namespace crossdock::transfer::detail
