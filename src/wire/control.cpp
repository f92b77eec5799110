// One `fields` template a message describes it for both directions, so that encoder and decoder
// cannot drift apart. No state.
// SPDX-License-Identifier: Apache-2.0
#include "wire/control.hpp"

#include <type_traits>

namespace crossdock::wire {
namespace {

// Highest Code this version knows; a peer's unknown code is malformed, not undefined.
constexpr auto kLastCode = static_cast<std::uint16_t>(Code::kDenied);

template <class Archive, class Field>
void enumeration(Archive& ar, const char* field, Field& value, std::uint64_t last) {
  using Enum = std::remove_const_t<Field>;
  using Raw = std::underlying_type_t<Enum>;
  auto raw = static_cast<Raw>(value);
  if constexpr (sizeof(Raw) == 1)
    ar.u8(field, raw);
  else
    ar.u16(field, raw);
  if (raw > last) return ar.bad_value(field, raw, last);
  if constexpr (Archive::kReads) value = static_cast<Enum>(raw);
}

template <class Archive, class M>
void host_fields(Archive& ar, M& host) {
  ar.string("boot id", host.boot_id, kMaxBootIdBytes);
  ar.u64("pid namespace", host.pid_namespace);
  ar.u32("pid", host.pid);
  ar.u64("start time", host.start_time);
}

template <class Archive, class List>
void region_fields(Archive& ar, List& regions, std::uint32_t limit) {
  ar.list("regions", regions, limit, [&ar](auto& region) {
    ar.u32("region id", region.region_id);
    ar.u64("address", region.addr);
    ar.u64("length", region.length);
    ar.u8("access", region.access);
    ar.string("label", region.label, kMaxRegionLabelBytes);
    ar.list("keys", region.keys, kMaxRegionKeys, [&ar](auto& key) {
      ar.u8("transport index", key.transport);
      ar.string("key", key.blob, kMaxKeyBlobBytes);
    });
    // Later arithmetic on addr + length must not wrap, whatever a peer claims.
    if (!ar.failed() && region.length > UINT64_MAX - region.addr)
      ar.bad_value("length", region.length);
  });
}

void id_fields(Reader& ar, std::vector<std::uint32_t>& ids) {
  ids.resize(ar.count("region ids", kMaxRegionIds, sizeof(std::uint32_t)));
  for (std::uint32_t& id : ids)
    ar.u32("region id", id);
}

void id_fields(Writer& ar, const std::vector<std::uint32_t>& ids) {
  if (ids.size() > kMaxRegionIds) return ar.bad_value("number of region ids", ids.size());
  ar.u32("region ids", static_cast<std::uint32_t>(ids.size()));
  for (const std::uint32_t id : ids)
    ar.u32("region id", id);
}

template <class T, class M>
concept Is = std::is_same_v<std::remove_const_t<T>, M>;

template <class Archive, Is<Hello> M>
void fields(Archive& ar, M& m) {
  ar.string("engine name", m.engine_name, kMaxNameBytes);
  ar.u64("instance id", m.instance_id);
  ar.u64("features", m.features);
  ar.raw("nonce", m.nonce);
  enumeration(ar, "purpose", m.purpose, static_cast<std::uint8_t>(Purpose::kData));
  ar.u16("rail", m.rail);
  ar.u64("token", m.token);
  host_fields(ar, m.host);
}

template <class Archive, Is<Challenge> M>
void fields(Archive& ar, M& m) {
  ar.raw("nonce", m.nonce);
  ar.u64("instance id", m.instance_id);
}

template <class Archive, Is<AuthProof> M>
void fields(Archive& ar, M& m) {
  ar.raw("mac", m.mac);
}

template <class Archive, Is<Welcome> M>
void fields(Archive& ar, M& m) {
  ar.string("engine name", m.engine_name, kMaxNameBytes);
  ar.u64("instance id", m.instance_id);
  ar.u64("features", m.features);
  ar.u64("data token", m.data_token);
  host_fields(ar, m.host);
  ar.list("transports", m.transports, kMaxTransports, [&ar](auto& offer) {
    ar.string("transport name", offer.name, kMaxTransportNameBytes);
    ar.string("transport address", offer.address, kMaxAddressBlobBytes);
  });
}

template <class Archive, Is<Refused> M>
void fields(Archive& ar, M& m) {
  enumeration(ar, "code", m.code, kLastCode);
  // It becomes the code of an Error, which is never that of success.
  if (!ar.failed() && m.code == Code::kOk) ar.bad_value("code", 0);
  ar.string("message", m.message, kMaxReasonBytes);
}

template <class Archive, Is<SegmentPage> M>
void fields(Archive& ar, M& m) {
  ar.u64("version", m.version);
  ar.u32("first", m.first);
  ar.u32("total", m.total);
  region_fields(ar, m.regions, UINT32_MAX);
  if (!ar.failed() && (m.first > m.total || m.regions.size() > m.total - m.first))
    ar.bad_value("number of regions", m.first + std::uint64_t{m.regions.size()}, m.total);
}

template <class Archive, Is<RegionAdded> M>
void fields(Archive& ar, M& m) {
  ar.u64("version", m.version);
  region_fields(ar, m.regions, UINT32_MAX);
}

template <class Archive, Is<RegionsRemoved> M>
void fields(Archive& ar, M& m) {
  ar.u64("version", m.version);
  id_fields(ar, m.region_ids);
}

template <class Archive, Is<Revoke> M>
void fields(Archive& ar, M& m) {
  ar.u64("token", m.token);
  id_fields(ar, m.region_ids);
}

template <class Archive, Is<RevokeAck> M>
void fields(Archive& ar, M& m) {
  ar.u64("token", m.token);
}

template <class Archive, Is<Notify> M>
void fields(Archive& ar, M& m) {
  ar.u64("sequence", m.sequence);
  ar.u64("transfer id", m.transfer_id);
  ar.string("mailbox", m.mailbox, kMaxMailboxBytes);
  ar.string("payload", m.payload, kMaxNotifyBytes);
}

template <class Archive, Is<NotifyAck> M>
void fields(Archive& ar, M& m) {
  ar.u64("sequence", m.sequence);
  enumeration(ar, "code", m.code, kLastCode);
}

template <class Archive, Is<DigestRequest> M>
void fields(Archive& ar, M& m) {
  ar.u64("sequence", m.sequence);
  ar.list("ranges", m.ranges, kMaxDigestRanges, [&ar](auto& range) {
    ar.u64("address", range.addr);
    ar.u64("length", range.length);
    if (!ar.failed() && range.length > UINT64_MAX - range.addr)
      ar.bad_value("length", range.length);
  });
}

template <class Archive, Is<DigestReply> M>
void fields(Archive& ar, M& m) {
  ar.u64("sequence", m.sequence);
  enumeration(ar, "code", m.code, kLastCode);
  ar.u64("digest", m.digest);
  ar.string("message", m.message, kMaxReasonBytes);
}

template <class Archive, Is<Bye> M>
void fields(Archive& ar, M& m) {
  ar.string("reason", m.reason, kMaxReasonBytes);
}

template <class Archive, class M>
  requires(Is<M, Ping> || Is<M, Pong>)
void fields(Archive& ar, M& m) {
  ar.u64("value", m.value);
}

}  // namespace

std::string_view to_string(MessageType type) noexcept {
  switch (type) {
    case MessageType::kHello:
      return "Hello";
    case MessageType::kChallenge:
      return "Challenge";
    case MessageType::kAuthProof:
      return "AuthProof";
    case MessageType::kWelcome:
      return "Welcome";
    case MessageType::kRefused:
      return "Refused";
    case MessageType::kSegmentPage:
      return "SegmentPage";
    case MessageType::kRegionAdded:
      return "RegionAdded";
    case MessageType::kRegionsRemoved:
      return "RegionsRemoved";
    case MessageType::kRevoke:
      return "Revoke";
    case MessageType::kRevokeAck:
      return "RevokeAck";
    case MessageType::kNotify:
      return "Notify";
    case MessageType::kNotifyAck:
      return "NotifyAck";
    case MessageType::kPing:
      return "Ping";
    case MessageType::kPong:
      return "Pong";
    case MessageType::kBye:
      return "Bye";
    case MessageType::kDigestRequest:
      return "DigestRequest";
    case MessageType::kDigestReply:
      return "DigestReply";
  }
  return "unknown message";
}

template <class M>
Result<std::vector<std::byte>> encode(const M& message) {
  std::vector<std::byte> out;
  Writer writer{VectorSink(out)};
  fields(writer, message);
  CROSSDOCK_CHECK_OK(writer.finish(to_string(M::kType)));
  return out;
}

template <class M>
Result<M> decode(Bytes payload) {
  Reader reader(payload);
  M message;
  fields(reader, message);
  CROSSDOCK_CHECK_OK(reader.finish(to_string(M::kType)));
  return message;
}

#define CROSSDOCK_MESSAGE(M)                                   \
  template Result<std::vector<std::byte>> encode<M>(const M&); \
  template Result<M> decode<M>(Bytes)
CROSSDOCK_MESSAGE(Hello);
CROSSDOCK_MESSAGE(Challenge);
CROSSDOCK_MESSAGE(AuthProof);
CROSSDOCK_MESSAGE(Welcome);
CROSSDOCK_MESSAGE(Refused);
CROSSDOCK_MESSAGE(SegmentPage);
CROSSDOCK_MESSAGE(RegionAdded);
CROSSDOCK_MESSAGE(RegionsRemoved);
CROSSDOCK_MESSAGE(Revoke);
CROSSDOCK_MESSAGE(RevokeAck);
CROSSDOCK_MESSAGE(Notify);
CROSSDOCK_MESSAGE(NotifyAck);
CROSSDOCK_MESSAGE(DigestRequest);
CROSSDOCK_MESSAGE(DigestReply);
CROSSDOCK_MESSAGE(Ping);
CROSSDOCK_MESSAGE(Pong);
CROSSDOCK_MESSAGE(Bye);
#undef CROSSDOCK_MESSAGE

}  // namespace crossdock::wire
