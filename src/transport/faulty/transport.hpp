// faulty: wraps another transport and injects faults by seed: delay, loss of connection, finishing
// out of order, reporting twice, flipped bits, failure half-way. For tests; "faulty+tcp" is its
// name over tcp. Owns the wrapped transport and one timer thread; callers of post() never wait for
// a fault.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/event_loop.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport {

// Rates are shards of a million. All zero: everything passes through unharmed.
struct FaultyOptions {
  std::uint64_t seed = 1;
  // Each shard starts after a random part of this.
  std::chrono::nanoseconds delay_max{0};
  // The connection is lost while the shard is under way: as sever() with kPeerLost.
  std::uint32_t drop_ppm = 0;
  // Up to so many finished shards are held back and reported in random order.
  std::uint32_t reorder = 0;
  // shard_finished() of a success comes twice. The second call follows the first on the same
  // thread, and only while another shard of the same transfer is still to be reported, so that a
  // sink which lives as long as its transfer is never called after its end.
  std::uint32_t duplicate_ppm = 0;
  // One bit is wrong at the destination; the source is not touched (writes go from a copy).
  std::uint32_t corrupt_ppm = 0;
  // Only the first half of the slices is moved, then the shard fails with kUnreachable.
  std::uint32_t fail_ppm = 0;
};

Result<std::unique_ptr<Transport>> make_faulty(std::unique_ptr<Transport> inner,
                                               const FaultyOptions& options);

namespace faulty {

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, std::unique_ptr<base::EventLoop> timer,
                  const FaultyOptions& options);

  [[nodiscard]] std::string_view name() const noexcept override { return name_; }
  [[nodiscard]] std::string local_address() const override { return inner_->local_address(); }
  [[nodiscard]] bool maps_memory() const noexcept override { return inner_->maps_memory(); }
  [[nodiscard]] std::string export_region(const mem::RegionRecord& region) const override {
    return inner_->export_region(region);
  }
  [[nodiscard]] Result<> reaches(const PeerInfo& peer) override { return inner_->reaches(peer); }
  [[nodiscard]] std::uint32_t num_rails() const noexcept override { return inner_->num_rails(); }
  Result<std::unique_ptr<Endpoint>> connect(const PeerInfo& peer, std::uint32_t rail,
                                            Deadline deadline) override;
  [[nodiscard]] bool takes_lanes() const noexcept override { return inner_->takes_lanes(); }
  Result<> accept(InboundLane lane) override { return inner_->accept(std::move(lane)); }
  bool sever_inbound(std::uint64_t session) override { return inner_->sever_inbound(session); }
  void retire_lane(std::uint64_t session, std::uint16_t lane) override {
    inner_->retire_lane(session, lane);
  }
  // A delayed shard is not executed inside post().
  [[nodiscard]] std::uint64_t inline_bytes() const noexcept override;

 private:
  const FaultyOptions options_;
  const std::unique_ptr<Transport> inner_;
  const std::string name_;
  std::atomic<std::uint64_t> connections_{0};     // each gets its own sequence of the seed
  const std::unique_ptr<base::EventLoop> timer_;  // last: stops before the rest goes
};

}  // namespace faulty
}  // namespace crossdock::transport
