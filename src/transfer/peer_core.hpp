// Another engine as this one reaches it: the control link, its regions, the rails to it, and what
// it still owes answers for. Created by open(); dead for good when the link ends.
//
// Thread-safe. Frames are handled on the control loop.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transfer/control_link.hpp"
#include "transfer/rail_set.hpp"
#include "transfer/remote_regions.hpp"
#include "wire/segment.hpp"

namespace crossdock::transfer::detail {

class EngineCore;
class TransferCore;

class PeerCore : public std::enable_shared_from_this<PeerCore> {
 public:
  PeerCore(std::shared_ptr<EngineCore> engine, std::string name, std::string address,
           wire::Welcome welcome);
  ~PeerCore();
  [[nodiscard]] bool forked() const noexcept;
  [[nodiscard]] EngineCore& engine() const noexcept { return *engine_; }

  // Takes over the connection; returns when the whole segment is known and the best rails stand.
  Result<> connect(base::UniqueFd fd, wire::FrameReader reader, Deadline deadline);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::uint64_t instance() const noexcept { return welcome_.instance_id; }
  [[nodiscard]] bool alive() const noexcept { return alive_.load(); }
  [[nodiscard]] Error lost_error() const;     // why it is not alive
  [[nodiscard]] Error revoked_error() const;  // of a transfer whose memory the peer took back
  [[nodiscard]] std::string transport_name() const;
  [[nodiscard]] RemoteRegions& regions() noexcept { return regions_; }

  // The best rails that reach `region`; dials nothing. kUnreachable (retry later) while a lost rail
  // is dialled again, kUnsupported when no transport reaches that memory.
  Result<std::shared_ptr<RailSet>> rails_for(transport::RemoteRegion& region);
  // Blocking: dials what is down. For the dial pool.
  Result<> redial(Deadline deadline);
  // The same for the rails that replace `lost`; after it the peer takes nothing any more that was
  // sent on those.
  Result<> redial(const RailSet& lost, Deadline deadline);
  // Blocking, for a shard whose rail failed: the same transport dialled again. With
  // `transfer.fallback`, the next one that reaches the region when that fails, or for the last try.
  Result<std::shared_ptr<RailSet>> another_set(const RailSet& failed,
                                               transport::RemoteRegion& region, bool last_try,
                                               Deadline deadline);

  // Payload of all transfers to it, for who waits for his turn.
  void count_moved(std::uint64_t bytes) noexcept {
    moved_.fetch_add(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t moved_bytes() const noexcept {
    return moved_.load(std::memory_order_relaxed);
  }
  // Checksums of its own memory that it sent, or refused.
  [[nodiscard]] std::uint64_t digests_answered() const noexcept {
    return answered_.load(std::memory_order_relaxed);
  }

  void release_remote(transport::RemoteRegion& region);
  // The answer comes on any thread, exactly once: ok when the peer's engine has it.
  using OnReply = std::function<void(Result<std::uint64_t>)>;
  void send_notification(const Notification& notification, std::uint64_t transfer_id,
                         std::function<void(Result<>)> on_sent);
  void request_digest(std::vector<wire::DigestRange> ranges, std::uint64_t transfer_id,
                      OnReply on_reply);
  // Answers what the peer still owes for a transfer with `why`.
  void abandon(std::uint64_t transfer_id, const Error& why);

  // Makes connect() return soon.
  void interrupt(const Error& why);
  // Ends everything. `quiesced`: its transfers are terminal, and the peer may be told so.
  // Idempotent; any thread but the control loop.
  void shut(const Error& why, bool quiesced = true);

 private:
  // The peer's session takes 512 at a time, and one is computed after the other anyway.
  static constexpr std::size_t kMostDigests = 64;
  struct Digest {
    std::vector<wire::DigestRange> ranges;
    std::uint64_t transfer_id = 0;
    OnReply on_reply;
  };
  struct Owed {
    std::uint64_t transfer_id = 0;
    OnReply on_reply;
  };
  struct Revocation {
    std::uint64_t token = 0;
    std::vector<RemoteRegionPtr> regions;
    bool everything = false;
  };

  Result<> on_frame(const wire::Frame& frame);
  Result<> on_segment_page(const wire::Frame& frame);
  Result<> on_revoke(const wire::Frame& frame);
  Result<> on_digest_reply(const wire::Frame& frame);
  void ask_digests();
  void digest_answered(std::uint64_t sequence);
  void settle(std::uint64_t sequence, Result<std::uint64_t> reply);
  void settle_all(const Error& why);
  void on_closed(const Error& why);
  void take_out(const std::vector<std::uint32_t>& region_ids);
  void check_revocations();
  void detach(transport::RemoteRegion& region);

  // Notes what is owed for a message under a fresh sequence number, with the mutex held. Not when
  // the peer is lost: then `on_reply` is left.
  template <class M>
  void note(M& message, std::uint64_t transfer_id, OnReply& on_reply);

  Result<std::shared_ptr<RailSet>> dial_set(std::size_t slot, Deadline deadline);
  // `note` goes into the log: why no better transport does.
  Result<> dial_into(std::size_t slot, Deadline deadline, std::string_view note = {});
  Result<> drain(RailSet& set, Deadline deadline);
  [[nodiscard]] transport::PeerInfo info_for(const transport::Transport& transport) const;
  Result<> attach(RailSet& set, transport::RemoteRegion& region);
  std::shared_ptr<RailSet> fall_back(const RailSet& failed, transport::RemoteRegion& region,
                                     Deadline deadline);
  void redial_later();
  [[nodiscard]] Error rails_changed() const;
  // Dials further transports until every known region has one that reaches its memory.
  Result<> cover_regions(Deadline deadline);
  [[nodiscard]] std::shared_ptr<RailSet> set_at(std::size_t slot) const;

  const std::shared_ptr<EngineCore> engine_;
  const std::string name_;
  const std::string address_;  // of its control port
  const wire::Welcome welcome_;
  RemoteRegions regions_;
  std::shared_ptr<ControlLink> link_;
  wire::SegmentAssembler assembler_;      // loop thread
  std::vector<Revocation> revocations_;   // loop thread: not yet acknowledged
  std::vector<RemoteRegionPtr> leaving_;  // loop thread: taken back, and transfers still hold them
  bool fenced_ = false;                   // loop thread: the peer took everything back

  std::atomic<bool> alive_{true};
  std::atomic<std::uint64_t> moved_{0};
  std::atomic<std::uint64_t> answered_{0};
  std::atomic<bool> redialling_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool segment_known_ = false;
  std::optional<Error> lost_;
  std::optional<Error> interrupted_;
  std::array<std::shared_ptr<RailSet>, transport::kMaxTransports> sets_;
  std::map<std::uint64_t, Owed> owed_;
  std::deque<Digest> digests_;             // not asked for yet
  std::set<std::uint64_t> digests_asked_;  // the peer works on them, wanted or not
  std::uint64_t next_sequence_ = 1;
  std::mutex attach_mutex_;             // one region at a time; taken before mutex_
  std::mutex dial_mutex_;               // one dialler at a time; taken before attach_mutex_
  std::optional<std::size_t> primary_;  // guarded by dial_mutex_: the transport chosen by open()
};

}  // namespace crossdock::transfer::detail
