// The shared state behind an Engine handle: owns every part and wires them together.
//
//   control loop (1 thread)   handshakes, sessions, peers' frames, deadlines
//   dial pool (on demand)     dialling again
//   hashing thread (on demand)  checksums, this engine's and its peers'
//   job thread (on demand)    publishing
//   transports' threads       moving bytes
//
// Created by Engine::create, ended by shutdown(); Region, Peer and Transfer handles may keep the
// shell alive after that. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <crossdock/transfer/engine.hpp>

#include "base/config.hpp"
#include "base/event_loop.hpp"
#include "base/fork_check.hpp"
#include "base/gate.hpp"
#include "base/job_thread.hpp"
#include "base/log.hpp"
#include "base/metrics.hpp"
#include "base/trace.hpp"
#include "mem/region_table.hpp"
#include "mem/shared_memory.hpp"
#include "transfer/claims.hpp"
#include "transfer/control_server.hpp"
#include "transfer/dial_pool.hpp"
#include "transfer/mailbox.hpp"
#include "transfer/orphans.hpp"
#include "transfer/peer_core.hpp"
#include "transfer/publisher.hpp"
#include "transfer/session_board.hpp"
#include "transfer/settings.hpp"
#include "transfer/short_wait.hpp"
#include "transfer/transfer_core.hpp"
#include "transfer/transfer_list.hpp"
#include "transport/transport.hpp"

namespace crossdock::transfer::detail {

// "faulty+tcp" speaks to the peer's "tcp": the fault injector is a wrapper on one side only.
inline std::string_view base_name(std::string_view transport) {
  const auto plus = transport.rfind('+');
  return plus == std::string_view::npos ? transport : transport.substr(plus + 1);
}

using base::DeleteUnlessForked;

class EngineCore : public std::enable_shared_from_this<EngineCore> {
 public:
  static Result<std::shared_ptr<EngineCore>> create(EngineOptions options);
  explicit EngineCore(base::Config config) : config_(std::move(config)) {}
  ~EngineCore();

  // kClosed after shutdown, kUnsupported in a forked child.
  [[nodiscard]] Result<> usable() const;
  // In a child of the process that made it: its threads are not here and its locks may be held for
  // ever, so nothing of it is taken apart.
  [[nodiscard]] bool forked() const noexcept { return fork_.forked(); }
  // kInvalidArgument on the control thread: `call` waits for what that thread would have to do.
  [[nodiscard]] Result<> may_wait(std::string_view call) const;
  // Closed, and every peer has confirmed that it touches no memory of this engine any more.
  [[nodiscard]] bool let_go() const noexcept { return let_go_.load(); }
  [[nodiscard]] bool closing() const noexcept { return closed_.load(); }
  // A descriptor that is readable once the engine ends: cuts dials short.
  [[nodiscard]] int interrupt() const noexcept { return interrupt_.get(); }
  // Idempotent. Ok when everything is quiesced; kBusy or kDeadline name who is not.
  Result<> shutdown(Deadline deadline);

  // --- memory (engine_memory.cpp) ---
  Result<std::vector<std::shared_ptr<RegionCore>>> add_regions(
      std::span<const mem::NewRegion> regions, const RegionOptions& options);
  Result<> release(mem::RegionRecord& region, Deadline deadline);
  // The last handle of a region went; `memory`, if any, is freed with it.
  void release_unattended(std::optional<mem::SharedMemory> memory,
                          std::shared_ptr<mem::RegionRecord> record);
  Result<> forget_region(mem::RegionRecord& region);
  // Memory whose last handle goes after the end began.
  void keep_until_the_end(std::optional<mem::SharedMemory> memory);
  [[nodiscard]] wire::Welcome welcome(std::uint64_t data_token) const;
  [[nodiscard]] std::vector<std::vector<std::byte>> segment_frames() const;

