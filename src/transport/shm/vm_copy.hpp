// Copies between this process and a peer's by process_vm_readv and process_vm_writev: one copy by
// the kernel, nothing for the peer to do, any memory. Stateless, any thread, allocates only for
// errors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "transport/transport.hpp"

namespace crossdock::transport::shm {

class PeerProcess;

// Slices of one call at most: the kernel takes 1024 ranges.
inline constexpr std::uint32_t kVmSlices = 512;

// Copies at most kVmSlices slices, in one call when all goes well, and returns how many of them
// from the front are in place; fewer than asked sets `error`: kPeerLost (the peer has ended),
// kInvalidArgument (unmapped memory: names the address), kDenied (the system forbids it: names the
// remedy). When it returns no byte moves any more.
std::uint32_t vm_copy(const PeerProcess& peer, Op op, std::span<const Slice> slices,
                      std::optional<Error>& error) noexcept;

// The error of a call that failed on `slice`.
Error vm_error(int errno_value, const PeerProcess& peer, Op op, const Slice& slice);

}  // namespace crossdock::transport::shm
