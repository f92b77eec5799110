// Streaming copies: stores that go past the caches. The variant is chosen for the processor when
// the first copy runs; machines other than x86-64 use plain copies.
// SPDX-License-Identifier: Apache-2.0
#include "transport/copy_bytes.hpp"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crossdock::transport {

void copy_cached(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLine = kCacheLine;
constexpr std::size_t kPage = 4096;

struct Sse2Line {
  static void copy(std::byte* to, const std::byte* from) noexcept {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
};

struct AvxLine {
  __attribute__((target("avx"))) static void copy(std::byte* to, const std::byte* from) noexcept {
    const auto* in = reinterpret_cast<const __m256i*>(from);
    auto* out = reinterpret_cast<__m256i*>(to);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
  }
};

// Whole lines to an aligned place, `streams` pages side by side.
template <class Line, std::size_t streams>
[[gnu::always_inline]] inline void copy_lines(std::byte* to, const std::byte* from,
                                              std::size_t bytes) noexcept {
  for (; bytes >= streams * kPage; bytes -= streams * kPage) {
    for (std::size_t offset = 0; offset < kPage; offset += kLine)
      for (std::size_t page = 0; page < streams * kPage; page += kPage)
        Line::copy(to + page + offset, from + page + offset);
    to += streams * kPage, from += streams * kPage;
  }
  for (; bytes >= kLine; bytes -= kLine) {
    Line::copy(to, from);
    to += kLine, from += kLine;
  }
}

// Heads and tails that are no whole lines go the plain way.
template <class Line, std::size_t streams>
[[gnu::always_inline]] inline void copy_any(std::byte* to, const std::byte* from,
                                            std::size_t bytes) noexcept {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t head = misaligned == 0 ? 0 : kLine - misaligned;
  if (bytes < head + kLine) return copy_cached(to, from, bytes);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  const std::size_t whole = bytes / kLine * kLine;
  copy_lines<Line, streams>(to, from, whole);
  std::memcpy(to + whole, from + whole, bytes - whole);
}

void copy_sse2_4(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  copy_any<Sse2Line, 4>(to, from, bytes);
}
__attribute__((target("avx"))) void copy_avx_4(std::byte* to, const std::byte* from,
                                               std::size_t bytes) noexcept {
  copy_any<AvxLine, 4>(to, from, bytes);
}
__attribute__((target("avx"))) void copy_avx_1(std::byte* to, const std::byte* from,
                                               std::size_t bytes) noexcept {
  copy_any<AvxLine, 1>(to, from, bytes);
}

// Measured (docs/design/shm.md): where the prefetcher stops at the end of a page, as Intel's does,
// four streams hide each other's restarts; AMD's is faster with one.
constexpr StreamingCopy kOnAmd[] = {copy_avx_1, copy_avx_4, copy_sse2_4};
constexpr StreamingCopy kElsewhere[] = {copy_avx_4, copy_avx_1, copy_sse2_4};
constexpr StreamingCopy kWithoutAvx[] = {copy_sse2_4};

}  // namespace

std::span<const StreamingCopy> streaming_copies() {
  if (!__builtin_cpu_supports("avx")) return kWithoutAvx;
  if (__builtin_cpu_is("amd")) return kOnAmd;
  return kElsewhere;
}

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  static const StreamingCopy copy = streaming_copies().front();
  copy(to, from, bytes);
}

void finish_streaming() noexcept {
  _mm_sfence();
}

bool streams_together() noexcept {
  // Measured on Intel; AMD's prefetcher does not stop at the end of a page and gains nothing.
  static const bool together = __builtin_cpu_supports("avx") && !__builtin_cpu_is("amd");
  return together;
}

__attribute__((target("avx"))) void copy_together(std::span<const CopyPair, kTogether> pairs,
                                                  std::size_t bytes) noexcept {
  for (std::size_t offset = 0; offset < bytes; offset += kLine)
    for (const CopyPair& pair : pairs)
      AvxLine::copy(pair.to + offset, pair.from + offset);
}

#else

std::span<const StreamingCopy> streaming_copies() {
  static constexpr StreamingCopy kPlain[] = {copy_cached};
  return kPlain;
}

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  copy_cached(to, from, bytes);
}

void finish_streaming() noexcept {}

bool streams_together() noexcept {
  return false;
}

void copy_together(std::span<const CopyPair, kTogether> pairs, std::size_t bytes) noexcept {
  for (const CopyPair& pair : pairs)
    copy_cached(pair.to, pair.from, bytes);
}

#endif

}  // namespace crossdock::transport
