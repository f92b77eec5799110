// Copies of bytes by the CPU, for transports that move data with it. Stateless, any thread.
// Streaming copies write past the caches: for volumes that no cache holds they are faster (figures
// in docs/design/shm.md) and leave the caches to others; for small ones they are slower.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crossdock::transport {

inline constexpr std::size_t kCacheLine = 64;

// From this many bytes of one shard on, streaming is the faster way: a second-level cache no longer
// holds source and destination (measured: 2 to 4 MiB on machines with 1 to 2 MiB of it).
inline constexpr std::uint64_t kStreamingBytes = std::uint64_t{2} << 20;

// A slice alone below this is copied plainly all the same: streams do not get going in it (4 KiB
// pages, scattered: 4.9 GB/s against 6.9).
inline constexpr std::uint32_t kStreamingSliceBytes = 8u << 10;

// Slices of equal length, from the first of these on and below the second, are streamed four at a
// time where that is faster: one alone is too short for its own four streams (4 KiB pages,
// scattered: 0.15 against 0.24 CPU-s/GB).
inline constexpr std::size_t kTogether = 4;
inline constexpr std::uint32_t kTogetherMinBytes = 4u << 10;
inline constexpr std::uint32_t kTogetherEndBytes = 16u << 10;

// Ranges must not overlap.
void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
// The same past the caches. The bytes are ordered before later stores of this thread only after
// finish_streaming().
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
void finish_streaming() noexcept;
struct CopyPair {
  std::byte* to;
  const std::byte* from;
};
// All pairs side by side, `bytes` each. Destinations begin on a line of the cache, `bytes` is a
// multiple of one, no destination overlaps anything. Only where streams_together().
void copy_together(std::span<const CopyPair, kTogether> pairs, std::size_t bytes) noexcept;
[[nodiscard]] bool streams_together() noexcept;

// The ways to stream that this processor has, the one in use first; for tests.
using StreamingCopy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
std::span<const StreamingCopy> streaming_copies();

}  // namespace crossdock::transport
