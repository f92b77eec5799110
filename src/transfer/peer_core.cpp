// See peer_core.hpp. What goes over the control link is here; rails and dialling are in
// peer_rails.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/peer_core.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "transfer/engine_core.hpp"

namespace crossdock::transfer::detail {

PeerCore::PeerCore(std::shared_ptr<EngineCore> engine, std::string name, std::string address,
                   wire::Welcome welcome)
    : engine_(std::move(engine)),
      name_(std::move(name)),
      address_(std::move(address)),
      welcome_(std::move(welcome)) {}

PeerCore::~PeerCore() {
  // No transfer holds this peer any more, so the Bye is true: nothing touches its memory.
  if (!link_) return;
  link_->send_last(wire::Bye{.reason = "the peer handle was dropped"});
  engine_->loop().post([link = std::move(link_)] {
    link->close(make_error(Code::kClosed, "the peer handle was dropped"));
  });
}

bool PeerCore::forked() const noexcept {
  return engine_->forked();
}

Result<> PeerCore::connect(base::UniqueFd fd, wire::FrameReader reader, Deadline deadline) {
  link_ = std::make_shared<ControlLink>(engine_->loop(), std::move(fd), std::move(reader));
  const bool posted = engine_->loop().post([self = shared_from_this()] {
    // Weak: the link must not keep the peer alive, only the handles and transfers do.
    std::weak_ptr<PeerCore> weak = self;
    self->link_->start(
        [weak](const wire::Frame& frame) -> Result<> {
          const auto peer = weak.lock();
          return peer ? peer->on_frame(frame) : Result<>();
        },
        [weak](const Error& why) {
          if (const auto peer = weak.lock()) peer->on_closed(why);
        });
    self->link_->keep_alive(self->engine_->settings().silence);
  });
  if (!posted) return make_error(Code::kClosed, "the engine is closed");
  {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.when(),
                             [&] { return segment_known_ || lost_ || interrupted_; }))
      return make_error(Code::kDeadline,
                        fmt::format("peer '{}' did not send its segment in time", name_));
    if (lost_) return *lost_;
    if (interrupted_) return *interrupted_;
  }
  CROSSDOCK_CHECK_OK(redial(deadline));
  return cover_regions(deadline);
}

void PeerCore::interrupt(const Error& why) {
  const std::lock_guard lock(mutex_);
  interrupted_ = why;
  changed_.notify_all();
}

Error PeerCore::lost_error() const {
  const std::lock_guard lock(mutex_);
  if (lost_) return *lost_;
  return make_error(Code::kPeerLost, fmt::format("peer '{}' is gone; open it again", name_));
}

Error PeerCore::revoked_error() const {
  return Error{.code = Code::kClosed,
               .scope = Scope::kTransfer,
               .message = fmt::format("peer '{}' released the memory of this transfer", name_)};
}

Result<> PeerCore::on_frame(const wire::Frame& frame) {
  switch (frame.type) {
    case wire::MessageType::kSegmentPage:
      return on_segment_page(frame);
    case wire::MessageType::kRegionAdded: {
      CROSSDOCK_TRY(added, wire::decode<wire::RegionAdded>(frame.payload));
      if (fenced_) return {};
      return regions_.add(added.regions, welcome_.transports);
    }
    case wire::MessageType::kRegionsRemoved: {
      CROSSDOCK_TRY(removed, wire::decode<wire::RegionsRemoved>(frame.payload));
      if (removed.region_ids.empty()) return {};
      take_out(removed.region_ids);
      check_revocations();
      return {};
    }
    case wire::MessageType::kRevoke:
      return on_revoke(frame);
    case wire::MessageType::kNotifyAck: {
      CROSSDOCK_TRY(ack, wire::decode<wire::NotifyAck>(frame.payload));
      if (ack.code == Code::kOk) return settle(ack.sequence, std::uint64_t{0}), Result<>();
      return settle(ack.sequence,
                    Error{.code = ack.code,
                          .retry = Retry::kLater,
                          .message = fmt::format("peer '{}' did not take the notification: {}",
                                                 name_, crossdock::to_string(ack.code))}),
             Result<>();
    }
    case wire::MessageType::kDigestReply:
      return on_digest_reply(frame);
    case wire::MessageType::kPing: {
      CROSSDOCK_TRY(ping, wire::decode<wire::Ping>(frame.payload));
      return link_->send(wire::Pong{.value = ping.value});
    }
    case wire::MessageType::kPong:
      return {};
    case wire::MessageType::kBye: {
      CROSSDOCK_TRY(bye, wire::decode<wire::Bye>(frame.payload));
      return Error{.code = Code::kPeerLost,
                   .scope = Scope::kPeer,
                   .retry = Retry::kAfterReconnect,
                   .message = fmt::format("peer '{}' left: {}", name_, bye.reason)};
    }
    default:
      return Error{
          .code = Code::kCorrupt,
          .scope = Scope::kPeer,
          .message = fmt::format("peer '{}' sent {} where only a server's messages are allowed",
                                 name_, wire::to_string(frame.type))};
  }
}

