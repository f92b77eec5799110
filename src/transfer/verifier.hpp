// The end-to-end checksum: after the bytes of a transfer are in place, both ends hash their memory
// with XXH3-64 and the initiator compares. Above the transports, so it catches what any of them
// does. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "transfer/transfer_core.hpp"
#include "wire/control.hpp"

namespace crossdock::transfer::detail {

// Ends in after_checksum() or finish() of the transfer. Hashing runs on the engine's hashing
// thread.
void verify_transfer(const std::shared_ptr<TransferCore>& transfer);

// The target's half: the digest of ranges of this engine's memory. kInvalidArgument or kDenied when
// one is not in a region that peers may read or write, kInvalidArgument for memory that is not
// mapped any more and for more than wire::kMaxDigestBytes, kClosed soon after `stop()` turned true.
Result<std::uint64_t> digest_ranges(const std::vector<wire::DigestRange>& ranges,
                                    EngineCore& engine, const std::function<bool()>& stop);

}  // namespace crossdock::transfer::detail
