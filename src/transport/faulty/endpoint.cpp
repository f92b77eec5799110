// See endpoint.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/endpoint.hpp"

#include <algorithm>
#include <fmt/format.h>

namespace crossdock::transport::faulty {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

Error injected(Code code, std::string_view what) {
  return Error{.code = code,
               .scope = code == Code::kPeerLost ? Scope::kPeer : Scope::kTransfer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format("injected fault: {}", what)};
}

}  // namespace

template <class Fn>
void FaultyCore::later(nanoseconds delay, Fn fn) {
  auto task = [weak = weak_from_this(), fn] {
    if (const auto self = weak.lock()) fn(*self);
  };
  base::EventLoop& timer = timer_;
  const Deadline when = Deadline::in(delay);
  timer.post([&timer, when, task] { timer.call_at(when, task); });
}

Result<> FaultyCore::post(Shard& outer) {
  Flight* flight = nullptr;
  Faults faults;
  {
    const std::lock_guard lock(mutex_);
    if (severed_) return *severed_;
    faults = dice_.draw();
    const bool delayed = faults.delay.count() > 0;
    if (delayed && delayed_ >= kMaxDelayed)
      return Error{.code = Code::kWouldBlock,
                   .retry = Retry::kLater,
                   .message = fmt::format("{} delayed shards wait for their time", kMaxDelayed)};
    auto owned = std::make_unique<Flight>(outer, faults, *this);
    flight = owned.get();
    flight->state = delayed ? Flight::State::kDelayed : Flight::State::kPosted;
    if (delayed) {
      ++delayed_;
      delayed_bytes_.fetch_add(outer.bytes, std::memory_order_relaxed);
    }
    flights_[&outer] = std::move(owned);
  }
  // Somewhere in the middle of what is under way. Asked for now: once the shard is under way it may
  // finish, and this may be gone.
  if (faults.drop)
    later(faults.delay + nanoseconds(faults.choice % 1'000'000), [](FaultyCore& core) {
      core.sever(injected(Code::kPeerLost, "the connection is lost"));
    });
  if (faults.delay.count() > 0) {
    later(faults.delay, [key = &outer](FaultyCore& core) { core.launch(key); });
    return {};
  }
  auto posted = inner->post(flight->inner);
  if (!posted.ok()) {
    const std::lock_guard lock(mutex_);
    flights_.erase(&outer);
  }
  return posted;
}

void FaultyCore::launch(const Shard* outer) {
  Flight* flight = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = flights_.find(outer);
    if (found == flights_.end() || found->second->state != Flight::State::kDelayed) return;
    flight = found->second.get();
    flight->state = Flight::State::kPosted;
    --delayed_;
    delayed_bytes_.fetch_sub(outer->bytes, std::memory_order_relaxed);
  }
  auto posted = inner->post(flight->inner);
  if (posted.ok()) return;
  if (posted.code() == Code::kWouldBlock) {
    {
      const std::lock_guard lock(mutex_);
      flight->state = Flight::State::kDelayed;
      ++delayed_;
      delayed_bytes_.fetch_add(outer->bytes, std::memory_order_relaxed);
    }
    return later(milliseconds(1), [outer](FaultyCore& core) { core.launch(outer); });
  }
  flight->result = posted.error();
  report(*flight);
}

void FaultyCore::launch_all() {
  std::vector<const Shard*> waiting;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [outer, flight] : flights_)
      if (flight->state == Flight::State::kDelayed) waiting.push_back(outer);
  }
  for (const Shard* const outer : waiting)
    launch(outer);
}

