// One submitted batch from submission to its terminal state: its slices, its shards, its leases.
//
// Recycled through a pool, so that a transfer in steady state allocates nothing per slice. Owned by
// the handles of the caller and, while it is in flight, by itself (`self_`). Shards finish on any
// thread; the thread that finishes the last one runs complete(). Thread-safe unless noted.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <crossdock/transfer/types.hpp>

#include "mem/region_table.hpp"
#include "transfer/pointer_set.hpp"
#include "transfer/rail_set.hpp"
#include "transport/transport.hpp"

namespace crossdock::transfer::detail {

class EngineCore;
class PeerCore;

class TransferCore final : public transport::ShardSink,
                           public std::enable_shared_from_this<TransferCore> {
 public:
  TransferCore() = default;

  // --- set up by submit(), on one thread, before start() ---
  std::uint64_t id = 0;
  EngineCore* engine = nullptr;
  std::shared_ptr<PeerCore> peer;
  TransferOptions options;
  Deadline deadline = Deadline::now();
  Op first_op = Op::kWrite;
  bool checksum = false;
  // What the TransferList has seen it do; and others, while it waits for its turn behind them.
  struct Progress {
    std::uint64_t bytes = 0;
    std::uint64_t others = 0;
    friend bool operator==(const Progress&, const Progress&) = default;
  };
  struct Watch {
    std::chrono::nanoseconds stall{0};  // 0: it may stand still
    Progress seen;
    Deadline since = Deadline::now();  // of `seen`
  };
  Watch watch;
  std::uint64_t submitted_ns = 0;
  std::uint64_t bytes_total = 0;
  std::vector<transport::Slice> slices;
  std::vector<transport::Shard> shards;
  std::vector<mem::Lease> local_leases;
  std::vector<std::shared_ptr<transport::RemoteRegion>> remote_leases;
  PointerSet planned_local, planned_remote;  // the regions of the leases, while they are collected

  // Notes which rail carries a shard, before it is posted there. Thread-safe: a retry does it too.
  void assign(transport::Shard& shard, const std::shared_ptr<RailSet>& set,
              transport::Endpoint* rail);
  // Marks every shard as in flight; from here on the transfer keeps itself alive.
  void start();
  // Every shard was posted or refused; before this call the transfer cannot complete.
  void all_posted() noexcept;
  // Accounts for a shard that could not be posted.
  void shard_refused(transport::Shard& shard, const Error& error) noexcept;

  // A shard that failed and will not be tried again; it is neither in flight nor held.
  void give_up(const Error& error) noexcept;
  // A failed shard that waits for another try. Held shards are given up when the transfer stops (if
  // they are in doubt, once their rail is known to be quiet: EngineCore::confirm_cut()), so whoever
  // wants to go on with one takes it first; false: it was given up.
  void hold(transport::Shard& shard) noexcept;
  bool take_held(transport::Shard& shard) noexcept;
  void give_up_held(transport::Shard& shard, const Error& error) noexcept;
  // A shard in doubt, whose peer shall say that nothing of it arrives any more.
  // give_up_cut() counts once, whoever comes first.
  void await_cut(transport::Shard& shard) noexcept;
  void give_up_cut(transport::Shard& shard, const Error& error) noexcept;
  // Progress that was reported for slices which are copied again.
  void take_back(std::uint64_t bytes) noexcept { bytes_done_.fetch_sub(bytes); }
  // Null once the transfer is over.
  [[nodiscard]] std::shared_ptr<RailSet> set_of(const transport::Shard& shard) const;
  [[nodiscard]] std::shared_ptr<transport::RemoteRegion> lease_of(
      const transport::RemoteRegion* region) const;

  // --- while in flight ---
  [[nodiscard]] Status status() const;
  [[nodiscard]] Progress progress() const;
  [[nodiscard]] bool terminal() const noexcept { return is_terminal(state_.load()); }
  Result<> wait(Deadline until);
  // Asks the rails and, after the data, the peer to let go of it. The first reason wins; false when
  // there was one, or the transfer is over.
  bool request_stop(Error reason);
  // Whether a region it uses was taken back by the peer.
  [[nodiscard]] bool uses_revoked() const;
  // Cuts the rails that still hold a shard of it.
  void sever_rails(const Error& why);
  [[nodiscard]] std::optional<Error> stop_reason() const;
  // Sequentially consistent with hold(): see EngineCore::retry().
  [[nodiscard]] bool stopping() const noexcept { return stop_.load(); }
  [[nodiscard]] const std::atomic<bool>* stop_flag() const noexcept { return &stop_; }
  // Whether no rail has a shard of it.
  [[nodiscard]] bool at_rest() const noexcept;
  // Ends the transfer; called by the stages after the data (checksum, notification) as well.
  void finish(std::optional<Error> error);
  // The hashing thread got to it; false: it was stopped meanwhile and is over.
  bool begin_hashing();
  // It is hashed here; the rest is up to the peer.
  void await_digests();
  // After the data: checksum, then notification, then finish().
  void after_checksum();
  // Whoever has just asked the peer for an answer: a stop that came before is told to it.
  void heed_stop();

  // Frees what belongs to one life; slab capacity stays. Precondition: terminal or never started.
  void recycle();

  // ShardSink
  void shard_progress(transport::Shard& shard, std::uint64_t bytes) noexcept override;
  void shard_finished(transport::Shard& shard, const Error* error) noexcept override;

  // Guarded by the TransferList.
  enum class Listing : std::uint8_t { kNever, kListed, kOver };
  Listing listing = Listing::kNever;
  std::list<std::shared_ptr<TransferCore>>::iterator list_position;

 private:
  // Shard::in_flight.
  enum Where : std::uint32_t { kNowhere = 0, kOnRail = 1, kHeld = 2, kCut = 3 };
  void shard_over() noexcept;
  void give_up_all_held() noexcept;
  void complete();
  void release_leases();
  [[nodiscard]] State final_state(const std::optional<Error>& error) const;
  void record_error(const Error& error);

  std::shared_ptr<TransferCore> self_;
  std::atomic<std::uint32_t> shards_left_{0};
  std::atomic<std::uint32_t> held_{0};  // shards that wait for another try
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<State> state_{State::kPosted};
  std::atomic<std::uint32_t> done_{0};  // futex word: 1 when terminal
  std::atomic<std::uint32_t> waiters_{0};
  mutable std::mutex mutex_;  // guards what follows
  struct Ride {
    std::shared_ptr<RailSet> set;
    transport::Endpoint* rail = nullptr;
    transport::Shard* shard = nullptr;
  };
  [[nodiscard]] std::vector<Ride> rides() const;
  std::vector<Ride> rides_;  // one a shard, by index
  // What it waits for: its shards; the hashing thread; the checksum here; the peer's; its word that
  // it has the notification. Ended there (kOver) only by who takes it from the hashing thread's
  // queue.
  enum class Stage : std::uint8_t { kData, kHashQueued, kHashing, kDigests, kNotice, kOver };
  [[nodiscard]] Stage stage() const;
  Stage stage_ = Stage::kData;
  std::optional<Error> stop_reason_;
  std::optional<Error> error_;
};

// Hands out transfers and takes them back. Outlives the engine through shared ownership.
class TransferPool : public std::enable_shared_from_this<TransferPool> {
 public:
  std::shared_ptr<TransferCore> acquire();

 private:
  void give_back(std::unique_ptr<TransferCore> transfer);
  static constexpr std::size_t kKeep = 256;
  std::mutex mutex_;
  std::vector<std::unique_ptr<TransferCore>> free_;
};

}  // namespace crossdock::transfer::detail
