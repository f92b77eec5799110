// The engine's peers and transfers: opening, submitting, retrying.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <poll.h>

#include "base/clock.hpp"
#include "base/socket.hpp"
#include "transfer/engine_core.hpp"
#include "transfer/planner.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr std::size_t kMaxMailboxBytes = 64;
constexpr std::size_t kMaxPayloadBytes = 60 * 1024;

// A rail failed, not the request: the same bytes may get through another way. What the peer
// answered is its verdict, whatever the code, and comes without a hint to try again.
bool is_rail_fault(const Error& error) {
  if (error.retry == Retry::kNo) return false;
  return error.code == Code::kUnreachable || error.code == Code::kPeerLost ||
         error.code == Code::kClosed || error.code == Code::kWouldBlock;
}

Result<> check_notification(const Notification& notification) {
  if (notification.mailbox.empty() || notification.mailbox.size() > kMaxMailboxBytes)
    return invalid_argument(fmt::format("a mailbox name has 1 to {} bytes; this one has {}",
                                        kMaxMailboxBytes, notification.mailbox.size()));
  if (notification.payload.size() > kMaxPayloadBytes)
    return invalid_argument(
        fmt::format("a notification carries at most {} bytes, this one has {}; "
                    "write larger data into a region",
                    kMaxPayloadBytes, notification.payload.size()));
  return {};
}

// What is left of a shard after its front arrived.
void trim_shard(TransferCore& transfer, transport::Shard& shard) {
  std::uint64_t arrived = 0;
  for (const auto& slice : shard.slices.first(shard.slices_done))
    arrived += slice.length;
  transfer.take_back(shard.progress - arrived);
  shard.slices = shard.slices.subspan(shard.slices_done);
  shard.bytes -= arrived;
  shard.slices_done = 0;
  shard.progress = 0;
  shard.next = nullptr;
}

}  // namespace

Result<std::shared_ptr<PeerCore>> EngineCore::open(std::string_view name, Deadline deadline) {
  CROSSDOCK_CHECK_OK(usable());
  const auto keep = shared_from_this();  // the handle may be dropped while this waits
  if (name.empty()) return invalid_argument("the peer name is empty");
  if (loop_->on_loop_thread())
    return invalid_argument("open() blocks and must not be called from a callback of the engine");
  const std::string key(name);
  if (auto known = known_peer(key)) return known;
  // One thread dials; the others that want this peer get what it gets.
  CROSSDOCK_TRY(claim, openings_.take(key, deadline, "opening peer"));
  CROSSDOCK_CHECK_OK(usable());
  if (auto known = known_peer(key)) return known;
  CROSSDOCK_TRY(peer, dial_peer(key, deadline));
  const std::lock_guard lock(mutex_);
  if (closed_.load()) return usable().error();
  std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
  peers_[key] = peer;
  return peer;
}

std::shared_ptr<PeerCore> EngineCore::known_peer(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(name);
  auto peer = found != peers_.end() ? found->second.lock() : nullptr;
  return peer && peer->alive() ? peer : nullptr;
}

std::shared_ptr<PeerCore> EngineCore::known_instance(std::uint64_t instance) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, weak] : peers_)
    if (auto peer = weak.lock(); peer && peer->alive() && peer->instance() == instance) return peer;
  return nullptr;
}

Result<std::shared_ptr<PeerCore>> EngineCore::dial_peer(const std::string& name,
                                                        Deadline deadline) {
  CROSSDOCK_TRY(record, publisher_->find(name, deadline));
  CROSSDOCK_TRY(where, base::parse_host_port(record.address));
  auto greeting = dial(where, identity_, {.interrupt = interrupt()},
                       earlier(deadline, Deadline::in(settings_.connect_timeout)));
  if (!greeting.ok()) {
    Error error = std::move(greeting).error();
    error.scope = Scope::kPeer;
    error.message = fmt::format("peer '{}' at {}: {}", name, record.address, error.message);
    return error;
  }
  if (record.instance != 0 && record.instance != greeting->welcome.instance_id)
    return Error{.code = Code::kPeerLost,
                 .scope = Scope::kPeer,
                 .retry = Retry::kLater,
                 .message = fmt::format("the store says that peer '{}' is instance {:016x}, but {} "
                                        "answers at {}; its entry is stale",
                                        name, record.instance, greeting->welcome.engine_name,
                                        record.address)};
  // Another spelling of a peer that is open: it has one object, or its memory would be attached and
  // let go of twice. Claimed, so that two spellings opened at once find each other.
  const auto instance = greeting->welcome.instance_id;
  CROSSDOCK_TRY(
      claim, openings_.take(fmt::format("instance {:016x}", instance), deadline, "connecting to"));
  if (auto known = known_instance(instance)) return known;
  return connect_peer(name, record.address, std::move(*greeting), deadline);
}

