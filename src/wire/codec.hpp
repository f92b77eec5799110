// Bounds-checked little-endian reading and writing, the ground every message stands on. A Reader
// never looks past the bytes it was given and never lets a count or length from them cause an
// allocation larger than those bytes justify; a Writer refuses what the other side would refuse.
// Both stay failed after the first error, so that a message is read field by field and judged once.
// Owns no bytes (except VectorSink's vector, the caller's); thread-compatible; must not throw.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::wire {

using Bytes = std::span<const std::byte>;

inline Bytes as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <std::unsigned_integral T>
void store_le(std::byte* out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i)
    out[i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
}

template <std::unsigned_integral T>
[[nodiscard]] T load_le(const std::byte* in) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i)
    value |= std::to_integer<std::uint64_t>(in[i]) << (8 * i);
  return static_cast<T>(value);
}

// Printable form of the first `limit` bytes of something unexpected: `"GET / HT"`, `"\x16\x03"`.
[[nodiscard]] std::string quote_bytes(Bytes bytes, std::size_t limit = 16);

// What a Reader or Writer ran into first; `where` is a literal, so that failing allocates nothing.
struct CodecFault {
  enum class Kind : std::uint8_t { kNone, kTruncated, kOverLimit, kBadValue, kNoSpace };
  Kind kind = Kind::kNone;
  const char* field = "";
  std::uint64_t value = 0;
  std::uint64_t limit = 0;
};

// The error of a fault, for a message named `what`. A fault while reading blames the peer
// (kCorrupt, scope peer), one while writing the caller (kInvalidArgument).
[[nodiscard]] Error read_error(const CodecFault& fault, std::string_view what);
[[nodiscard]] Error write_error(const CodecFault& fault, std::string_view what);

class Reader {
 public:
  static constexpr bool kReads = true;
  explicit Reader(Bytes bytes) : bytes_(bytes) {}

  void u8(const char* field, std::uint8_t& v) { integer(field, v); }
  void u16(const char* field, std::uint16_t& v) { integer(field, v); }
  void u32(const char* field, std::uint32_t& v) { integer(field, v); }
  void u64(const char* field, std::uint64_t& v) { integer(field, v); }

  void raw(const char* field, std::span<std::byte> out) {
    if (const Bytes in = take(field, out.size()); !in.empty())
      std::memcpy(out.data(), in.data(), in.size());
  }
  // A view into the input; length prefix u32.
  Bytes view(const char* field, std::uint32_t limit) {
    std::uint32_t length = 0;
    u32(field, length);
    if (length > limit) return over_limit(field, length, limit), Bytes{};
    return take(field, length);
  }
  void bytes(const char* field, std::vector<std::byte>& out, std::uint32_t limit) {
    const Bytes in = view(field, limit);
    out.assign(in.begin(), in.end());
  }
  void string(const char* field, std::string& out, std::uint32_t limit) {
    out.assign(as_text(view(field, limit)));
  }
  // The element count of a list. Zero unless the rest of the input can hold that many elements of
  // at least `min_bytes` each: what the caller allocates is bounded by what was received.
  std::uint32_t count(const char* field, std::uint32_t limit, std::size_t min_bytes) {
    std::uint32_t n = 0;
    u32(field, n);
    if (n > limit) return over_limit(field, n, limit), 0;
    if (n > remaining() / std::max<std::size_t>(min_bytes, 1))
      return fail(CodecFault::Kind::kTruncated, field, n, remaining()), 0;
    return n;
  }
  template <class T, class Each>
  void list(const char* field, std::vector<T>& out, std::uint32_t limit, Each&& each) {
    const std::uint32_t n = count(field, limit, T::kMinEncodedBytes);
    out.clear();
    for (std::uint32_t i = 0; i < n && !failed(); ++i)
      each(out.emplace_back());
  }
  void bad_value(const char* field, std::uint64_t value, std::uint64_t limit = 0) {
    fail(CodecFault::Kind::kBadValue, field, value, limit);
  }

  [[nodiscard]] bool failed() const { return fault_.kind != CodecFault::Kind::kNone; }
  [[nodiscard]] const CodecFault& fault() const { return fault_; }
  [[nodiscard]] std::size_t remaining() const { return bytes_.size(); }
  // Success only when nothing failed and nothing is left over.
  [[nodiscard]] Result<> finish(std::string_view what) {
    if (!failed() && remaining() != 0) bad_value("bytes after the end", remaining());
    if (failed()) return read_error(fault_, what);
    return {};
  }

