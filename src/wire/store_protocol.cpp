// Encoding of the store's messages, records and keys. No state.
// SPDX-License-Identifier: Apache-2.0
#include "wire/store_protocol.hpp"

#include <fmt/format.h>

#include "wire/checksum.hpp"

namespace crossdock::wire {
namespace {

constexpr auto kLastCode = static_cast<std::uint16_t>(Code::kDenied);
constexpr std::uint32_t kMaxMessageBytes = 1024;
constexpr std::uint32_t kRecordMagic = 0x564b4458;  // "XDKV"

void check_key(Reader& reader, const std::string& key, bool may_be_empty) {
  if (key.empty() && !may_be_empty) reader.bad_value("length of the key", 0);
}

Result<Frame> require(const Frame& frame, StoreMessage wanted) {
  if (static_cast<StoreMessage>(frame.type) == wanted) return frame;
  return Error{.code = Code::kCorrupt,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format("store frame of type {} where {} was expected",
                                      static_cast<int>(frame.type), static_cast<int>(wanted))};
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool is_unreserved(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.' || c == '~';
}

}  // namespace

Result<std::vector<std::byte>> encode_store_request(const StoreRequest& request) {
  std::vector<std::byte> payload;
  Writer writer{VectorSink(payload)};
  writer.u64("id", request.id);
  writer.u8("op", static_cast<std::uint8_t>(request.op));
  writer.string("key", request.key, kMaxStoreKeyBytes);
  writer.string("value", request.value, kMaxStoreValueBytes);
  writer.u64("lease", request.lease_ms);
  writer.u64("expected revision", request.expected_revision);
  CROSSDOCK_CHECK_OK(writer.finish("store request"));
  return make_frame(kStoreProtocol, static_cast<std::uint16_t>(StoreMessage::kRequest), payload);
}

Result<StoreRequest> decode_store_request(Bytes payload) {
  Reader reader(payload);
  StoreRequest request;
  std::uint8_t op = 0;
  reader.u64("id", request.id);
  reader.u8("op", op);
  reader.string("key", request.key, kMaxStoreKeyBytes);
  reader.string("value", request.value, kMaxStoreValueBytes);
  reader.u64("lease", request.lease_ms);
  reader.u64("expected revision", request.expected_revision);
  request.op = static_cast<StoreOp>(op);
  if (op < 1 || op > static_cast<std::uint8_t>(StoreOp::kCompareAndRemove))
    reader.bad_value("op", op);
  check_key(reader, request.key, request.op == StoreOp::kList);
  CROSSDOCK_CHECK_OK(reader.finish("store request"));
  return request;
}

Result<std::vector<std::byte>> encode_store_reply(const StoreReply& reply) {
  std::vector<std::byte> payload;
  Writer writer{VectorSink(payload)};
  writer.u64("id", reply.id);
  writer.u16("code", static_cast<std::uint16_t>(reply.code));
  writer.string("message", reply.message, kMaxMessageBytes);
  writer.u8("found", reply.found ? 1 : 0);
  writer.u64("revision", reply.revision);
  writer.string("value", reply.value, kMaxStoreValueBytes);
  if (reply.keys.size() > kMaxStoreKeys) writer.bad_value("number of keys", reply.keys.size());
  writer.u32("keys", static_cast<std::uint32_t>(reply.keys.size()));
  for (const std::string& key : reply.keys)
    writer.string("key", key, kMaxStoreKeyBytes);
  CROSSDOCK_CHECK_OK(writer.finish("store reply"));
  return make_frame(kStoreProtocol, static_cast<std::uint16_t>(StoreMessage::kReply), payload);
}

Result<StoreReply> decode_store_reply(Bytes payload) {
  Reader reader(payload);
  StoreReply reply;
  std::uint16_t code = 0;
  std::uint8_t found = 0;
  reader.u64("id", reply.id);
  reader.u16("code", code);
  reader.string("message", reply.message, kMaxMessageBytes);
  reader.u8("found", found);
  reader.u64("revision", reply.revision);
  reader.string("value", reply.value, kMaxStoreValueBytes);
  reply.keys.resize(reader.count("keys", kMaxStoreKeys, sizeof(std::uint32_t)));
  for (std::string& key : reply.keys)
    reader.string("key", key, kMaxStoreKeyBytes);
  if (code > kLastCode) reader.bad_value("code", code);
  if (found > 1) reader.bad_value("found", found);
  reply.code = static_cast<Code>(code);
  reply.found = found == 1;
  CROSSDOCK_CHECK_OK(reader.finish("store reply"));
  return reply;
}

Result<StoreRequest> decode_store_request(const Frame& frame) {
  CROSSDOCK_TRY(checked, require(frame, StoreMessage::kRequest));
  return decode_store_request(checked.payload);
}

Result<StoreReply> decode_store_reply(const Frame& frame) {
  CROSSDOCK_TRY(checked, require(frame, StoreMessage::kReply));
  return decode_store_reply(checked.payload);
}

Result<std::vector<std::byte>> encode_store_record(const StoreRecord& record) {
  std::vector<std::byte> out;
  Writer writer{VectorSink(out)};
  writer.u32("magic", kRecordMagic);
  writer.u64("revision", record.revision);
  writer.u64("expiry", record.expires_unix_ms);
  writer.string("key", record.key, kMaxStoreKeyBytes);
  writer.string("value", record.value, kMaxStoreValueBytes);
  writer.u64("checksum", xxh3_64(out));
  CROSSDOCK_CHECK_OK(writer.finish("store record"));
  return out;
}

Result<StoreRecord> decode_store_record(Bytes file) {
  Reader reader(file);
  StoreRecord record;
  std::uint32_t magic = 0;
  std::uint64_t checksum = 0;
  reader.u32("magic", magic);
  reader.u64("revision", record.revision);
  reader.u64("expiry", record.expires_unix_ms);
  reader.string("key", record.key, kMaxStoreKeyBytes);
  reader.string("value", record.value, kMaxStoreValueBytes);
  reader.u64("checksum", checksum);
  if (magic != kRecordMagic) reader.bad_value("magic", magic);
  if (!reader.failed() && checksum != xxh3_64(file.first(file.size() - reader.remaining() - 8)))
    reader.bad_value("checksum", checksum);
  CROSSDOCK_CHECK_OK(reader.finish("store record"));
  return record;
}

Result<std::string> encode_gather_part(const GatherPart& part) {
  std::vector<std::byte> out;
  Writer writer{VectorSink(out)};
  writer.u32("rank", part.rank);
  writer.u32("world", part.world);
  writer.string("bytes", part.bytes, kMaxStoreValueBytes - 12);
  CROSSDOCK_CHECK_OK(writer.finish("contribution to an all-gather"));
  return std::string(as_text(out));
}

Result<GatherPart> decode_gather_part(std::string_view value) {
  Reader reader(as_bytes(value));
  GatherPart part;
  reader.u32("rank", part.rank);
  reader.u32("world", part.world);
  reader.string("bytes", part.bytes, kMaxStoreValueBytes - 12);
  CROSSDOCK_CHECK_OK(reader.finish("contribution to an all-gather"));
  return part;
}

std::string percent_encode(std::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (is_unreserved(c)) {
      out += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    out += '%';
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

Result<std::string> percent_decode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const int high = i + 1 < text.size() ? hex_value(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? hex_value(text[i + 2]) : -1;
    if (high < 0 || low < 0)
      return invalid_argument(
          fmt::format("'%' at offset {} is not followed by two hexadecimal "
                      "digits",
                      i));
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

}  // namespace crossdock::wire