Result<> PeerCore::on_segment_page(const wire::Frame& frame) {
  CROSSDOCK_TRY(page, wire::decode<wire::SegmentPage>(frame.payload));
  CROSSDOCK_TRY(complete, assembler_.add(std::move(page)));
  if (!complete) return {};
  CROSSDOCK_CHECK_OK(regions_.add(assembler_.take(), welcome_.transports));
  const std::lock_guard lock(mutex_);
  segment_known_ = true;
  changed_.notify_all();
  return {};
}

// The peer wants regions back (or, naming none, everything): what runs on them is stopped, and the
// acknowledgement goes out when the last of it is quiesced. That holds for regions which an earlier
// request took out of the lookup, too: the peer may ask again as often as it likes. After
// everything nothing is left to do here: the link ends, and the engine is opened anew.
Result<> PeerCore::on_revoke(const wire::Frame& frame) {
  CROSSDOCK_TRY(revoke, wire::decode<wire::Revoke>(frame.payload));
  take_out(revoke.region_ids);
  const auto& ids = revoke.region_ids;
  if (ids.empty()) fenced_ = true;
  std::sort(revoke.region_ids.begin(), revoke.region_ids.end());
  auto& regions = revocations_.emplace_back(Revocation{revoke.token, {}, ids.empty()}).regions;
  std::copy_if(leaving_.begin(), leaving_.end(), std::back_inserter(regions),
               [&](const RemoteRegionPtr& region) {
                 return ids.empty() || std::binary_search(ids.begin(), ids.end(), region->id);
               });
  check_revocations();
  return {};
}

void PeerCore::take_out(const std::vector<std::uint32_t>& region_ids) {
  auto taken = regions_.revoke(region_ids);
  std::move(taken.begin(), taken.end(), std::back_inserter(leaving_));
  const Error why = revoked_error();
  for (const auto& transfer : engine_->transfers().all()) {
    if (transfer->peer.get() != this) continue;
    if (transfer->uses_revoked()) transfer->request_stop(why);
  }
}

void PeerCore::check_revocations() {
  std::erase_if(leaving_, [this](const RemoteRegionPtr& region) {
    if (region->leases.load() != 0) return false;
    detach(*region);
    return true;
  });
  for (auto it = revocations_.begin(); it != revocations_.end();) {
    const bool quiet = std::all_of(it->regions.begin(), it->regions.end(),
                                   [](const RemoteRegionPtr& r) { return r->leases.load() == 0; });
    if (!quiet) {
      ++it;
      continue;
    }
    for (const auto& region : it->regions)
      detach(*region);
    const wire::RevokeAck done{.token = it->token};
    const bool everything = it->everything;
    it = revocations_.erase(it);
    // A peer that does not read is told by the end of the link.
    if (const auto sent = link_->send(done); !sent.ok()) return link_->close(sent.error());
    if (everything)
      return link_->close(Error{.code = Code::kPeerLost,
                                .scope = Scope::kPeer,
                                .retry = Retry::kAfterReconnect,
                                .message = "it took back all of its memory"});
  }
}

void PeerCore::release_remote(transport::RemoteRegion& region) {
  // Sequentially consistent with revoke(): either the revocation sees no lease, or we see it.
  if (region.leases.fetch_sub(1) != 1 || !region.revoked.load()) return;
  engine_->loop().post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check_revocations();
  });
}

template <class M>
void PeerCore::note(M& message, std::uint64_t transfer_id, OnReply& on_reply) {
  if (lost_) return;
  message.sequence = next_sequence_++;
  owed_.emplace(message.sequence, Owed{transfer_id, std::exchange(on_reply, nullptr)});
}

void PeerCore::send_notification(const Notification& notification, std::uint64_t transfer_id,
                                 std::function<void(Result<>)> on_sent) {
  wire::Notify message{
      .transfer_id = transfer_id, .mailbox = notification.mailbox, .payload = notification.payload};
  OnReply on_reply = [on_sent = std::move(on_sent)](Result<std::uint64_t> reply) {
    on_sent(reply.ok() ? Result<>() : Result<>(std::move(reply).error()));
  };
  {
    const std::lock_guard lock(mutex_);
    note(message, transfer_id, on_reply);
  }
  if (on_reply) return on_reply(lost_error());
  if (auto sent = link_->send(message); !sent.ok())
    settle(message.sequence, std::move(sent).error());
}

