// SenderCore: what is pushed, who asked for it, which transfers run.
//
// A receiver's ticket makes it a destination; a sender writes to it once the receiver has answered
// Go to its Ready, or when an earlier Go stands for the connection: see receiver_core.hpp.
//
//   kActive ── finished, every receiver's parts delivered ──> kDone (ok)
//      │ abort by either side, failed transfer, receiver lost before its parts are, timeout
//      v
//   kStopping ── no transfer in flight ── Stopped to receivers ──> kDone (error)
//
// A push becomes one transfer to each destination (receiver rank that needs this shard), built from
// the shard plan, with a Parts notification that the peer gets after the data. In batch mode all
// pushes become one transfer when the request is finished.
// Threads: callers push; the control thread brings messages; transfers end on engine threads; a
// link thread for each receiver opens it and carries Stopped; one clock thread watches deadlines.
// One mutex guards the state; it is never held while calling the engine, waiting, or calling back.
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

#include <crossdock/kv/sender.hpp>

#include "base/fork_check.hpp"
#include "kv/link.hpp"
#include "kv/message.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

struct Push {
  std::uint32_t layer = 0;
  std::uint32_t first_page = 0;
  std::uint32_t num_pages = 0;
};

// Which pages of which layers were pushed: each may be pushed once.
class PushedPages {
 public:
  void reset(std::uint32_t layers, std::uint32_t pages);
  // False, and nothing is noted, when one of them was there already; `repeated` is the first.
  bool add(const Push& push, std::uint32_t& repeated);

 private:
  std::uint32_t pages_ = 0;
  std::vector<bool> pushed_;  // [layer][page]
};

// One receiver that asked for the request. Its table and `peer` do not change from `complete` until
// the request is over.
struct Destination {
  explicit Destination(const PageLayout& receiver_layout) : layout(receiver_layout) {}
  std::string peer_name;
  std::uint64_t instance = 0;
  std::optional<transfer::Peer> peer;  // until the request is over; may be missing for no pages
  std::uint64_t ticket = 0;
  PageLayout layout;
  HeadRange heads;
  std::uint64_t base = 0;
  std::uint32_t first_page = 0;
  std::vector<PageId> pages;
  std::uint32_t total_pages = 0;
  Deadline expires = Deadline::now();
  bool complete = false;          // all chunks of the ticket are here
  bool go = false;                // the receiver lets this sender write over `peer`
  std::uint64_t epoch = 0;        // of `peer`, as its link counts
  bool told = false;              // Stopped was sent, or the receiver died
  std::size_t next_push = 0;      // pushes before it were taken
  std::uint64_t pages_taken = 0;  // by them, of all layers
  std::map<std::uint64_t, std::optional<transfer::Transfer>> inflight;  // by token
};

enum class SendPhase : std::uint8_t { kActive, kStopping, kDone };

struct Outgoing {
  RequestId request = 0;
  SendPhase phase = SendPhase::kActive;
  std::vector<PageId> pages;  // the request's table, set by the first push
  bool has_table = false;
  PageLease lease;
  std::deque<Push> pushes;
  PushedPages pushed;
  bool finished = false;
  std::optional<std::size_t> num_destinations;  // known from the first ticket
  std::map<std::uint32_t, std::shared_ptr<Destination>> destinations;  // by receiver rank
  std::set<std::pair<std::uint64_t, std::uint64_t>> earlier;  // tickets that the use of the id
                                                              // before this one served, by instance
  std::optional<Deadline> tickets_due;                        // set by the first push
  std::optional<Error> error;
};

class SenderCore : public std::enable_shared_from_this<SenderCore> {
 public:
  SenderCore(transfer::Engine& engine, PagePool pool, SenderOptions options);
  Result<> start();
  void shutdown();
  [[nodiscard]] bool forked() const noexcept { return fork_.forked(); }
  // kUnsupported in a forked child, where the mutex may be held for ever.
  [[nodiscard]] Result<> usable() const;

