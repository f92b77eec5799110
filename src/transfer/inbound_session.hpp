// A peer that opened this engine: its control connection at our end. Tells it our regions, takes
// its notifications, and asks it to let go of memory. Control loop only, except where noted.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  [[nodiscard]] ControlLink& link() noexcept { return *link_; }

 private:
  Result<> on_frame(const wire::Frame& frame);
  Result<> on_notify(const wire::Frame& frame);
  Result<> on_digest_request(const wire::Frame& frame);

  EngineCore& engine_;
  const std::shared_ptr<ControlLink> link_;
  const std::string peer_name_;
  const std::uint64_t peer_instance_;
  const std::uint64_t data_token_;
  const bool copies_itself_;
};

}  // namespace crossdock::transfer::detail
