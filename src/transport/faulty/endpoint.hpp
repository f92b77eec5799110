// The endpoint of the fault injector. Its core is shared with the tasks on the timer thread, which
// hold it weakly, so that an endpoint may be destroyed while a task waits for its time.
//
//   post ──> [kDelayed ── timer ──>] kPosted ── wrapped endpoint ──> [kHeld ──>] shard_finished
//
// Thread-safe. No callback and no call into the wrapped endpoint is made with the mutex held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/faulty/flight.hpp"
#include "transport/faulty/transport.hpp"

namespace crossdock::transport::faulty {

class FaultyCore final : public ShardSink, public std::enable_shared_from_this<FaultyCore> {
 public:
  FaultyCore(std::unique_ptr<Endpoint> wrapped, base::EventLoop& timer,
             const FaultyOptions& options)
      : inner(std::move(wrapped)), timer_(timer), options_(options), dice_(options) {}

  Result<> post(Shard& outer);
  void cancel(const Shard& outer);
  void sever(const Error& why);
  [[nodiscard]] std::uint64_t delayed_bytes() const noexcept {
    return delayed_bytes_.load(std::memory_order_relaxed);
  }

  void shard_progress(Shard& shard, std::uint64_t bytes) noexcept override;
  void shard_finished(Shard& shard, const Error* error) noexcept override;

  const std::unique_ptr<Endpoint> inner;

 private:
  static constexpr std::size_t kMaxDelayed = 1024;

  // Runs a member function on the timer thread after `delay`, if this still exists then.
  template <class Fn>
  void later(std::chrono::nanoseconds delay, Fn fn);
  // Gives a delayed flight to the wrapped endpoint. The shard may be over since: then nothing.
  void launch(const Shard* outer);
  void launch_all();
  // Reports held flights until at most `keep` are left.
  void release_held(std::size_t keep);
  // Reports a flight whose result is known; a pinned one when the pin goes.
  void report(Flight& flight);
  void finish(std::unique_ptr<Flight> flight);
  // Keeps another shard of the same transfer from being reported; null when there is none.
  const Shard* pin_sibling(const Flight& flight);
  void unpin(const Shard* outer);

  base::EventLoop& timer_;
  const FaultyOptions options_;
  std::atomic<std::uint64_t> delayed_bytes_{0};
  std::mutex mutex_;
  Dice dice_;
  std::optional<Error> severed_;
  std::unordered_map<const Shard*, std::unique_ptr<Flight>> flights_;  // by the engine's shard
  std::vector<Flight*> held_;
  std::size_t delayed_ = 0;
};

class FaultyEndpoint final : public Endpoint {
 public:
  FaultyEndpoint(std::unique_ptr<Endpoint> inner, base::EventLoop& timer,
                 const FaultyOptions& options)
      : core_(std::make_shared<FaultyCore>(std::move(inner), timer, options)) {}

  Result<> post(Shard& shard) override { return core_->post(shard); }
  void cancel(const Shard& shard) override { core_->cancel(shard); }
  void sever(const Error& why) override { core_->sever(why); }
  Result<RemoteAccess> attach(const RemoteRegion& region) override {
    return core_->inner->attach(region);
  }
  void detach(const RemoteRegion& region) override { core_->inner->detach(region); }
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept override {
    return core_->inner->queued_bytes() + core_->delayed_bytes();
  }

 private:
  const std::shared_ptr<FaultyCore> core_;
};

}  // namespace crossdock::transport::faulty
