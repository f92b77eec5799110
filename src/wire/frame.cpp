// Framing of the control connection. See the header for layout and rules.
// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.hpp"

#include <fmt/format.h>

#include "wire/checksum.hpp"

namespace crossdock::wire {
namespace {

// Of the buffer, while no frame has begun: what one long frame took is given back.
constexpr std::size_t kKeptBytes = 64 * 1024;

std::uint32_t frame_checksum(std::uint16_t version, std::uint16_t type, Bytes payload) {
  const std::uint64_t seed = (std::uint64_t{version} << 48) | (std::uint64_t{type} << 32) |
                             static_cast<std::uint32_t>(payload.size());
  return static_cast<std::uint32_t>(xxh3_64(payload, seed));
}

Error peer_error(Code code, Retry retry, std::string message) {
  return Error{.code = code, .scope = Scope::kPeer, .retry = retry, .message = std::move(message)};
}

}  // namespace

Result<std::vector<std::byte>> make_frame(MessageType type, Bytes payload) {
  return make_frame(kControlProtocol, static_cast<std::uint16_t>(type), payload);
}

Result<std::vector<std::byte>> make_frame(const FrameProtocol& protocol, std::uint16_t type,
                                          Bytes payload) {
  if (payload.size() > protocol.max_payload)
    return invalid_argument(fmt::format("message type {} of {} bytes exceeds the {} of a frame",
                                        type, payload.size(), protocol.max_payload));
  std::vector<std::byte> out;
  out.reserve(kFrameHeaderBytes + payload.size());
  Writer writer{VectorSink(out)};
  writer.u32("magic", protocol.magic);
  writer.u16("version", kWireVersion);
  writer.u16("type", type);
  writer.u32("length", static_cast<std::uint32_t>(payload.size()));
  writer.u32("checksum", frame_checksum(kWireVersion, type, payload));
  writer.raw("payload", payload);
  return out;
}

Error unexpected_frame(MessageType expected, const Frame& frame) {
  if (frame.type == MessageType::kRefused) {
    Result<Refused> refused = decode<Refused>(frame.payload);
    if (!refused.ok()) return std::move(refused).error();
    return peer_error(refused->code, Retry::kNo, "the peer refused: " + refused->message);
  }
  return peer_error(Code::kCorrupt, Retry::kAfterReconnect,
                    fmt::format("expected {} from the peer, got {} (type {})", to_string(expected),
                                to_string(frame.type), static_cast<int>(frame.type)));
}

void FrameReader::feed(Bytes chunk) {
  if (failed_) return;
  if (start_ == buffer_.size()) {
    buffer_.clear();
    start_ = 0;
  } else if (start_ > buffer_.size() / 2) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(start_));
    start_ = 0;
  }
  buffer_.insert(buffer_.end(), chunk.begin(), chunk.end());
}

Result<> FrameReader::check_header(Bytes head) const {
  std::byte magic[4];
  store_le(magic, protocol_->magic);
  const std::size_t known = std::min(head.size(), sizeof magic);
  // Judged on the first byte that differs: a peer that sends "GE" and waits is refused at once.
  if (std::memcmp(head.data(), magic, known) != 0)
    return peer_error(
        Code::kIncompatible, Retry::kNo,
        fmt::format("not a {} (first bytes {})", protocol_->speaker, quote_bytes(head)));
  if (head.size() < 6) return {};
  const auto version = load_le<std::uint16_t>(head.data() + 4);
  if (version != kWireVersion)
    return peer_error(Code::kIncompatible, Retry::kNo,
                      fmt::format("the peer speaks wire version {}, this build speaks {} "
                                  "(crossdock {}); run the same release on both sides",
                                  version, kWireVersion, kVersion));
  if (head.size() < 12) return {};
  const auto length = load_le<std::uint32_t>(head.data() + 8);
  if (length > max_payload_)
    return peer_error(Code::kCorrupt, Retry::kAfterReconnect,
                      fmt::format("the peer announces a frame of {} bytes, the limit is {}", length,
                                  max_payload_));
  return {};
}

Result<std::optional<Frame>> FrameReader::next() {
  if (failed_) return *failed_;
  const Bytes all = Bytes(buffer_).subspan(start_);
  if (all.empty()) {
    if (buffer_.capacity() > kKeptBytes) buffer_ = std::vector<std::byte>();
    start_ = std::min(start_, buffer_.size());
    return std::optional<Frame>{};
  }
  if (Result<> checked = check_header(all); !checked.ok()) {
    failed_ = std::move(checked).error();
    return *failed_;
  }
  if (all.size() < kFrameHeaderBytes) return std::optional<Frame>{};
  const auto length = load_le<std::uint32_t>(all.data() + 8);
  if (all.size() - kFrameHeaderBytes < length) return std::optional<Frame>{};

  const Bytes payload = all.subspan(kFrameHeaderBytes, length);
  const auto type = load_le<std::uint16_t>(all.data() + 6);
  if (frame_checksum(kWireVersion, type, payload) != load_le<std::uint32_t>(all.data() + 12)) {
    failed_ = peer_error(
        Code::kCorrupt, Retry::kAfterReconnect,
        fmt::format("checksum of a frame of type {} and {} bytes does not match", type, length));
    return *failed_;
  }
  start_ += kFrameHeaderBytes + length;
  return std::optional<Frame>(Frame{static_cast<MessageType>(type), payload});
}

}  // namespace crossdock::wire