void FaultyCore::cancel(const Shard& outer) {
  const Shard* posted = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = flights_.find(&outer);
    if (found == flights_.end()) return;
    switch (found->second->state) {
      case Flight::State::kPosted:
        posted = &found->second->inner;
        break;
      case Flight::State::kDelayed:  // the wrapped endpoint sees the stop flag
        later(nanoseconds(0), [key = &outer](FaultyCore& core) { core.launch(key); });
        break;
      case Flight::State::kHeld:
        later(nanoseconds(0), [](FaultyCore& core) { core.release_held(0); });
        break;
    }
  }
  // It may finish in the meantime: then only its address is compared.
  if (posted != nullptr) inner->cancel(*posted);
}

void FaultyCore::sever(const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (severed_) return;
    severed_ = why;
  }
  inner->sever(why);
  later(nanoseconds(0), [](FaultyCore& core) {
    core.launch_all();  // each is refused with `why`
    core.release_held(0);
  });
}

void FaultyCore::shard_progress(Shard& shard, std::uint64_t bytes) noexcept {
  Shard& outer = *static_cast<Flight*>(shard.owner)->outer;
  outer.sink->shard_progress(outer, bytes);
}

void FaultyCore::shard_finished(Shard& shard, const Error* error) noexcept {
  Flight& flight = *static_cast<Flight*>(shard.owner);
  if (error != nullptr)
    flight.result = *error;
  else if (flight.faults.fail)
    flight.result = injected(Code::kUnreachable, "the shard failed half-way");
  else if (flight.faults.corrupt && shard.op == Op::kRead)
    flight.corrupt_read();
  if (options_.reorder == 0) return report(flight);
  // Reported by the timer thread only, which keeps this alive; and asked for before the flight can
  // be reported, after which this may be gone.
  const std::lock_guard lock(mutex_);
  later(nanoseconds(0), [](FaultyCore& core) { core.release_held(core.options_.reorder); });
  later(milliseconds(1), [](FaultyCore& core) { core.release_held(0); });
  flight.state = Flight::State::kHeld;
  held_.push_back(&flight);
}

void FaultyCore::release_held(std::size_t keep) {
  for (;;) {
    Flight* chosen = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (held_.size() <= keep) return;
      std::swap(held_[dice_.below(held_.size())], held_.back());
      chosen = held_.back();
      held_.pop_back();
    }
    report(*chosen);
  }
}

void FaultyCore::report(Flight& flight) {
  std::unique_ptr<Flight> owned;
  {
    const std::lock_guard lock(mutex_);
    flight.state = Flight::State::kHeld;
    flight.reportable = true;
    if (flight.pins != 0) return;  // unpin() goes on
    const auto found = flights_.find(flight.outer);
    owned = std::move(found->second);
    flights_.erase(found);
  }
  finish(std::move(owned));
}

void FaultyCore::finish(std::unique_ptr<Flight> flight) {
  Shard& outer = *flight->outer;
  ShardSink& sink = *outer.sink;
  const bool twice = flight->faults.duplicate && !flight->result;
  const Shard* const sibling = twice ? pin_sibling(*flight) : nullptr;
  outer.slices_done = flight->inner.slices_done;
  outer.in_doubt = flight->inner.in_doubt;
  sink.shard_finished(outer, flight->result ? &*flight->result : nullptr);
  if (sibling == nullptr) return;
  sink.shard_finished(outer, nullptr);
  unpin(sibling);
}

const Shard* FaultyCore::pin_sibling(const Flight& flight) {
  const std::lock_guard lock(mutex_);
  for (const auto& [outer, other] : flights_) {
    if (outer->transfer_id != flight.outer->transfer_id || outer->sink != flight.outer->sink)
      continue;
    ++other->pins;
    return outer;
  }
  return nullptr;
}

void FaultyCore::unpin(const Shard* outer) {
  std::unique_ptr<Flight> owned;
  {
    const std::lock_guard lock(mutex_);
    const auto found = flights_.find(outer);
    if (--found->second->pins != 0 || !found->second->reportable) return;
    owned = std::move(found->second);
    flights_.erase(found);
  }
  finish(std::move(owned));
}

}  // namespace crossdock::transport::faulty
