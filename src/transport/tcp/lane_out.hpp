// LaneOut: the initiator's end of one data lane. Sends the frames that its ShardQueue cuts and
// reads the answers:
//
//   post() ─> ShardQueue ─ cut ─> sendmsg: head, payload from the user's memory ──> target
//   shard_progress, shard_finished <─ settle <─ ACK, for a READ behind its READ_DATA ──┘
//
// Sending takes `send_mutex_` and is done by the worker, or by the thread inside post() when the
// lane is idle and the shard small. Receiving, every callback and closing the descriptor are the
// worker's alone. A frame that has begun is always sent whole; giving up a peer in the middle means
// a reset. Local memory that its owner unmapped fails its shard and is sent as zeros. Lock order:
// send_mutex_, then the queue's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "transport/tcp/options.hpp"
#include "transport/tcp/pieces.hpp"
#include "transport/tcp/shard_queue.hpp"
#include "transport/tcp/worker.hpp"

namespace crossdock::transport::tcp {

struct LaneOutInit {
  base::UniqueFd fd;
  std::string peer;  // for messages
  std::uint32_t lane = 0;
  TcpOptions options = {};
  Worker* worker = nullptr;     // outlives the lane's use
  base::Logger* log = nullptr;  // may be null
};

class LaneOut final : public Pollable {
 public:
  static Result<std::shared_ptr<LaneOut>> create(LaneOutInit init);

  Result<> post(Shard& shard);
  void cancel();  // some shard's `stop` is set
  void sever(const Error& why);
  // Ends the connection in order. Precondition: every shard has finished. The worker does it soon.
  void close();
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept { return queue_.queued_bytes(); }

  Turn on_ready() noexcept override;

 private:
  enum class Sent : std::uint8_t { kAll, kBlocked, kMore, kBroken };
  enum class Received : std::uint8_t { kNothing, kMore, kEnded };

  explicit LaneOut(LaneOutInit init);
  void send_inline();
  Sent send(std::uint64_t budget);  // send_mutex_ held
  bool replace_unmapped();          // send_mutex_ held
  void divert_payload();
  Received receive();
  Result<> handle_staged();
  Result<> handle_ack(const wire::DataHeader& header, wire::Bytes body);
  Result<> handle_read_data(const wire::DataHeader& header);
  Result<FlightRecord> answered(const wire::DataHeader& header);
  bool wholly_sent(const FlightRecord& record);
  void deliver(const FlightRecord& record);
  void lose(Error why);
  void shut(bool reset);
  void finish_done();
  void poll_briefly() noexcept;

  const std::string peer_;
  const std::uint32_t lane_;
  const TcpOptions options_;
  Worker* const worker_;
  base::Logger* const log_;
  Worker::Token token_ = 0;

  ShardQueue queue_;
  std::atomic<bool> sweep_{false};
  std::atomic<bool> severed_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> broken_{false};  // a send failed inside post()
  std::atomic<int> send_errno_{0};   // why a send failed

  std::mutex send_mutex_;
  base::UniqueFd fd_;  // reset by the worker, with send_mutex_ held
  SendBatch batch_;
  std::atomic<std::uint64_t> stream_sent_{0};

  // The worker's.
  LaneReader reader_;
  PieceList payload_;             // where the READ_DATA that is being received goes
  bool reading_ = false;          // such a frame came and its ACK has not
  std::vector<std::byte> trash_;  // takes what was meant for memory that is gone
};

}  // namespace crossdock::transport::tcp
