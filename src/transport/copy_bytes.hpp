// Copies of bytes by the CPU, for transports that move data with it. Stateless, any thread.
// Streaming copies write past the caches: for volumes that no cache holds they are faster (figures
// in docs/design/shm.md) and leave the caches to others; for small ones they are slower.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crossdock::transport {

// From this many bytes of one shard on, streaming is the faster way: a second-level cache no longer
// holds source and destination (measured: 2 to 4 MiB on machines with 1 to 2 MiB of it).
inline constexpr std::uint64_t kStreamingBytes = std::uint64_t{2} << 20;

// Slices below this are copied plainly all the same: streams do not get going in them (4 KiB pages,
// scattered: 4.9 GB/s against 6.9).
inline constexpr std::uint32_t kStreamingSliceBytes = 8u << 10;

// Ranges must not overlap.
void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
// The same past the caches. The bytes are ordered before later stores of this thread only after
// finish_streaming().
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
void finish_streaming() noexcept;

// The ways to stream that this processor has, the one in use first; for tests.
using StreamingCopy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
std::span<const StreamingCopy> streaming_copies();

}  // namespace crossdock::transport