  Result<> push(RequestId request, std::uint32_t layer,
                std::optional<std::pair<std::uint32_t, std::uint32_t>> range);
  Result<> finish(RequestId request);
  Result<> wait(RequestId request, Deadline deadline);
  void abort(RequestId request, std::string reason);
  SenderStats stats() const;
  Result<> close(Deadline deadline);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using OutgoingPtr = std::shared_ptr<Outgoing>;
  using DestinationPtr = std::shared_ptr<Destination>;
  // A transfer to be: some pushes of a request for one destination.
  struct Work {
    OutgoingPtr out;
    DestinationPtr to;
    std::uint64_t token = 0;
    std::vector<Push> pushes;
  };
  // A Go that holds for later tickets as well.
  struct Standing {
    std::uint64_t instance = 0;
    std::uint64_t epoch = 0;  // of the connection
    std::uint64_t life = 0;   // of the receiver
    std::uint64_t later = 0;  // the first ticket that it holds for
  };
  // What has to be called once the mutex is free.
  struct Effects {
    std::vector<transfer::Transfer> cancel;
    std::vector<std::pair<RequestId, Result<>>> done;
    std::vector<RequestId> asked;
    std::vector<transfer::Peer> let_go;  // to be destroyed, as all peers are, without the mutex
  };

  void on_message(const transfer::Message& message);
  void on_ticket(const transfer::Message& from, message::Ticket ticket);
  void on_abort(const transfer::Message& from, const message::Abort& abort);
  void on_peer_lost(const transfer::Message& from);
  void on_go(const transfer::Message& from, const message::Go& go);
  void accept_ticket(Link& link, std::uint64_t instance, const message::Ticket& ticket);
  void ask_for_go(Link& link, const message::Ticket& ticket);
  void lose_ticket(const std::string& receiver, const message::Ticket& ticket,
                   const std::string& why, Effects& effects);
  // What a ticket led to: refused, or served, and whether its receiver must be asked for Go.
  Result<bool> add_ticket(const Link& link, std::uint64_t instance,
                          const Result<transfer::Peer>& peer, const message::Ticket& ticket,
                          Effects& effects);
  Result<DestinationPtr> add_chunk(Outgoing& out, const message::Ticket& ticket);
  Result<DestinationPtr> destination_for(Outgoing& out, const message::Ticket& ticket);
  Result<DestinationPtr> new_destination(Outgoing& out, const message::Ticket& ticket);

  void pump();
  std::optional<Work> next_work();
  std::optional<Work> work_for(const OutgoingPtr& out, const DestinationPtr& to);
  bool submit_next(Lock& lock);
  Result<> submit(const Work& work);
  Result<std::vector<transfer::Request>> build(const Work& work, message::Parts& parts) const;
  Result<> add_push(const Work& work, const Push& push, std::vector<CopyRun>& runs,
                    message::Parts& parts) const;
  bool refuse(Work work, Error error);
  void on_transfer(const OutgoingPtr& out, const DestinationPtr& to, std::uint64_t token,
                   const transfer::Status& status);

  // These run with the mutex held.
  OutgoingPtr find_or_make(RequestId request);
  Result<> take_table(Outgoing& out, PageLease lease);
  void undo_make(const OutgoingPtr& out, const OutgoingPtr& before);
  void fail(const OutgoingPtr& out, Error error, Effects& effects);
  void settle(const OutgoingPtr& out, Effects& effects);
  void retire(const OutgoingPtr& out, Effects& effects);
  void post_stopped(const std::string& peer_name, RequestId request, std::uint64_t ticket,
                    const Error& why);
  void drop_refused(const OutgoingPtr& out);

  void clock();
  void tick(Deadline now, Effects& effects);
  static bool all_asked(const Outgoing& out);
  bool all_taken(const Destination& to) const;
  std::optional<Deadline> due_time(const Outgoing& out) const;
  void run(Effects effects);

  const base::ForkCheck fork_;
  transfer::Engine& engine_;
  PagePool pool_;
  const SenderOptions options_;
  transfer::Subscription subscription_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;     // for waiters
  std::condition_variable clock_wake_;  // a new deadline, refused work, or the end
  std::unordered_map<RequestId, OutgoingPtr> requests_;
  std::deque<OutgoingPtr> active_;   // in order of arrival: earlier requests are served first
  std::deque<OutgoingPtr> history_;  // done, oldest first
  std::deque<Work> refused_;  // the engine was full; tried again by the clock or a completion
  std::map<std::string, Standing> standing_;  // by receiver name
  std::size_t inflight_ = 0;
  bool pumping_ = false;  // one thread submits; completions inside submit() must not recurse
  bool pump_again_ = false;
  std::size_t messages_ = 0;  // Stopped on their way
  std::uint64_t next_token_ = 1;
  SenderStats stats_;
  bool stopped_ = false;
  LinkSet links_;
  std::thread clock_;
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