void PeerCore::request_digest(std::vector<wire::DigestRange> ranges, std::uint64_t transfer_id,
                              OnReply on_reply) {
  {
    const std::lock_guard lock(mutex_);
    if (!lost_)
      digests_.push_back({std::move(ranges), transfer_id, std::exchange(on_reply, nullptr)});
  }
  if (on_reply) return on_reply(lost_error());
  ask_digests();
}

// As many as the peer shall have before it.
void PeerCore::ask_digests() {
  while (true) {
    wire::DigestRequest message;
    {
      const std::lock_guard lock(mutex_);
      if (lost_ || digests_.empty() || digests_asked_.size() >= kMostDigests) return;
      auto next = std::move(digests_.front());
      digests_.pop_front();
      message.ranges = std::move(next.ranges);
      note(message, next.transfer_id, next.on_reply);
      digests_asked_.insert(message.sequence);
    }
    if (auto sent = link_->send(message); !sent.ok()) {
      digest_answered(message.sequence);
      settle(message.sequence, std::move(sent).error());
    }
  }
}

void PeerCore::digest_answered(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  digests_asked_.erase(sequence);
}

Result<> PeerCore::on_digest_reply(const wire::Frame& frame) {
  CROSSDOCK_TRY(reply, wire::decode<wire::DigestReply>(frame.payload));
  answered_.fetch_add(1, std::memory_order_relaxed);
  digest_answered(reply.sequence);
  ask_digests();
  if (reply.code == Code::kOk)
    settle(reply.sequence, reply.digest);
  else
    settle(reply.sequence, make_error(reply.code, fmt::format("peer '{}' could not check: {}",
                                                              name_, reply.message)));
  return {};
}

void PeerCore::settle(std::uint64_t sequence, Result<std::uint64_t> reply) {
  OnReply on_reply;
  {
    const std::lock_guard lock(mutex_);
    const auto found = owed_.find(sequence);
    if (found == owed_.end()) return;  // abandoned before
    on_reply = std::move(found->second.on_reply);
    owed_.erase(found);
  }
  on_reply(std::move(reply));
}

void PeerCore::abandon(std::uint64_t transfer_id, const Error& why) {
  std::vector<OnReply> replies;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = owed_.begin(); it != owed_.end();) {
      if (it->second.transfer_id != transfer_id) {
        ++it;
        continue;
      }
      replies.push_back(std::move(it->second.on_reply));
      it = owed_.erase(it);
    }
    std::erase_if(digests_, [&](Digest& digest) {
      if (digest.transfer_id != transfer_id) return false;
      replies.push_back(std::move(digest.on_reply));
      return true;
    });
  }
  for (const auto& reply : replies)
    reply(why);
}

void PeerCore::settle_all(const Error& why) {
  std::map<std::uint64_t, Owed> owed;
  std::deque<Digest> digests;
  {
    const std::lock_guard lock(mutex_);
    owed.swap(owed_);
    digests.swap(digests_);
  }
  for (const auto& [sequence, entry] : owed)
    entry.on_reply(why);
  for (const auto& digest : digests)
    digest.on_reply(why);
}

// The control link ended: the peer is dead, or as good as.
void PeerCore::on_closed(const Error& why) {
  const Error lost{.code = why.code == Code::kClosed ? Code::kClosed : Code::kPeerLost,
                   .scope = Scope::kPeer,
                   .retry = Retry::kAfterReconnect,
                   .native = why.native,
                   .message = fmt::format("peer '{}' (instance {:016x}) is lost: {}", name_,
                                          instance(), why.message)};
  std::array<std::shared_ptr<RailSet>, transport::kMaxTransports> sets;
  {
    const std::lock_guard lock(mutex_);
    if (lost_) return;
    lost_ = lost;
    alive_.store(false);
    // Destroyed when their last shard is over, and the descriptor of the link with them.
    sets.swap(sets_);
    changed_.notify_all();
  }
  regions_.wake();
  for (const auto& transfer : engine_->transfers().all())
    if (transfer->peer.get() == this) transfer->request_stop(lost);
  for (const auto& set : sets)
    if (set) set->sever(lost);
  settle_all(lost);
  engine_->mailboxes().tell_watchers({.kind = Message::Kind::kLinkLost,
                                      .peer = name_,
                                      .peer_instance = instance(),
                                      .payload = lost.message});
}

void PeerCore::shut(const Error& why, bool quiesced) {
  if (link_) {
    if (quiesced) link_->send_last(wire::Bye{.reason = why.message});
    engine_->loop().run([&] { link_->close(why); });
  }
  std::array<std::shared_ptr<RailSet>, transport::kMaxTransports> sets;
  {
    const std::lock_guard lock(mutex_);
    sets.swap(sets_);
  }
}

}  // namespace crossdock::transfer::detail
