// Frames of the control connection: a fixed header, then one message. The header's layout never
// changes between wire versions, so that any two builds can name each other's version:
//
//   offset 0  magic u32 "XDCK"   4  wire version u16   6  message type u16
//          8  payload bytes u32  12 checksum u32 (low half of XXH3-64 of the payload, seeded with
//                                   version, type and length)
//
// FrameReader is fed whatever a socket gave and yields whole frames; it buffers no more than what
// was received, keeps no more than 64 KiB between frames, and refuses a frame over its limit before
// waiting for it. Single-owner; no sockets.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/core/version.hpp>

#include "wire/codec.hpp"
#include "wire/control.hpp"

namespace crossdock::wire {

inline constexpr std::size_t kFrameHeaderBytes = 16;
inline constexpr std::uint32_t kFrameMagic = 0x4b434458;  // "XDCK"
inline constexpr std::uint32_t kMaxFramePayload = 256 * 1024;
// What an unproved client may send: no message before Welcome is larger.
inline constexpr std::uint32_t kMaxGreetingPayload = 4 * 1024;

// Which conversation a stream of frames belongs to. All share the header's layout.
struct FrameProtocol {
  std::uint32_t magic;
  std::uint32_t max_payload;
  const char* speaker;  // "crossdock peer", for "not a ..."
};
inline constexpr FrameProtocol kControlProtocol{kFrameMagic, kMaxFramePayload, "crossdock peer"};

struct Frame {
  MessageType type = {};
  Bytes payload = {};  // valid until the reader's next call
};

// Header and payload, ready to send.
[[nodiscard]] Result<std::vector<std::byte>> make_frame(MessageType type, Bytes payload);
[[nodiscard]] Result<std::vector<std::byte>> make_frame(const FrameProtocol& protocol,
                                                        std::uint16_t type, Bytes payload);

template <class M>
[[nodiscard]] Result<std::vector<std::byte>> encode_frame(const M& message) {
  CROSSDOCK_TRY(payload, encode(message));
  return make_frame(M::kType, payload);
}

// The message of a frame that must be an M. A Refused instead becomes the error it carries.
[[nodiscard]] Error unexpected_frame(MessageType expected, const Frame& frame);
template <class M>
[[nodiscard]] Result<M> expect(const Frame& frame) {
  if (frame.type != M::kType) return unexpected_frame(M::kType, frame);
  return decode<M>(frame.payload);
}

class FrameReader {
 public:
  explicit FrameReader(std::uint32_t max_payload = kMaxFramePayload) : max_payload_(max_payload) {}
  explicit FrameReader(const FrameProtocol& protocol)
      : protocol_(&protocol), max_payload_(protocol.max_payload) {}

  // Takes any number of bytes. Never fails by itself; next() judges them.
  void feed(Bytes chunk);
  // The next whole frame; nothing when more bytes are needed. After an error (no crossdock peer,
  // another version, too long, wrong checksum) the stream is out of step: every later call
  // returns the same error.
  [[nodiscard]] Result<std::optional<Frame>> next();
  // Raised from kMaxGreetingPayload once a client has proved itself.
  void set_max_payload(std::uint32_t max_payload) { max_payload_ = max_payload; }
  [[nodiscard]] std::size_t buffered() const { return buffer_.size() - start_; }

 private:
  [[nodiscard]] Result<> check_header(Bytes head) const;

  const FrameProtocol* protocol_ = &kControlProtocol;  // of static storage
  std::uint32_t max_payload_;
  std::vector<std::byte> buffer_;
  std::size_t start_ = 0;
  std::optional<Error> failed_;
};

}  // namespace crossdock::wire
