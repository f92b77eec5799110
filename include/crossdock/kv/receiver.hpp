// KvReceiver: the decode side. Names the pages in which a request's KV shall arrive and learns, by
// notifications that follow the data, when each layer is complete. Nobody polls memory.
//
//   KvReceiver r = KvReceiver::create(engine, pool);
//   BlockTable t = pool.admit({.request = id, ...});
//   r.expect({.request = id, .senders = {"10.0.0.1:7000"}, .first_page = t.num_shared_pages,
//             .deadline = Deadline::in(30s)});
//   r.wait(id, 0, deadline);  // layer 0 is usable while later ones are on their way
//   r.wait(id, deadline);     // everything is here, or an error that names request, layer and peer
//   pool.release(id);         // any time after; pages in doubt stay in quarantine until quiesced
//
// Abort, from either side:
//
//   receiver            sender                          receiver            sender
//      │ Abort ───────────>│ cancels its transfers         │                   │ abort(): cancels
//      │                   │ until they are terminal       │                   │ until terminal
//      │<────────── Stopped│                               │<────────── Stopped│
//   lease ends: pages free                              lease ends: pages free
//
// A sender that died counts as stopped, and so does one that has not been told to go ahead yet. One
// that does not answer is fenced off by the engine; when even that brings no proof, the request
// fails but its pages stay in quarantine until there is one.
// KvReceiver is thread-safe. The engine must outlive it. Destruction tells nobody and waits at most
// ReceiverOptions::send_timeout for a message under way; pages that a sender may still write to
// stay in quarantine until that sender is lost or fenced off. Prefer close(). In a child after
// fork() it may be destroyed; calls return kUnsupported.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <crossdock/kv/page_pool.hpp>
#include <crossdock/transfer/engine.hpp>

namespace crossdock::kv {
inline namespace v1 {

namespace detail {
class ReceiverCore;
}

struct ReceiverOptions {
  std::string mailbox = "kv";  // at most 64 bytes
  std::string sender_mailbox = "kv.sender";
  // For one control message, including the connection to the sender.
  std::chrono::milliseconds send_timeout{5'000};
  // How long an aborted request waits for its senders' confirmation before they are fenced off, and
  // how long each attempt to fence may take.
  std::chrono::milliseconds stop_timeout{2'000};
  std::chrono::milliseconds fence_timeout{2'000};
  // A layer is complete in all pages of the request. Runs on the engine's control thread, in the
  // order in which layers complete; must not wait.
  std::function<void(RequestId, std::uint32_t layer)> on_layer = {};
  // The request is over; called once, on the control thread or one of the receiver's; must not
  // wait.
  std::function<void(RequestId, const Result<>&)> on_done = {};
};

struct Expectation {
  RequestId request = 0;  // has a block table in the pool
  // Engine names of all prefill ranks, in rank order; their number is the senders' TP size. Which
  // of them bring something to this shard is computed.
  std::vector<std::string> senders = {};
  // Pages before this one are there already (shared prefix blocks) and are not sent.
  std::uint32_t first_page = 0;
  // When it passes the request is aborted with kDeadline.
  Deadline deadline = Deadline::now();
};

struct ReceiverStats {
  std::uint64_t bytes_received = 0;
  std::uint32_t active_requests = 0;    // waiting for data
  std::uint32_t stopping_requests = 0;  // aborted, not quiesced yet
  std::uint64_t ignored_messages = 0;   // malformed, or for no known request
};

class CROSSDOCK_API KvReceiver {
 public:
  // kBusy when the mailbox has a receiver, or anybody else, that takes its messages: end that one
  // first, or use another mailbox. kInvalidArgument when the engine listens on all addresses and
  // advertises none: senders could not dial it.
  static Result<KvReceiver> create(transfer::Engine& engine, PagePool pool,
                                   ReceiverOptions options = {});
  KvReceiver(KvReceiver&&) noexcept;
  KvReceiver& operator=(KvReceiver&&) noexcept;
  ~KvReceiver();

  // Asks the senders for the request; returns at once. kNotFound without a block table,
  // kInvalidArgument for senders that do not fit the model or an id that is expected already.
  Result<> expect(const Expectation& expectation);
  // Until the request is over: ok when every page of every layer is here and nothing more will be
  // written to them. kDeadline with scope kCall: `deadline` passed, the request goes on. The
  // outcome is kept for the last 4,096 requests; kNotFound for others.
  Result<> wait(RequestId request, Deadline deadline);
  // The same for one layer.
  Result<> wait(RequestId request, std::uint32_t layer, Deadline deadline);
  // Gives the request up; returns at once. wait() then ends with kCancelled and `reason`.
  void abort(RequestId request, std::string reason);

  [[nodiscard]] ReceiverStats stats() const;
  // Aborts what is active, waits until it is quiesced and the senders are told. kDeadline: not all
  // of it is quiesced; the receiver goes on trying until it is destroyed, and the pages in doubt
  // stay in quarantine even then. Ok when only some senders could not be told until `deadline`.
  Result<> close(Deadline deadline);

 private:
  explicit KvReceiver(std::shared_ptr<detail::ReceiverCore> core);
  std::shared_ptr<detail::ReceiverCore> core_;
};

}  // namespace v1
}  // namespace crossdock::kv
