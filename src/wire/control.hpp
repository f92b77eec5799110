// The control connection: its messages as structs, and their encoding. One payload holds exactly
// one message; how payloads are framed is in frame.hpp, how a segment of many regions becomes pages
// in segment.hpp. Decoders accept any bytes and answer with a Result.
//
//   client                                   server
//     Hello (nonce, purpose, host)   ->
//                                    <-   Challenge (nonce, instance)     only when a key is set
//     AuthProof(client)              ->                                   mac: auth.hpp
//                                    <-   AuthProof(server)
//                                    <-   Welcome (name, features, transports)  or  Refused
//     ...SegmentPage, RegionAdded, RegionsRemoved, Revoke/RevokeAck, Notify/NotifyAck, Ping/Pong...
//                                    <->  Bye
//
// A server with a key sends nothing but Challenge or Refused until the client's proof holds.
// No thread of its own; must not touch sockets.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>

#include "wire/codec.hpp"

namespace crossdock::wire {

inline constexpr std::uint32_t kMaxNameBytes = 256;   // engine names
inline constexpr std::uint32_t kMaxBootIdBytes = 64;  // a UUID is 36
inline constexpr std::uint32_t kMaxTransports = 32;   // per engine
inline constexpr std::uint32_t kMaxTransportNameBytes = 32;
inline constexpr std::uint32_t kMaxAddressBlobBytes = 512;
inline constexpr std::uint32_t kMaxRegionLabelBytes = 64;
inline constexpr std::uint32_t kMaxRegionKeys = 32;  // one a transport
inline constexpr std::uint32_t kMaxKeyBlobBytes = 64;
inline constexpr std::uint32_t kMaxMailboxBytes = 64;
inline constexpr std::uint32_t kMaxNotifyBytes = 64 * 1024;
inline constexpr std::uint32_t kMaxReasonBytes = 1024;  // Refused, Bye
inline constexpr std::uint32_t kMaxDigestRanges = 8 * 1024;
inline constexpr std::uint64_t kMaxDigestBytes = 2ull << 30;  // of one DigestRequest, in all
inline constexpr std::uint32_t kMaxRegionIds = 32 * 1024;     // in one RegionsRemoved or Revoke

// Numbers are part of the protocol: append only.
enum class MessageType : std::uint16_t {
  kHello = 1,
  kChallenge = 2,
  kAuthProof = 3,
  kWelcome = 4,
  kRefused = 5,
  kSegmentPage = 6,
  kRegionAdded = 7,
  kRegionsRemoved = 8,
  kRevoke = 9,
  kRevokeAck = 10,
  kNotify = 11,
  kNotifyAck = 12,
  kPing = 13,
  kPong = 14,
  kBye = 15,
  kDigestRequest = 16,
  kDigestReply = 17,
};

// "Hello"; "unknown message" for numbers that are not ours.
std::string_view to_string(MessageType type) noexcept;

// Identifies a process beyond doubt: two ends share a host when boot_id and pid_namespace are
// equal; `pid` with `start_time` (field 22 of /proc/<pid>/stat) is never reused.
struct HostIdentity {
  std::string boot_id = {};
  std::uint64_t pid_namespace = 0;
  std::uint32_t pid = 0;
  std::uint64_t start_time = 0;
  friend bool operator==(const HostIdentity&, const HostIdentity&) = default;
};

using Nonce = std::array<std::byte, 16>;
using Mac = std::array<std::byte, 32>;

enum class Purpose : std::uint8_t { kControl = 0, kData = 1 };

struct Hello {
  static constexpr MessageType kType = MessageType::kHello;
  std::string engine_name = {};
  std::uint64_t instance_id = 0;  // drawn at random when the engine is created
  std::uint64_t features = 0;
  Nonce nonce = {};
  Purpose purpose = Purpose::kControl;
  std::uint16_t rail = 0;   // data lanes: which rail of the peer
  std::uint64_t token = 0;  // data lanes: Welcome::data_token of the control connection
  HostIdentity host = {};
  friend bool operator==(const Hello&, const Hello&) = default;
};

struct Challenge {
  static constexpr MessageType kType = MessageType::kChallenge;
  Nonce nonce = {};
  std::uint64_t instance_id = 0;  // a random number: tells nothing before the proof
  friend bool operator==(const Challenge&, const Challenge&) = default;
};

struct AuthProof {
  static constexpr MessageType kType = MessageType::kAuthProof;
  Mac mac = {};
  friend bool operator==(const AuthProof&, const AuthProof&) = default;
};

struct TransportOffer {
  static constexpr std::size_t kMinEncodedBytes = 8;
  std::string name = {};
  std::string address = {};  // bytes; their meaning is the transport's own
  friend bool operator==(const TransportOffer&, const TransportOffer&) = default;
};

struct Welcome {
  static constexpr MessageType kType = MessageType::kWelcome;
  std::string engine_name = {};
  std::uint64_t instance_id = 0;
  std::uint64_t features = 0;
  std::uint64_t data_token = 0;  // ties data lanes to this control connection
  HostIdentity host = {};
  std::vector<TransportOffer> transports = {};
  friend bool operator==(const Welcome&, const Welcome&) = default;
};

struct Refused {
  static constexpr MessageType kType = MessageType::kRefused;
  Code code = Code::kDenied;  // not kOk
  std::string message = {};
  friend bool operator==(const Refused&, const Refused&) = default;
};

struct RegionKey {
  static constexpr std::size_t kMinEncodedBytes = 5;
  std::uint8_t transport = 0;  // index into Welcome::transports
  std::string blob = {};       // bytes of the transport's own
  friend bool operator==(const RegionKey&, const RegionKey&) = default;
};

struct RegionEntry {
  static constexpr std::size_t kMinEncodedBytes = 29;
  std::uint32_t region_id = 0;
  std::uint64_t addr = 0;
  std::uint64_t length = 0;
  std::uint8_t access = 0;  // bit 0: remote read, bit 1: remote write
  std::string label = {};
  std::vector<RegionKey> keys = {};
  friend bool operator==(const RegionEntry&, const RegionEntry&) = default;
};

// Entries [first, first + regions.size()) of the `total` regions of segment version `version`.
struct SegmentPage {
  static constexpr MessageType kType = MessageType::kSegmentPage;
  std::uint64_t version = 0;
  std::uint32_t first = 0;
  std::uint32_t total = 0;
  std::vector<RegionEntry> regions = {};
  friend bool operator==(const SegmentPage&, const SegmentPage&) = default;
};

struct RegionAdded {
  static constexpr MessageType kType = MessageType::kRegionAdded;
  std::uint64_t version = 0;
  std::vector<RegionEntry> regions = {};
  friend bool operator==(const RegionAdded&, const RegionAdded&) = default;
};

struct RegionsRemoved {
  static constexpr MessageType kType = MessageType::kRegionsRemoved;
  std::uint64_t version = 0;
  std::vector<std::uint32_t> region_ids = {};
  friend bool operator==(const RegionsRemoved&, const RegionsRemoved&) = default;
};

// "Stop touching these regions of mine (none named: all), and say when you have."
struct Revoke {
  static constexpr MessageType kType = MessageType::kRevoke;
  std::uint64_t token = 0;
  std::vector<std::uint32_t> region_ids = {};
  friend bool operator==(const Revoke&, const Revoke&) = default;
};

struct RevokeAck {
  static constexpr MessageType kType = MessageType::kRevokeAck;
  std::uint64_t token = 0;
  friend bool operator==(const RevokeAck&, const RevokeAck&) = default;
};

struct Notify {
  static constexpr MessageType kType = MessageType::kNotify;
  std::uint64_t sequence = 0;
  std::uint64_t transfer_id = 0;  // 0: not tied to a transfer
  std::string mailbox = {};
  std::string payload = {};  // any bytes
  friend bool operator==(const Notify&, const Notify&) = default;
};

struct NotifyAck {
  static constexpr MessageType kType = MessageType::kNotifyAck;
  std::uint64_t sequence = 0;
  Code code = Code::kOk;
  friend bool operator==(const NotifyAck&, const NotifyAck&) = default;
};

struct Ping {
  static constexpr MessageType kType = MessageType::kPing;
  std::uint64_t value = 0;
  friend bool operator==(const Ping&, const Ping&) = default;
};

struct Pong {
  static constexpr MessageType kType = MessageType::kPong;
  std::uint64_t value = 0;
  friend bool operator==(const Pong&, const Pong&) = default;
};

struct Bye {
  static constexpr MessageType kType = MessageType::kBye;
  std::string reason = {};
  friend bool operator==(const Bye&, const Bye&) = default;
};

struct DigestRange {
  static constexpr std::size_t kMinEncodedBytes = 16;
  std::uint64_t addr = 0;
  std::uint64_t length = 0;
  friend bool operator==(const DigestRange&, const DigestRange&) = default;
};

// "The XXH3-64 of these ranges of yours, one after the other": the end-to-end checksum of a
// transfer.
struct DigestRequest {
  static constexpr MessageType kType = MessageType::kDigestRequest;
  std::uint64_t sequence = 0;
  std::vector<DigestRange> ranges = {};
  friend bool operator==(const DigestRequest&, const DigestRequest&) = default;
};

struct DigestReply {
  static constexpr MessageType kType = MessageType::kDigestReply;
  std::uint64_t sequence = 0;
  Code code = Code::kOk;
  std::uint64_t digest = 0;
  std::string message = {};
  friend bool operator==(const DigestReply&, const DigestReply&) = default;
};

// The payload of one message. Defined for the message structs above. A field over its limit is the
// caller's mistake (kInvalidArgument), a malformed payload the peer's (kCorrupt, scope peer).
template <class M>
[[nodiscard]] Result<std::vector<std::byte>> encode(const M& message);
template <class M>
[[nodiscard]] Result<M> decode(Bytes payload);

}  // namespace crossdock::wire
