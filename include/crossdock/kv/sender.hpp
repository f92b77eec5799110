// KvSender: the prefill side. Pushes the pages of each layer as soon as they are computed; they are
// written straight into the pages that a KvReceiver named for the request.
//
//   KvSender s = KvSender::create(engine, pool, {.tp_size = 2, .tp_rank = 0});
//   pool.admit({.request = id, ...});
//   for each layer: compute(layer); s.push(id, layer);
//   s.finish(id);                          // nothing more will be pushed
//   s.wait(id, deadline);                  // every page is at its destination, or an error
//   pool.release(id);                      // at any time: pages come back when nobody reads them
//
// push() may come before the receiver asked for the request; the pages wait for it. Which receivers
// need a part of this shard follows from their tensor-parallel size.
// KvSender is thread-safe; pushes of one request may come from several threads. No call waits on a
// peer unless it takes a Deadline. The engine must outlive the sender. Destruction stops transfers
// without telling the peers, and waits at most SenderOptions::send_timeout for a message under way;
// the pages of unfinished requests stay in quarantine until their transfers are terminal. In a
// child after fork() it may be destroyed; calls return kUnsupported.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <crossdock/kv/page_pool.hpp>
#include <crossdock/transfer/engine.hpp>

namespace crossdock::kv {
inline namespace v1 {

namespace detail {
class SenderCore;
}

// kStreamed: each push becomes a transfer at once. kBatch: finish() sends everything as one batch.
enum class SendMode : std::uint8_t { kStreamed = 0, kBatch = 1 };

struct SenderOptions {
  SendMode mode = SendMode::kStreamed;
  // Where receivers reach this sender; at most 64 bytes.
  std::string mailbox = "kv.sender";
  std::string receiver_mailbox = "kv";
  // How long a pushed request waits for its receivers to ask for it.
  std::chrono::milliseconds ticket_timeout{60'000};
  // For one control message, including the connection to the receiver.
  std::chrono::milliseconds send_timeout{5'000};
  // Transfers of this sender in flight; more pushes queue up in order.
  std::size_t max_inflight = 64;
  // Every receiver of this shard has asked for the request: what is pushed from now on leaves at
  // once. A prefill scheduler may wait for it before it computes. Same threads as on_done.
  std::function<void(RequestId)> on_asked = {};
  // Called once when a request is over, quiesced, with the error if it failed. It runs on a thread
  // of the engine or the sender, must not wait, and may call this sender.
  std::function<void(RequestId, const Result<>&)> on_done = {};
};

struct SenderStats {
  std::uint64_t bytes_sent = 0;
  std::uint64_t transfers = 0;
  std::uint64_t runs = 0;  // contiguous copies handed to the engine
  std::uint32_t active_requests = 0;
};

class CROSSDOCK_API KvSender {
 public:
  // The tensor-parallel size and rank are those of the pool's layout. kBusy when the mailbox has a
  // sender, or anybody else, that takes its messages: end that one first, or use another mailbox.
  static Result<KvSender> create(transfer::Engine& engine, PagePool pool,
                                 SenderOptions options = {});
  KvSender(KvSender&&) noexcept;
  KvSender& operator=(KvSender&&) noexcept;
  ~KvSender();

  // `layer` of all pages of the request's block table is computed and will not change until the
  // request is done. kCancelled (with the reason) when the request was aborted, by either side;
  // kNotFound when it has no block table; kInvalidArgument for a bad layer, after finish(), for
  // pages of this layer that were pushed before (the receiver may use them for something else), and
  // when the id was admitted again while the request of its earlier table goes on.
  Result<> push(RequestId request, std::uint32_t layer);
  // The same for the request's pages [first_page, first_page + num_pages), for chunked prefill.
  Result<> push(RequestId request, std::uint32_t layer, std::uint32_t first_page,
                std::uint32_t num_pages);
  // No more pushes follow. In batch mode this sends. kNotFound for a request never pushed. No
  // request is delivered before it, whatever its receivers have: its pages stay leased.
  Result<> finish(RequestId request);
  // Until the request is over and quiesced: ok when every receiver has all its parts, otherwise why
  // not. kDeadline with scope kCall: still going on. The outcome is kept for the last 4,096
  // requests.
  Result<> wait(RequestId request, Deadline deadline);
  // Stops the request: cancels its transfers, waits for nothing. Receivers are told once nothing
  // can touch their pages. Idempotent, and nothing for a request that is over; unknown ids are
  // remembered, so that late pushes are refused.
  void abort(RequestId request, std::string reason);

  [[nodiscard]] SenderStats stats() const;
  // Aborts what is active, tells the receivers, waits for the transfers to quiesce.
  Result<> close(Deadline deadline);

 private:
  explicit KvSender(std::shared_ptr<detail::SenderCore> core);
  std::shared_ptr<detail::SenderCore> core_;
};

}  // namespace v1
}  // namespace crossdock::kv
