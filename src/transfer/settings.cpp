// See settings.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/settings.hpp"

#include "base/config.hpp"

namespace crossdock::transfer {

Settings read_settings(const base::Config& config) {
  return {
      .slice_bytes = config.size("transfer.slice_bytes"),
      .shard_bytes = config.size("transfer.shard_bytes"),
      .merge = config.boolean("transfer.merge"),
      .checksum = config.boolean("transfer.checksum"),
      .max_retries = static_cast<std::uint32_t>(config.integer("transfer.max_retries")),
      .fallback = config.boolean("transfer.fallback"),
      .max_pending = static_cast<std::uint32_t>(config.integer("transfer.max_pending")),
      .timeout = config.duration("transfer.timeout"),
      .stall_timeout = config.duration("transfer.stall_timeout"),
      .quiesce_grace = config.duration("transfer.quiesce_grace"),
      .wait_spin = config.duration("transfer.wait_spin"),
      .connect_timeout = config.duration("control.connect_timeout"),
      .handshake_timeout = config.duration("control.handshake_timeout"),
      .republish = config.duration("control.renew"),
      .silence = config.duration("control.silence"),
      .mailbox_messages = static_cast<std::uint32_t>(config.integer("control.mailbox_messages")),
      .mailbox_bytes = config.size("control.mailbox_bytes"),
      .max_handshakes = static_cast<std::uint32_t>(config.integer("control.max_handshakes")),
      .listen = config.string("control.listen"),
      .secret = config.string("control.secret")};
}

}  // namespace crossdock::transfer
