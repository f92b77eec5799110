// What store clients and servers say to each other over TCP, and how one entry lies in a file of
// the file store. A request is answered by one reply with its id, in any order: a kWait is answered
// when its key exists.
//
//   client                                    server
//     StoreRequest{id, op, key, ...}   ->
//                                      <-   StoreReply{id, code, found, revision, value, keys}
//
// Frames are those of frame.hpp with a magic of their own. No thread, no sockets, no files.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>

#include "wire/codec.hpp"
#include "wire/frame.hpp"

namespace crossdock::wire {

inline constexpr std::uint32_t kMaxStoreKeyBytes = 512;
inline constexpr std::uint32_t kMaxStoreValueBytes = 16u << 20;
inline constexpr std::uint32_t kMaxStoreKeys = 1u << 20;  // in one list reply
inline constexpr FrameProtocol kStoreProtocol{0x54534458 /* "XDST" */, kMaxStoreValueBytes + 4096,
                                              "crossdock store"};

enum class StoreMessage : std::uint16_t { kRequest = 1, kReply = 2 };
enum class StoreOp : std::uint8_t {
  kPut = 1,
  kGet = 2,
  kRemove = 3,
  kList = 4,  // key is the prefix
  kWait = 5,
  kCompareAndPut = 6,
  kCompareAndRemove = 7,
};

struct StoreRequest {
  std::uint64_t id = 0;
  StoreOp op = StoreOp::kGet;
  std::string key = {};
  std::string value = {};
  std::uint64_t lease_ms = 0;           // kPut; 0: for ever
  std::uint64_t expected_revision = 0;  // kCompareAndPut (0: the key must not exist), ..Remove
  friend bool operator==(const StoreRequest&, const StoreRequest&) = default;
};

struct StoreReply {
  std::uint64_t id = 0;
  Code code = Code::kOk;
  std::string message = {};
  bool found = false;  // kGet, kWait: the key exists; kCompareAnd..: it was put or removed
  std::uint64_t revision = 0;
  std::string value = {};
  std::vector<std::string> keys = {};
  friend bool operator==(const StoreReply&, const StoreReply&) = default;
};

// Whole frames.
[[nodiscard]] Result<std::vector<std::byte>> encode_store_request(const StoreRequest& request);
[[nodiscard]] Result<std::vector<std::byte>> encode_store_reply(const StoreReply& reply);
// Payloads of frames; the overloads for frames check the type too.
[[nodiscard]] Result<StoreRequest> decode_store_request(Bytes payload);
[[nodiscard]] Result<StoreReply> decode_store_reply(Bytes payload);
[[nodiscard]] Result<StoreRequest> decode_store_request(const Frame& frame);
[[nodiscard]] Result<StoreReply> decode_store_reply(const Frame& frame);

// One entry in a file, with a checksum: a torn or foreign file is noticed.
struct StoreRecord {
  std::string key = {};
  std::string value = {};
  std::uint64_t revision = 0;
  std::uint64_t expires_unix_ms = 0;  // 0: never
  friend bool operator==(const StoreRecord&, const StoreRecord&) = default;
};
[[nodiscard]] Result<std::vector<std::byte>> encode_store_record(const StoreRecord& record);
[[nodiscard]] Result<StoreRecord> decode_store_record(Bytes file);

// What one rank contributes to an all-gather, with what it believes the gather to be.
struct GatherPart {
  std::uint32_t rank = 0;
  std::uint32_t world = 0;
  std::string bytes = {};
};
[[nodiscard]] Result<std::string> encode_gather_part(const GatherPart& part);
[[nodiscard]] Result<GatherPart> decode_gather_part(std::string_view value);

// Every byte outside A-Z a-z 0-9 - _ . ~ as %XX.
[[nodiscard]] std::string percent_encode(std::string_view text);
// kInvalidArgument for a '%' without two hexadecimal digits.
[[nodiscard]] Result<std::string> percent_decode(std::string_view text);

}  // namespace crossdock::wire
