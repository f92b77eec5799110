// LaneIn: the target's end of one data lane. One frame at a time:
//
//   WRITE ── lease every range ──> payload straight into place ──> ACK
//              └─ refused ───────> payload is drained ───────────> ACK with code and sentence
//   READ ─── lease every range ──> READ_DATA, payload straight from memory, ACK
//              └─ memory gone since ─> the rest as zeros, ACK with code and sentence
//              └─ refused, expired before it began ──────────────> ACK with code and sentence
//
// Memory that its owner unmapped without releasing its region costs the request, not the process.
//
// Runs on its worker; sever() may come from any thread and waits for the turn in progress, so that
// nothing touches memory for this lane once it returns. A connection that the peer reset applies
// nothing more, even what was received before: that is how an initiator that gave up fences a
// target that was stopped. A malformed frame ends the lane and nothing else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>

#include "base/fd.hpp"
#include "mem/region_table.hpp"
#include "transport/tcp/options.hpp"
#include "transport/tcp/pieces.hpp"
#include "transport/tcp/worker.hpp"
#include "transport/transport.hpp"
#include "wire/data.hpp"

namespace crossdock::transport::tcp {

struct LaneInInit {
  InboundLane lane;
  TcpOptions options = {};
  Worker* worker = nullptr;  // outlives the lane's use
  const mem::RegionTable* regions = nullptr;
  base::Logger* log = nullptr;  // may be null
};

class LaneIn final : public Pollable {
 public:
  static Result<std::shared_ptr<LaneIn>> create(LaneInInit init);

  [[nodiscard]] std::uint64_t session() const noexcept { return session_; }
  [[nodiscard]] std::uint16_t lane() const noexcept { return lane_; }
  [[nodiscard]] bool over() const noexcept { return over_.load(); }
  // Cuts the connection; afterwards nothing is read or written for this lane. Idempotent.
  void sever();

  Turn on_ready() noexcept override;

 private:
  // What step() found: go on, wait for the socket, or the lane ended.
  enum class Step : std::uint8_t { kGo, kWait, kEnd };
  enum class Phase : std::uint8_t { kHead, kWrite, kDrain, kRead };

  explicit LaneIn(LaneInInit init);
  Step step();
  Step read_head();
  Step begin(const wire::DataHeader& header);
  Result<> lease_all(transfer::Op op);
  Step receive_payload();
  Step drain_payload();
  Step send_payload();
  Step answer(Code status, std::string_view message);
  // Gives up the frame whose payload is coming: the rest is drained, then refused.
  Step refuse_rest(Code status, std::string message);
  Step begin_read();
  // The ACK behind a READ_DATA, the last piece of `payload_`.
  Step add_verdict(Code status, std::string_view message);
  // Whether no byte of the READ_DATA in progress has left; then it can still be refused.
  [[nodiscard]] bool head_unsent() const;
  Step refuse_read(Code status, std::string_view message);
  Step spoil_read();
  [[nodiscard]] bool ranges_readable() const;
  Step flush();
  Step fill();
  Step end(std::string_view why);
  void shut(bool reset);

  const std::string peer_name_;
  const std::uint64_t session_;
  const std::uint16_t lane_;
  const TcpOptions options_;
  Worker* const worker_;
  const mem::RegionTable* const regions_;
  base::Logger* const log_;
  Worker::Token token_ = 0;

  std::atomic<bool> over_{false};

  std::mutex mutex_;  // held during a turn
  base::UniqueFd fd_;
  LaneReader reader_;
  Phase phase_ = Phase::kHead;
  // The frame in progress.
  wire::DataHeader header_;
  Deadline expires_ = Deadline::now();
  std::vector<wire::Descriptor> descriptors_;
  std::vector<mem::Lease> leases_;
  PieceList payload_;
  std::uint64_t to_drain_ = 0;
  bool drained_ = false;                              // the last fill() took all there was
  std::size_t head_bytes_ = wire::kMinDataHeadBytes;  // of the last frame: read that much ahead
  Code refusal_ = Code::kOk;
  std::string refusal_text_;
  std::array<std::byte, wire::kMaxAckBytes> verdict_;
  std::size_t verdict_bytes_ = 0;  // of the READ in progress
  // Answers that were not sent yet.
  std::array<std::byte, 4096> answers_;
  std::size_t answers_begin_ = 0;
  std::size_t answers_end_ = 0;
  std::uint64_t unanswered_bytes_ = 0;  // applied since answers were last sent
};

}  // namespace crossdock::transport::tcp