  // --- peers and transfers (engine_transfer.cpp) ---
  Result<std::shared_ptr<PeerCore>> open(std::string_view name, Deadline deadline);
  Result<std::shared_ptr<TransferCore>> submit(const std::shared_ptr<PeerCore>& peer,
                                               std::span<const Request> batch,
                                               TransferOptions options);
  // Takes a shard that is in doubt and that shall not be tried again, to end it once the peer has
  // let go of its rail, or `transfer.quiesce_grace` after it came back; false when there is nothing
  // to wait for.
  bool confirm_cut(TransferCore& transfer, transport::Shard& shard, const Error& error) noexcept;
  // Takes a failed shard for another try; false when there shall be none.
  bool retry(TransferCore& transfer, transport::Shard& shard, const Error& error) noexcept;
  // When a transfer with this deadline is terminal at the latest.
  [[nodiscard]] Deadline quiesced_by(Deadline deadline) const;
  void account(const TransferCore& transfer, State state) noexcept;

  void count_redial() noexcept { counters_.redials->add(); }
  void count_fallback() noexcept { counters_.fallbacks->add(); }

  [[nodiscard]] base::EventLoop& loop() noexcept { return *loop_; }
  [[nodiscard]] base::JobThread& hasher() noexcept { return hasher_; }
  // What that thread has done, for who waits for his turn.
  void count_hashed(std::uint64_t bytes) noexcept {
    hashed_.fetch_add(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t hashed_bytes() const noexcept {
    return hashed_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] DialPool& dials() noexcept { return dials_; }
  [[nodiscard]] base::Logger& log() noexcept { return log_; }
  [[nodiscard]] base::Registry& metrics() noexcept { return metrics_; }
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
  [[nodiscard]] const Identity& identity() const noexcept { return identity_; }
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  [[nodiscard]] mem::RegionTable& regions() noexcept { return regions_; }
  [[nodiscard]] const std::vector<std::unique_ptr<transport::Transport>>& transports()
      const noexcept {
    return transports_;
  }
  // Whether peers map what this engine allocates.
  [[nodiscard]] Result<bool> maps_memory();
  // For calls that use what shutdown() takes apart.
  [[nodiscard]] base::Gate& gate() noexcept { return gate_; }
  [[nodiscard]] const std::shared_ptr<RailCount>& rail_count() const noexcept {
    return rail_count_;
  }
  [[nodiscard]] SessionBoard& sessions() noexcept { return sessions_; }
  [[nodiscard]] Mailboxes& mailboxes() noexcept { return *mailboxes_; }
  [[nodiscard]] TransferList& transfers() noexcept { return *transfers_; }
  [[nodiscard]] ShortWait& short_wait() noexcept { return short_wait_; }

 private:
  Result<> start(const EngineOptions& options);
  Result<> start_transports();
  Result<> publish(const std::string& store);
  void republish_later();
  void on_welcome(std::shared_ptr<ControlLink> link, const wire::Hello& hello);
  void on_data_lane(const std::shared_ptr<ControlLink>& link, const wire::Hello& hello);
  void refuse(ControlLink& link, const std::string& why) const;
  [[nodiscard]] std::vector<wire::RegionEntry> entries_of(
      std::span<const std::shared_ptr<mem::RegionRecord>> regions) const;
  void announce(std::span<const std::shared_ptr<mem::RegionRecord>> regions);
  // The peer opened by that name, or the one that is that instance, when it lives; else null.
  std::shared_ptr<PeerCore> known_peer(const std::string& name);
  std::shared_ptr<PeerCore> known_instance(std::uint64_t instance);
  Result<std::shared_ptr<PeerCore>> dial_peer(const std::string& name, Deadline deadline);
  Result<std::shared_ptr<PeerCore>> connect_peer(const std::string& name,
                                                 const std::string& address, Greeting greeting,
                                                 Deadline deadline);
  void post_shards(TransferCore& transfer, const std::vector<std::shared_ptr<RailSet>>& sets);
  void post_shard(TransferCore& transfer, transport::Shard& shard,
                  const std::shared_ptr<RailSet>& set);
  void repost(const std::shared_ptr<TransferCore>& transfer, transport::Shard& shard,
              const Error& error);
  void redial_and_repost(const std::shared_ptr<TransferCore>& transfer, transport::Shard& shard,
                         const Error& error, bool go_on);
  // When nothing of a shard that came back in doubt arrives any more, whatever its peer says.
  [[nodiscard]] Deadline quiet_by(const transport::Shard& shard) const;
  // Blocking, for the dial pool: false when this engine closed before those rails were known to be
  // quiet.
  bool await_quiet(PeerCore& peer, const RailSet& set, Deadline until) const;
  Result<> close_entry(Deadline deadline);
  Result<> stop_transfers(Deadline deadline);
  Result<> make_peers_let_go(Deadline deadline);
  void stop_peers(const Error& why, bool quiesced);
  void end_threads(const Error& why, bool let_go);

  struct Counters {
    std::shared_ptr<base::Counter> delivered, failed, cancelled, bytes, retries, connects, redials,
        fallbacks;
    std::shared_ptr<base::Gauge> regions;
    std::shared_ptr<base::Histogram> latency;
  };
  void warn_of_trace(const Result<>& written);
  void make_counters();

  const base::Config config_;
  Settings settings_;
  ShortWait short_wait_;
  base::Logger log_;
  base::Registry metrics_;
  std::shared_ptr<base::Tracer> tracer_;
  Counters counters_;
  Identity identity_;
  std::string address_;
  mem::RegionTable regions_;
  std::shared_ptr<TransferPool> pool_ = std::make_shared<TransferPool>();
  std::unique_ptr<Mailboxes> mailboxes_;
  SessionBoard sessions_{*this};
  Orphans orphans_{*this};
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::unique_ptr<base::EventLoop> loop_;
  base::JobThread jobs_{"xd-jobs"};
  base::JobThread hasher_{"xd-hash"};
  DialPool dials_;
  std::unique_ptr<TransferList> transfers_;
  std::unique_ptr<ControlServer> server_;
  std::unique_ptr<Publisher> publisher_;
  std::atomic<std::uint64_t> next_transfer_{1};
  std::atomic<std::uint32_t> in_flight_{0};
  std::atomic<std::uint64_t> hashed_{0};
  std::atomic<bool> closed_{false};
  std::atomic<bool> let_go_{false};  // closed, and no peer touches its memory any more
  const base::ForkCheck fork_;
  base::Gate gate_;  // calls that use what shutdown() takes apart
  const std::shared_ptr<RailCount> rail_count_ = std::make_shared<RailCount>();
  base::UniqueFd interrupt_;

  std::mutex mutex_;                                      // guards what follows
  std::map<std::string, std::weak_ptr<PeerCore>> peers_;  // by each name it was opened by
  std::vector<std::weak_ptr<PeerCore>> connecting_;
  std::vector<mem::SharedMemory> kept_;
  Claims openings_;
  Claims closing_;                   // one thread at a time is inside shutdown()
  std::optional<Result<>> outcome_;  // of shutdown(); guarded by that claim
};

// Behind a Region handle. The last handle releases it.
class RegionCore {
 public:
  RegionCore(std::shared_ptr<EngineCore> owner, std::shared_ptr<mem::RegionRecord> its_record)
      : engine(std::move(owner)), record(std::move(its_record)) {}
  ~RegionCore();
  [[nodiscard]] bool forked() const noexcept { return engine->forked(); }

  const std::shared_ptr<EngineCore> engine;
  const std::shared_ptr<mem::RegionRecord> record;
  std::optional<mem::SharedMemory> memory;  // of Engine::allocate
  std::atomic<bool> released{false};
};

}  // namespace crossdock::transfer::detail