Result<std::shared_ptr<PeerCore>> EngineCore::connect_peer(const std::string& name,
                                                           const std::string& address,
                                                           Greeting greeting, Deadline deadline) {
  const base::Gate::Pass pass(gate_);
  if (!pass) return usable().error();
  const std::shared_ptr<PeerCore> peer(
      new PeerCore(shared_from_this(), name, address, std::move(greeting.welcome)),
      DeleteUnlessForked{});
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(connecting_, [](const auto& weak) { return weak.expired(); });
    connecting_.push_back(peer);
  }
  // After the listing: either shutdown() finds this peer there, or the engine is seen closed here.
  CROSSDOCK_CHECK_OK(usable());
  auto connected = peer->connect(std::move(greeting.fd), std::move(greeting.reader), deadline);
  if (!connected.ok()) {
    peer->shut(connected.error());
    return std::move(connected).error();
  }
  counters_.connects->add();
  const std::lock_guard lock(mutex_);
  peers_[name] = peer;  // before the claim goes
  return peer;
}

Result<std::shared_ptr<TransferCore>> EngineCore::submit(const std::shared_ptr<PeerCore>& peer,
                                                         std::span<const Request> batch,
                                                         TransferOptions options) {
  CROSSDOCK_CHECK_OK(usable());
  // Until the transfer is listed: shutdown() stops those that are.
  const base::Gate::Pass pass(gate_);
  if (!pass) return usable().error();
  if (!peer->alive()) return peer->lost_error();
  if (options.notification) CROSSDOCK_CHECK_OK(check_notification(*options.notification));
  if (options.stall_timeout && options.stall_timeout->count() < 0)
    return invalid_argument(fmt::format(
        "TransferOptions::stall_timeout is {} ns; give the time a transfer may stand still, or 0 "
        "for no limit",
        options.stall_timeout->count()));
  if (in_flight_.load(std::memory_order_relaxed) >= settings_.max_pending)
    return Error{.code = Code::kWouldBlock,
                 .retry = Retry::kLater,
                 .message = fmt::format("{} transfers are in flight; wait for some or raise "
                                        "transfer.max_pending",
                                        settings_.max_pending)};
  auto transfer = pool_->acquire();
  transfer->engine = this;
  transfer->peer = peer;
  transfer->id = next_transfer_.fetch_add(1, std::memory_order_relaxed);
  transfer->deadline = options.deadline.value_or(Deadline::in(settings_.timeout));
  transfer->watch = {.stall = options.stall_timeout.value_or(
                         options.deadline ? std::chrono::nanoseconds(0) : settings_.stall_timeout),
                     .seen = {0, peer->moved_bytes()},
                     .since = Deadline::now()};
  transfer->checksum = options.checksum.value_or(settings_.checksum);
  transfer->first_op = batch.empty() ? Op::kWrite : batch.front().op;
  transfer->submitted_ns = base::now_ns();
  transfer->options = std::move(options);
  Plan plan;
  CROSSDOCK_CHECK_OK(plan_batch(batch, regions_, *peer, settings_, *transfer, plan));
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  transfer->start();
  post_shards(*transfer, plan.sets);
  transfer->all_posted();
  if (!transfer->terminal()) transfers_->add(transfer);
  // The peer may have died, or taken its memory back, between the check of it and the listing:
  // whoever came last stops the transfer.
  if (!peer->alive()) transfer->request_stop(peer->lost_error());
  if (!transfer->terminal() && transfer->uses_revoked())
    transfer->request_stop(peer->revoked_error());
  return transfer;
}

void EngineCore::post_shards(TransferCore& transfer,
                             const std::vector<std::shared_ptr<RailSet>>& sets) {
  for (std::size_t i = 0; i < transfer.shards.size(); ++i) {
    auto& shard = transfer.shards[i];
    shard.transfer_id = transfer.id;
    shard.deadline = transfer.deadline;
    shard.stop = transfer.stop_flag();
    shard.sink = &transfer;
    post_shard(transfer, shard, sets[i]);
  }
}

void EngineCore::post_shard(TransferCore& transfer, transport::Shard& shard,
                            const std::shared_ptr<RailSet>& set) {
  auto* rail = set->least_loaded();
  transfer.assign(shard, set, rail);
  if (auto posted = rail->post(shard); !posted.ok()) transfer.shard_refused(shard, posted.error());
}

