// A peer that opened this engine: its control connection at our end. Tells it our regions, takes
// its notifications, and asks it to let go of memory. Control loop only, except where noted.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transfer/control_link.hpp"
#include "wire/control.hpp"

namespace crossdock::transfer::detail {

class EngineCore;

// Feature bit of Hello: the engine has a transport that writes into our memory without our help, so
// only its acknowledgement or its death proves that it stopped.
inline constexpr std::uint64_t kFeatureCopiesItself = 1;

class InboundSession : public std::enable_shared_from_this<InboundSession> {
 public:
  InboundSession(EngineCore& engine, std::shared_ptr<ControlLink> link, const wire::Hello& hello,
                 std::uint64_t data_token);
  // Welcomes the peer and sends it the segment.
  void start();

  [[nodiscard]] const std::string& peer_name() const noexcept { return peer_name_; }
  [[nodiscard]] std::uint64_t peer_instance() const noexcept { return peer_instance_; }
  [[nodiscard]] std::uint64_t data_token() const noexcept { return data_token_; }
  // Whether the peer may touch our memory without our transports noticing.
  [[nodiscard]] bool copies_itself() const noexcept { return copies_itself_; }
  // Whether nothing that this session began touches our memory any more; its lanes are severed.
  [[nodiscard]] bool quiesced() const noexcept {
    return !copies_itself_ || left_ || link_->ended_by_peer();
  }
  // It is over; what still runs for it shall stop.
  void end() noexcept { ended_.store(true); }
  [[nodiscard]] ControlLink& link() noexcept { return *link_; }

 private:
  Result<> on_frame(const wire::Frame& frame);
  Result<> on_notify(const wire::Frame& frame);
  Result<> on_digest_request(const wire::Frame& frame);
  void next_digest();
  void answer_digest(const wire::DigestRequest& request);

  // A frame of a request is at most 128 KiB.
  static constexpr std::size_t kMaxDigests = 512;

  EngineCore& engine_;
  const std::shared_ptr<ControlLink> link_;
  const std::string peer_name_;
  const std::uint64_t peer_instance_;
  const std::uint64_t data_token_;
  const bool copies_itself_;
  std::atomic<bool> ended_{false};
  std::deque<std::shared_ptr<const wire::DigestRequest>> digests_;  // the first is being computed
  bool left_ = false;  // it said Bye, which a peer does when it touches nothing any more
};

}  // namespace crossdock::transfer::detail
