// Frames of a TCP data lane. Every frame is a fixed 40-byte header, then its descriptors (WRITE,
// READ) or its message (ACK), then zeros up to a multiple of 64 bytes, then raw payload (WRITE,
// READ_DATA) that is never copied here:
//
//   initiator                                  target
//     WRITE   header | count descriptors | payload    ->
//                                               <-  ACK header | message     bytes are in place
//     READ    header | count descriptors        ->
//                                               <-  READ_DATA header | payload, then ACK: the
//                                                   payload counts, or not;  or ACK alone: refused
//
//   offset 0  magic u16 "XD"       2  type u8            3  flags u8 (bit 0: payload checksum)
//          4  count u16 (descriptors; ACK: bytes of the message)
//          6  status u16 (READ_DATA, ACK)                8  request id u64
//         16  payload bytes u32 (READ: asked for; ACK: applied)
//         20  expiry_ms u32 (WRITE, READ: worthless after; 0: never)
//         24  payload checksum u64 (XXH3-64, 0 unless flagged)
//         32  body checksum u32 (descriptors or message, and zeros)  36  header checksum u32
//
// Descriptors and header carry their own checksum always: a flipped bit there would write to a
// wrong place. The zeros are part of the body's checksum (which nobody looks at in a READ_DATA,
// whose body is zeros alone) and of no other use: with them payload of pages lies in the socket's
// buffers as it does in memory, from a cache line's start on, and the kernel copies it faster
// (docs/design/tcp.md). Encoding goes to the caller's buffer, decoding to the caller's span;
// nothing
// allocates except an error's text. Stateless. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <crossdock/core/result.hpp>

#include "wire/codec.hpp"

namespace crossdock::wire {

inline constexpr std::size_t kDataHeaderBytes = 40;
inline constexpr std::size_t kDescriptorBytes = 12;   // addr u64, length u32
inline constexpr std::size_t kMaxDescriptors = 4096;  // 48 KiB
inline constexpr std::uint32_t kMaxDataPayload = 16u << 20;
inline constexpr std::size_t kMaxAckMessageBytes = 256;
inline constexpr std::size_t kDataHeadAlign = 64;
// Bytes before the payload of a frame with `content` bytes of descriptors or message.
constexpr std::size_t data_head_bytes(std::size_t content) {
  return (kDataHeaderBytes + content + kDataHeadAlign - 1) / kDataHeadAlign * kDataHeadAlign;
}
inline constexpr std::size_t kMinDataHeadBytes = data_head_bytes(0);
inline constexpr std::size_t kMaxAckBytes = data_head_bytes(kMaxAckMessageBytes);
// Room for the header and body of any frame.
inline constexpr std::size_t kMaxDataHeadBytes =
    data_head_bytes(kMaxDescriptors * kDescriptorBytes);

enum class DataType : std::uint8_t { kWrite = 1, kRead = 2, kReadData = 3, kAck = 4 };
std::string_view to_string(DataType type) noexcept;

// One contiguous remote range; `length` is at least 1.
struct Descriptor {
  std::uint64_t addr = 0;
  std::uint32_t length = 0;
  friend bool operator==(const Descriptor&, const Descriptor&) = default;
};

struct DataHeader {
  DataType type = DataType::kAck;
  bool has_checksum = false;
  std::uint16_t count = 0;
  Code status = Code::kOk;
  std::uint64_t request_id = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t expiry_ms = 0;
  std::uint64_t checksum = 0;
  std::uint32_t body_checksum = 0;

  // Descriptors or message.
  [[nodiscard]] std::size_t content_bytes() const {
    return type == DataType::kAck        ? count
           : type == DataType::kReadData ? 0
                                         : count * kDescriptorBytes;
  }
  // Everything before the payload, and what of it follows the header.
  [[nodiscard]] std::size_t head_bytes() const { return data_head_bytes(content_bytes()); }
  [[nodiscard]] std::size_t body_bytes() const { return head_bytes() - kDataHeaderBytes; }
  // Raw bytes that follow header and body on the wire.
  [[nodiscard]] std::uint32_t trailing_bytes() const {
    return type == DataType::kWrite || type == DataType::kReadData ? payload_bytes : 0;
  }
};

struct RequestFrame {
  std::uint64_t request_id = 0;
  std::uint32_t expiry_ms = 0;
  std::span<const Descriptor> descriptors = {};
  bool has_checksum = false;   // WRITE: `checksum` is set; READ: the target shall add one
  std::uint64_t checksum = 0;  // WRITE only
};

struct ReadDataFrame {
  std::uint64_t request_id = 0;
  std::uint32_t payload_bytes = 0;
  bool has_checksum = false;
  std::uint64_t checksum = 0;
};

struct AckFrame {
  std::uint64_t request_id = 0;
  Code status = Code::kOk;
  std::uint32_t bytes_applied = 0;
  std::string_view message = {};  // cut at kMaxAckMessageBytes
};

// Each returns how many bytes of `out` it filled: header and body, without payload.
// kInvalidArgument when a limit is broken or `out` is too small.
[[nodiscard]] Result<std::size_t> encode_write(const RequestFrame& frame, std::span<std::byte> out);
[[nodiscard]] Result<std::size_t> encode_read(const RequestFrame& frame, std::span<std::byte> out);
[[nodiscard]] Result<std::size_t> encode_read_data(const ReadDataFrame& frame,
                                                   std::span<std::byte> out);
[[nodiscard]] Result<std::size_t> encode_ack(const AckFrame& frame, std::span<std::byte> out);

// The first kDataHeaderBytes of a frame. What it returns is within every limit above.
[[nodiscard]] Result<DataHeader> decode_data_header(Bytes bytes);

// The body of a WRITE or READ: exactly header.body_bytes() of it, into the front of `out` (which
// holds at least header.count). Lengths are not zero, addr + length does not wrap, and their sum is
// header.payload_bytes.
[[nodiscard]] Result<> decode_descriptors(const DataHeader& header, Bytes body,
                                          std::span<Descriptor> out);

// The body of an ACK as a view into `body`.
[[nodiscard]] Result<std::string_view> decode_ack_message(const DataHeader& header, Bytes body);

// kCorrupt, naming request and both sums, unless they are equal.
[[nodiscard]] Result<> check_payload(const DataHeader& header, std::uint64_t computed);

}  // namespace crossdock::wire