 private:
  template <std::unsigned_integral T>
  void integer(const char* field, T& value) {
    const Bytes in = take(field, sizeof(T));
    value = in.empty() ? T{0} : load_le<T>(in.data());
  }
  Bytes take(const char* field, std::size_t n) {
    if (failed()) return {};
    if (n > bytes_.size())
      return fail(CodecFault::Kind::kTruncated, field, n, bytes_.size()), Bytes{};
    const Bytes out = bytes_.first(n);
    bytes_ = bytes_.subspan(n);
    return out;
  }
  void over_limit(const char* field, std::uint64_t value, std::uint64_t limit) {
    fail(CodecFault::Kind::kOverLimit, field, value, limit);
  }
  void fail(CodecFault::Kind kind, const char* field, std::uint64_t value, std::uint64_t limit) {
    if (!failed()) fault_ = {kind, field, value, limit};
    bytes_ = {};
  }

  Bytes bytes_;
  CodecFault fault_;
};

// Appends to a vector.
class VectorSink {
 public:
  explicit VectorSink(std::vector<std::byte>& out) : out_(&out) {}
  bool append(const void* data, std::size_t n) {
    const auto* from = static_cast<const std::byte*>(data);
    out_->insert(out_->end(), from, from + n);
    return true;
  }

 private:
  std::vector<std::byte>* out_;
};

// Fills a span; no allocation.
class SpanSink {
 public:
  explicit SpanSink(std::span<std::byte> out) : out_(out) {}
  bool append(const void* data, std::size_t n) {
    if (n > out_.size() - used_) return false;
    if (n != 0) std::memcpy(out_.data() + used_, data, n);
    used_ += n;
    return true;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::span<std::byte> out_;
  std::size_t used_ = 0;
};

// The mirror of Reader: the same calls in the same order, so that one template describes a message
// for both directions.
template <class Sink>
class BasicWriter {
 public:
  static constexpr bool kReads = false;
  explicit BasicWriter(Sink sink) : sink_(sink) {}

  void u8(const char* field, std::uint8_t v) { integer(field, v); }
  void u16(const char* field, std::uint16_t v) { integer(field, v); }
  void u32(const char* field, std::uint32_t v) { integer(field, v); }
  void u64(const char* field, std::uint64_t v) { integer(field, v); }

  void raw(const char* field, Bytes in) {
    if (!failed() && !in.empty() && !sink_.append(in.data(), in.size()))
      fail(CodecFault::Kind::kNoSpace, field, in.size(), 0);
  }
  void bytes(const char* field, Bytes in, std::uint32_t limit) {
    if (in.size() > limit) return fail(CodecFault::Kind::kOverLimit, field, in.size(), limit);
    u32(field, static_cast<std::uint32_t>(in.size()));
    raw(field, in);
  }
  void string(const char* field, std::string_view in, std::uint32_t limit) {
    bytes(field, as_bytes(in), limit);
  }
  template <class T, class Each>
  void list(const char* field, const std::vector<T>& in, std::uint32_t limit, Each&& each) {
    if (in.size() > limit) return fail(CodecFault::Kind::kOverLimit, field, in.size(), limit);
    u32(field, static_cast<std::uint32_t>(in.size()));
    for (const T& item : in)
      each(item);
  }
  void bad_value(const char* field, std::uint64_t value, std::uint64_t limit = 0) {
    fail(CodecFault::Kind::kBadValue, field, value, limit);
  }

  [[nodiscard]] bool failed() const { return fault_.kind != CodecFault::Kind::kNone; }
  [[nodiscard]] const Sink& sink() const { return sink_; }
  [[nodiscard]] Result<> finish(std::string_view what) const {
    if (failed()) return write_error(fault_, what);
    return {};
  }

 private:
  template <std::unsigned_integral T>
  void integer(const char* field, T value) {
    std::byte raw_bytes[sizeof(T)];
    store_le(raw_bytes, value);
    raw(field, raw_bytes);
  }
  void fail(CodecFault::Kind kind, const char* field, std::uint64_t value, std::uint64_t limit) {
    if (!failed()) fault_ = {kind, field, value, limit};
  }

  Sink sink_;
  CodecFault fault_;
};

using Writer = BasicWriter<VectorSink>;
using SpanWriter = BasicWriter<SpanSink>;

}  // namespace crossdock::wire
