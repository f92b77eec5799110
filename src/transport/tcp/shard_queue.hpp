// ShardQueue: the bookkeeping of one outbound lane. Shards wait here, are cut into frames, and
// every frame stays in flight until the peer has answered it; a shard is done when it waits no more
// and none of its frames is in flight. No sockets and no callbacks: the lane sends what cut() gives
// and reports what take_done() yields.
//
//   push(shard) ──> waiting ── cut() ──> frames in flight ── settle() ──> done ── take_done()
//                      └── sweep(): the shard's `stop` is set ──────────────^
//
// Thread-safe. Shards are linked through their own `next` and keep their state in `scratch`, so
// nothing is allocated for a shard or a frame (a failing shard allocates its error).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <crossdock/core/result.hpp>

#include "transport/tcp/options.hpp"
#include "transport/tcp/pieces.hpp"
#include "transport/transport.hpp"
#include "wire/data.hpp"

namespace crossdock::transport::tcp {

// A frame that was cut and not yet answered. Answers come in the order of the frames.
struct FlightRecord {
  Shard* shard = nullptr;
  Op op = Op::kWrite;
  std::uint64_t request_id = 0;
  std::uint64_t stream_end = 0;  // offset in the lane's outgoing stream where the frame ends
  std::uint32_t bytes = 0;       // of payload
  std::uint32_t first_slice = 0;
  std::uint32_t first_offset = 0;  // into the first slice
  std::uint32_t slices_end = 0;    // slices that are whole once this frame is
  bool spoiled = false;            // its shard has failed: what is answered counts for nothing
};

// What one sendmsg() sends: heads of frames in `heads`, payload where it lies.
class SendBatch {
 public:
  SendBatch();
  void clear() noexcept;
  [[nodiscard]] bool empty() const noexcept { return pieces.empty(); }

  PieceList pieces;
  std::vector<std::byte> heads;
  std::size_t heads_used = 0;
  std::uint64_t payload_bytes = 0;
  std::vector<wire::Descriptor> descriptors;  // of the frame that is being cut
};

class ShardQueue {
 public:
  ShardQueue(const TcpOptions& options, std::string peer);

  // kWouldBlock when full, the error given to refuse() or close() afterwards. `idle`: nothing was
  // waiting or in flight.
  Result<> push(Shard& shard, bool& idle);
  // Cuts frames into `batch` until it holds `max_bytes` of payload or nothing may be sent now.
  void cut(SendBatch& batch, std::uint64_t max_bytes);
  // The oldest frame in flight. Stays valid until settle(), which only the same thread calls.
  [[nodiscard]] std::optional<FlightRecord> oldest() const;
  // The oldest frame was answered: in place, or refused with `error`.
  void settle(std::optional<Error> error);
  // Fails the shard of the frame in flight that byte `offset` of the outgoing stream belongs to, or
  // of the oldest one. The frame itself goes on, so that the lane does.
  void spoil(std::uint64_t offset, Error error);
  void spoil_oldest(Error error);
  // Drops the rest of every waiting shard whose `stop` is set.
  void sweep();
  // Pushes are refused with `why` from now on. The first call counts.
  void refuse(const Error& why);
  [[nodiscard]] std::optional<Error> refusal() const;
  // The connection is gone: everything becomes done with the refusal.
  void close();
  // Whole shards that are over, linked by `next`. Each has an error or is complete.
  [[nodiscard]] Shard* take_done();
  // The error of a shard from take_done(), or null.
  static std::unique_ptr<Error> take_error(Shard& shard);

  [[nodiscard]] bool has_done() const;
  // Something waits that cut() could send now.
  [[nodiscard]] bool sendable() const;
  [[nodiscard]] std::uint64_t flight_bytes() const;
  [[nodiscard]] std::size_t flight_frames() const;
  // Bytes posted and not finished.
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept {
    return queued_bytes_.load(std::memory_order_relaxed);
  }

  static constexpr std::size_t kMaxFrames = 1024;       // in flight
  static constexpr std::size_t kMaxFrameSlices = 1023;  // with the head: one sendmsg()

 private:
  struct State;
  static State& state(Shard& shard) noexcept;
  bool cut_frame(SendBatch& batch);
  void cut_slices(Shard& shard, SendBatch& batch, FlightRecord& record);
  Result<> encode(Shard& shard, SendBatch& batch, FlightRecord& record, std::size_t head_piece);
  bool refuses_to_start(Shard& shard);
  bool window_open() const noexcept;
  void drop_front();
  void spoil(FlightRecord& record, Error error);
  void finish_if_over(Shard& shard);
  void fail(Shard& shard, Error error);
  Error cancelled(const Shard& shard) const;

  const TcpOptions options_;
  const std::string peer_;
  mutable std::mutex mutex_;
  Shard* head_ = nullptr;
  Shard* tail_ = nullptr;
  std::uint32_t waiting_ = 0;
  Shard* done_head_ = nullptr;
  Shard* done_tail_ = nullptr;
  std::vector<FlightRecord> ring_;
  std::uint64_t ring_first_ = 0;  // request ids are ring positions: first <= id < next
  std::uint64_t ring_next_ = 0;
  std::uint64_t flight_bytes_ = 0;
  std::uint64_t stream_end_ = 0;
  std::optional<Error> refusal_;
  std::atomic<std::uint64_t> queued_bytes_{0};
};

}  // namespace crossdock::transport::tcp
