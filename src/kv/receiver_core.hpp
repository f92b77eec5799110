// ReceiverCore: the state of every expected request and the rules by which it changes.
//
//   kReceiving ── every page of every layer ───────────────────────> kDone (ok)
//       │ abort, expiry, a sender stopped, failed or died
//       v
//   kStopping ── every source quiesced ────────────────────────────> kDone (error)
//       │ no answer to Abort, and a fence brought no proof
//       v
//   kQuarantined (wait() returns; pages stay leased) ── proof ─────> kDone (error)
//
// A source begins with the answer Go to its Ready, and from then on may write to the pages. It is
// quiesced when it never began, said Stopped, died, or was fenced off. A Go holds for the sender's
// connection: while that lives, the sender needs no other for later tickets. So an engine that has
// no connection to this one writes nothing, whatever tickets it has and whenever it wakes up.
// A fence ends the connections that are there when it begins, and speaks for sources that began
// before it; one that asked since may have done so over a new connection, which goes on.
//
// Threads: the engine's control thread brings messages, links carry tickets, aborts and fences, one
// clock thread watches deadlines. One mutex guards the state; it is never held while waiting on a
// peer or calling back, and never when a call of the engine may wait.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>

#include <crossdock/kv/receiver.hpp>

#include "base/fork_check.hpp"
#include "kv/keeper.hpp"
#include "kv/link.hpp"
#include "kv/message.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

// One sender of one request, and what has arrived from it.
struct Source {
  std::string name;
  std::uint32_t rank = 0;
  std::uint64_t instance = 0;  // 0 until its engine was opened
  bool told = false;           // it may have a ticket
  bool begun = false;          // it may write
  std::uint64_t begun_at = 0;  // as `events_` counted, when it last began or asked
  bool quiesced = false;
  bool unreachable = false;  // not even an Abort can be sent
  HeadRange heads;
  std::vector<bool> arrived;           // [layer][page], page counted from the first expected
  std::vector<std::uint32_t> missing;  // pages, by layer
};

enum class Phase : std::uint8_t { kReceiving, kStopping, kQuarantined, kDone };

struct Incoming {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  Phase phase = Phase::kReceiving;
  std::uint32_t sender_tp = 0;
  std::uint32_t first_page = 0;
  std::vector<PageId> pages;  // those to arrive, until it is done
  std::vector<Source> sources;
  std::vector<std::uint32_t> missing;  // by layer, over all sources
  std::uint32_t layers_left = 0;
  Deadline expires = Deadline::now();    // of the request
  Deadline next_step = Deadline::now();  // when the clock looks at it again
  std::optional<Error> error;
  PageLease lease;  // until `kept` has it
  Keeper::KeptPtr kept;
};

class ReceiverCore {
 public:
  ReceiverCore(transfer::Engine& engine, PagePool pool, ReceiverOptions options);
  Result<> start(const std::shared_ptr<ReceiverCore>& self);
  // No callback or message is handled after it; joins the threads. Idempotent.
  void shutdown();
  [[nodiscard]] bool forked() const noexcept { return fork_.forked(); }
  // kUnsupported in a forked child, where the mutex may be held for ever.
  [[nodiscard]] Result<> usable() const;

  Result<> expect(const Expectation& expectation);
  Result<> wait(RequestId request, std::optional<std::uint32_t> layer, Deadline deadline);
  void abort(RequestId request, std::string reason);
  ReceiverStats stats() const;
  Result<> close(Deadline deadline);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using IncomingPtr = std::shared_ptr<Incoming>;
  // What has to be called once the mutex is free.
  struct Effects {
    std::vector<std::pair<RequestId, std::uint32_t>> layers;
    std::vector<std::pair<RequestId, Result<>>> done;
  };

  Result<IncomingPtr> make_incoming(const Expectation& expectation);
  Result<> add_sources(const Expectation& expectation, Incoming& in);
  Result<> add_idle_sources(const std::vector<std::string>& names, Incoming& in);
  void send_tickets(const IncomingPtr& in);
  void send_ticket(Link& link, const IncomingPtr& in, std::size_t source);
  message::Ticket ticket_for(const Incoming& in, std::size_t source) const;

  void on_message(const transfer::Message& message);
  void on_link_lost(const transfer::Message& from);
  void look_for(Link& link, std::uint64_t instance);
  void on_ready(const transfer::Message& from, const message::Ready& ready);
  void send_go(Link& link, const IncomingPtr& in, std::size_t source);
  void on_parts(const transfer::Message& from, const message::Parts& parts);
  void on_stopped(const transfer::Message& from, const message::Stopped& stopped);
  void on_peer_lost(const transfer::Message& from);
  Source* find_source(const transfer::Message& from, RequestId request, std::uint64_t ticket,
                      std::uint32_t rank, IncomingPtr& in);
  void take_part(Incoming& in, Source& source, const message::Part& part, Effects& effects);

  // These run with the mutex held.
  std::vector<std::pair<IncomingPtr, Source*>> sources_where(
      const std::function<bool(const Source&)>& predicate);
  std::uint64_t begin(const Incoming& in, Source& source);
  void quiesce(const Incoming& in, Source& source);
  void fail(const IncomingPtr& in, Error error, Effects& effects);
  void settle(const IncomingPtr& in, Effects& effects);
  void finish(const IncomingPtr& in, Effects& effects);
  void post_abort(const IncomingPtr& in, std::size_t source);
  Link::Job counted(Link::Job job);

  void stop_source(Link& link, const IncomingPtr& in, std::size_t source);
  void try_fence(Link& link, const IncomingPtr& in, std::size_t source);
  void apply_fence(std::uint64_t instance, std::uint64_t began, const Result<>& fenced,
                   Effects& effects);
  void clock();
  void tick(Deadline now, Effects& effects);
  void run(const Effects& effects);
  std::string progress_of(const Incoming& in) const;

  const base::ForkCheck fork_;
  transfer::Engine& engine_;
  PagePool pool_;
  const ReceiverOptions options_;
  std::shared_ptr<Keeper> keeper_;
  transfer::Subscription messages_;
  transfer::Subscription peers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;     // for waiters
  std::condition_variable clock_wake_;  // an earlier deadline, or the end
  std::unordered_map<RequestId, IncomingPtr> requests_;
  std::deque<IncomingPtr> history_;               // done, oldest first
  std::map<std::uint64_t, Deadline> next_fence_;  // by instance: not again before
  // Instances that were told Go on a connection that lives, and when they last asked for one.
  std::map<std::uint64_t, std::uint64_t> open_;
  std::uint64_t events_ = 0;  // counts beginnings of sources and of fences
  const std::uint64_t life_;
  std::uint64_t next_ticket_ = 0;
  std::uint64_t bytes_received_ = 0;
  std::uint64_t ignored_ = 0;
  std::size_t untold_ = 0;  // tickets and Aborts on their way
  bool stopped_ = false;
  LinkSet links_;
  std::thread clock_;
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