bool EngineCore::retry(TransferCore& transfer, transport::Shard& shard,
                       const Error& error) noexcept {
  if (!is_rail_fault(error) || !transfer.peer->alive() || transfer.deadline.passed()) return false;
  const bool queue_full = error.code == Code::kWouldBlock;
  // Counted are faults of the rail itself: no full queue, and no rail that this engine cut.
  const bool counts = !queue_full && !static_cast<RailSet*>(shard.owner)->cut.load();
  if (counts && ++shard.attempts > settings_.max_retries) return false;
  counters_.retries->add();
  auto keep = transfer.shared_from_this();
  transfer.hold(shard);
  const bool taken =
      queue_full ? loop_->post([this, keep, &shard, error] {
        loop_->call_at(Deadline::in(std::chrono::milliseconds(1)),
                       [this, keep, &shard, error] { repost(keep, shard, error); });
      })
                 : dials_.post(transfer.peer.get(), [this, keep, &shard, error](bool go_on) {
                     redial_and_repost(keep, shard, error, go_on);
                   });
  // Whoever asked the transfer to stop before the shard was held has not seen it.
  if (!taken || transfer.stopping()) transfer.give_up_held(shard, error);
  return true;
}

void EngineCore::repost(const std::shared_ptr<TransferCore>& transfer, transport::Shard& shard,
                        const Error& error) {
  if (transfer->stopping() || !transfer->peer->alive()) return transfer->give_up_held(shard, error);
  const auto set = transfer->set_of(shard);
  if (!transfer->take_held(shard)) return;
  trim_shard(*transfer, shard);
  post_shard(*transfer, shard, set);
}

// The shard stays held while this dials: who wants the transfer to stop need not wait for it.
void EngineCore::redial_and_repost(const std::shared_ptr<TransferCore>& transfer,
                                   transport::Shard& shard, const Error& error, bool go_on) {
  if (!go_on || transfer->stopping() || !transfer->peer->alive())
    return transfer->give_up_held(shard, error);
  const auto region = transfer->lease_of(shard.slices.front().region);
  const auto set = transfer->set_of(shard);
  if (!region || !set) return;  // given up meanwhile
  const auto deadline = earlier(transfer->deadline, Deadline::in(settings_.connect_timeout));
  const bool last_try = shard.attempts >= settings_.max_retries;
  set->down.store(true);
  const auto next = transfer->peer->another_set(*set, *region, last_try, deadline);
  // On another way it could overtake what is left of it on this one.
  const bool may_overtake = shard.in_doubt && next.ok() && (*next)->slot != set->slot;
  const bool quiet = !may_overtake || await_quiet(*transfer->peer, *set, quiet_by(shard));
  if (!next.ok() || !quiet) return transfer->give_up_held(shard, error);
  if (!transfer->take_held(shard)) return;
  trim_shard(*transfer, shard);
  post_shard(*transfer, shard, *next);
}

Deadline EngineCore::quiet_by(const transport::Shard& shard) const {
  const std::chrono::nanoseconds passed(base::now_ns() - shard.back_ns);
  return Deadline::in(settings_.quiesce_grace - passed);
}

bool EngineCore::await_quiet(PeerCore& peer, const RailSet& set, Deadline until) const {
  if (until.passed() || peer.redial(set, until).ok()) return true;
  const auto closing = base::wait_ready(interrupt(), POLLIN, until);
  return closing.ok() && !*closing;
}

// The reset of a cut lane is on its way while the shard ends here, and what the peer received
// before it may still be put in place. A lane that broke by itself looks the same from here. One
// dialled anew is welcomed only after the old one has ended.
bool EngineCore::confirm_cut(TransferCore& transfer, transport::Shard& shard,
                             const Error& error) noexcept {
  if (!shard.in_doubt || !transfer.peer->alive()) return false;
  const auto until = quiet_by(shard);
  const auto set = transfer.set_of(shard);
  if (until.passed() || !set) return false;
  const auto keep = transfer.shared_from_this();
  transfer.await_cut(shard);
  loop_->post([this, keep, &shard, error, until] {
    loop_->call_at(until, [keep, &shard, error] { keep->give_up_cut(shard, error); });
  });
  const bool taken =
      dials_.post(transfer.peer.get(), [keep, &shard, error, set, until](bool go_on) {
        const bool dialled = go_on && !until.passed() && keep->peer->redial(*set, until).ok();
        // A redial that failed proves nothing: then it is up to the timer.
        if (dialled || !go_on || !keep->peer->alive()) keep->give_up_cut(shard, error);
      });
  if (!taken) transfer.give_up_cut(shard, error);
  return true;
}

Deadline EngineCore::quiesced_by(Deadline deadline) const {
  return deadline.after(2 * settings_.quiesce_grace + std::chrono::seconds(2));
}

void EngineCore::account(const TransferCore& transfer, State state) noexcept {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  const auto now = base::now_ns();
  counters_.latency->record(now - transfer.submitted_ns);
  switch (state) {
    case State::kDelivered:
      counters_.delivered->add();
      counters_.bytes->add(transfer.bytes_total);
      break;
    case State::kCancelled:
      counters_.cancelled->add();
      break;
    default:
      counters_.failed->add();
      break;
  }
  if (tracer_->on())
    tracer_->overlapping("transfer", transfer.submitted_ns, now, {"bytes", transfer.bytes_total});
}

}  // namespace crossdock::transfer::detail
