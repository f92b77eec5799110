// Frames of the data lanes. See the header for layout and rules.
// SPDX-License-Identifier: Apache-2.0
#include "wire/data.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "wire/checksum.hpp"

namespace crossdock::wire {
namespace {

constexpr std::uint16_t kDataMagic = 0x4458;  // "XD"
constexpr std::uint8_t kFlagChecksum = 1;
// Makes the checksum of an all-zero header differ from zero-filled bytes elsewhere.
constexpr std::uint64_t kHeaderSeed = 0x6c616e65;
constexpr std::size_t kHeaderSumOffset = 36;

std::uint32_t sum32(Bytes bytes, std::uint64_t seed) {
  return static_cast<std::uint32_t>(xxh3_64(bytes, seed));
}

Error malformed(std::string message) {
  return Error{.code = Code::kCorrupt,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = std::move(message)};
}

// Precondition: `out` holds a header.
void store_header(const DataHeader& header, std::byte* out) {
  store_le(out, kDataMagic);
  store_le(out + 2, static_cast<std::uint8_t>(header.type));
  store_le(out + 3, static_cast<std::uint8_t>(header.has_checksum ? kFlagChecksum : 0));
  store_le(out + 4, header.count);
  store_le(out + 6, static_cast<std::uint16_t>(header.status));
  store_le(out + 8, header.request_id);
  store_le(out + 16, header.payload_bytes);
  store_le(out + 20, header.expiry_ms);
  store_le(out + 24, header.has_checksum ? header.checksum : std::uint64_t{0});
  store_le(out + 32, header.body_checksum);
  store_le(out + kHeaderSumOffset, sum32(Bytes(out, kHeaderSumOffset), kHeaderSeed));
}

// Fills what is left up to the payload, then the header. Precondition: the content lies behind the
// header, and `out` holds the head. Returns the head's size.
std::size_t finish_head(DataHeader header, std::span<std::byte> out) {
  const std::span<std::byte> body = out.subspan(kDataHeaderBytes, header.body_bytes());
  std::ranges::fill(body.subspan(header.content_bytes()), std::byte{0});
  header.body_checksum = sum32(body, header.request_id);
  store_header(header, out.data());
  return header.head_bytes();
}

Error too_small(std::size_t have, std::size_t need) {
  return invalid_argument(
      fmt::format("buffer of {} bytes is too small for a frame head of {}", have, need));
}

Result<std::size_t> encode_request(DataType type, const RequestFrame& frame,
                                   std::span<std::byte> out) {
  const auto descriptors = frame.descriptors;
  if (descriptors.empty() || descriptors.size() > kMaxDescriptors)
    return invalid_argument(fmt::format("{} of {} descriptors must have 1 to {}", to_string(type),
                                        descriptors.size(), kMaxDescriptors));
  const std::size_t size = data_head_bytes(descriptors.size() * kDescriptorBytes);
  if (out.size() < size) return too_small(out.size(), size);
  std::uint64_t total = 0;
  std::byte* body = out.data() + kDataHeaderBytes;
  for (std::size_t i = 0; i < descriptors.size(); ++i) {
    const Descriptor& d = descriptors[i];
    if (d.length == 0 || d.length > UINT64_MAX - d.addr)
      return invalid_argument(
          fmt::format("descriptor {}: {} bytes at {:#x} is not a range", i, d.length, d.addr));
    total += d.length;
    store_le(body + i * kDescriptorBytes, d.addr);
    store_le(body + i * kDescriptorBytes + 8, d.length);
  }
  if (total > kMaxDataPayload)
    return invalid_argument(fmt::format("{} of {} bytes exceeds the {} bytes of a data frame",
                                        to_string(type), total, kMaxDataPayload));
  DataHeader header{.type = type,
                    .has_checksum = frame.has_checksum,
                    .count = static_cast<std::uint16_t>(descriptors.size()),
                    .request_id = frame.request_id,
                    .payload_bytes = static_cast<std::uint32_t>(total),
                    .expiry_ms = frame.expiry_ms,
                    .checksum = type == DataType::kWrite ? frame.checksum : 0};
  return finish_head(header, out);
}

Result<> check_limits(const DataHeader& header, std::uint16_t status) {
  const bool request = header.type == DataType::kWrite || header.type == DataType::kRead;
  if (header.payload_bytes > kMaxDataPayload)
    return malformed(fmt::format("{} announces {} bytes, the limit is {}", to_string(header.type),
                                 header.payload_bytes, kMaxDataPayload));
  const std::size_t limit = request                         ? kMaxDescriptors
                            : header.type == DataType::kAck ? kMaxAckMessageBytes
                                                            : 0;
  if (header.count > limit || (request && header.count == 0))
    return malformed(fmt::format("{} with count {}, allowed are {} to {}", to_string(header.type),
                                 header.count, request ? 1 : 0, limit));
  if (status > static_cast<std::uint16_t>(Code::kDenied) || (request && status != 0))
    return malformed(fmt::format("{} with status {}", to_string(header.type), status));
  return {};
}

}  // namespace

std::string_view to_string(DataType type) noexcept {
  switch (type) {
    case DataType::kWrite:
      return "WRITE";
    case DataType::kRead:
      return "READ";
    case DataType::kReadData:
      return "READ_DATA";
    case DataType::kAck:
      return "ACK";
  }
  return "unknown frame";
}

Result<std::size_t> encode_write(const RequestFrame& frame, std::span<std::byte> out) {
  return encode_request(DataType::kWrite, frame, out);
}

Result<std::size_t> encode_read(const RequestFrame& frame, std::span<std::byte> out) {
  return encode_request(DataType::kRead, frame, out);
}

Result<std::size_t> encode_read_data(const ReadDataFrame& frame, std::span<std::byte> out) {
  if (frame.payload_bytes > kMaxDataPayload)
    return invalid_argument(
        fmt::format("READ_DATA of {} bytes exceeds the {} bytes of a data frame",
                    frame.payload_bytes, kMaxDataPayload));
  if (out.size() < kMinDataHeadBytes) return too_small(out.size(), kMinDataHeadBytes);
  return finish_head({.type = DataType::kReadData,
                      .has_checksum = frame.has_checksum,
                      .request_id = frame.request_id,
                      .payload_bytes = frame.payload_bytes,
                      .checksum = frame.checksum},
                     out);
}

Result<std::size_t> encode_ack(const AckFrame& frame, std::span<std::byte> out) {
  const Bytes message = as_bytes(frame.message.substr(0, kMaxAckMessageBytes));
  const std::size_t size = data_head_bytes(message.size());
  if (out.size() < size) return too_small(out.size(), size);
  if (!message.empty()) std::memcpy(out.data() + kDataHeaderBytes, message.data(), message.size());
  return finish_head({.type = DataType::kAck,
                      .count = static_cast<std::uint16_t>(message.size()),
                      .status = frame.status,
                      .request_id = frame.request_id,
                      .payload_bytes = frame.bytes_applied},
                     out);
}

Result<DataHeader> decode_data_header(Bytes bytes) {
  if (bytes.size() < kDataHeaderBytes)
    return malformed(
        fmt::format("data header of {} bytes, it has {}", bytes.size(), kDataHeaderBytes));
  const std::byte* in = bytes.data();
  if (load_le<std::uint16_t>(in) != kDataMagic)
    return malformed(fmt::format("not a data frame (first bytes {})", quote_bytes(bytes)));
  if (load_le<std::uint32_t>(in + kHeaderSumOffset) !=
      sum32(bytes.first(kHeaderSumOffset), kHeaderSeed))
    return malformed("checksum of a data header does not match");
  const auto type = load_le<std::uint8_t>(in + 2);
  const auto flags = load_le<std::uint8_t>(in + 3);
  const auto status = load_le<std::uint16_t>(in + 6);
  if (type < 1 || type > static_cast<std::uint8_t>(DataType::kAck) || flags > kFlagChecksum)
    return malformed(fmt::format("data frame of unknown type {} or flags {:#x}", type, flags));
  const DataHeader header{.type = static_cast<DataType>(type),
                          .has_checksum = (flags & kFlagChecksum) != 0,
                          .count = load_le<std::uint16_t>(in + 4),
                          .status = static_cast<Code>(status),
                          .request_id = load_le<std::uint64_t>(in + 8),
                          .payload_bytes = load_le<std::uint32_t>(in + 16),
                          .expiry_ms = load_le<std::uint32_t>(in + 20),
                          .checksum = load_le<std::uint64_t>(in + 24),
                          .body_checksum = load_le<std::uint32_t>(in + 32)};
  CROSSDOCK_CHECK_OK(check_limits(header, status));
  return header;
}

Result<> decode_descriptors(const DataHeader& header, Bytes body, std::span<Descriptor> out) {
  if (header.type != DataType::kWrite && header.type != DataType::kRead)
    return invalid_argument(fmt::format("{} has no descriptors", to_string(header.type)));
  if (body.size() != header.body_bytes() || out.size() < header.count)
    return invalid_argument(
        fmt::format("{} descriptors need {} bytes and as many places, not {} and {}", header.count,
                    header.body_bytes(), body.size(), out.size()));
  if (sum32(body, header.request_id) != header.body_checksum)
    return malformed(
        fmt::format("checksum of the descriptors of request {} does not match", header.request_id));
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < header.count; ++i) {
    const std::byte* in = body.data() + i * kDescriptorBytes;
    const Descriptor d{load_le<std::uint64_t>(in), load_le<std::uint32_t>(in + 8)};
    if (d.length == 0 || d.length > UINT64_MAX - d.addr)
      return malformed(fmt::format("descriptor {} of request {}: {} bytes at {:#x} is not a range",
                                   i, header.request_id, d.length, d.addr));
    total += d.length;
    out[i] = d;
  }
  if (total != header.payload_bytes)
    return malformed(fmt::format("descriptors of request {} sum to {} bytes, the header says {}",
                                 header.request_id, total, header.payload_bytes));
  return {};
}

Result<std::string_view> decode_ack_message(const DataHeader& header, Bytes body) {
  if (header.type != DataType::kAck || body.size() != header.body_bytes())
    return invalid_argument(fmt::format("{} bytes are not the message of this {}", body.size(),
                                        to_string(header.type)));
  if (sum32(body, header.request_id) != header.body_checksum)
    return malformed(
        fmt::format("checksum of the message for request {} does not match", header.request_id));
  return as_text(body.first(header.content_bytes()));
}

Result<> check_payload(const DataHeader& header, std::uint64_t computed) {
  if (!header.has_checksum || header.checksum == computed) return {};
  return Error{.code = Code::kCorrupt,
               .scope = Scope::kTransfer,
               .retry = Retry::kLater,
               .message = fmt::format("payload of request {} has XXH3 {:016x}, the sender said "
                                      "{:016x}: the bytes changed under way",
                                      header.request_id, computed, header.checksum)};
}

}  // namespace crossdock::wire
