// One function describes each message for both directions. See message.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/message.hpp"

#include <type_traits>

namespace crossdock::symm::message {
namespace {

using wire::Reader;
using wire::Writer;

constexpr std::uint32_t kMagic = 0x4d595358;  // "XSYM"
enum class Kind : std::uint8_t {
  kProposal = 1,
  kOutcome = 2,
  kWindows = 3,
  kAttendee = 4,
  kRoster = 5
};

// The value as a Reader fills it or a Writer reads it.
template <class Codec, class T>
using Field = std::conditional_t<Codec::kReads, T&, const T&>;

template <class Codec>
void text(Codec& c, const char* field, Field<Codec, std::string> value) {
  if constexpr (Codec::kReads) {
    c.string(field, value, kLongestText);
  } else {
    c.string(field, std::string_view(value).substr(0, kLongestText), kLongestText);
  }
}

template <class Codec>
void failure(Codec& c, Field<Codec, std::optional<Failure>> value) {
  std::uint8_t present = value.has_value() ? 1 : 0;
  c.u8("failed", present);
  if (present > 1) c.bad_value("failed", present, 1);
  if (present != 1) return;
  if constexpr (Codec::kReads) value.emplace();
  c.u16("code", value->code);
  c.u32("failed rank", value->rank);
  text<Codec>(c, "reason", value->text);
}

template <class Codec>
void envelope(Codec& c, Kind kind) {
  std::uint32_t magic = kMagic;
  auto tag = static_cast<std::uint8_t>(kind);
  c.u32("magic", magic);
  if (magic != kMagic) c.bad_value("magic", magic, kMagic);
  c.u8("kind", tag);
  if (tag != static_cast<std::uint8_t>(kind))
    c.bad_value("kind", tag, static_cast<std::uint8_t>(kind));
}

template <class Codec>
void fields(Codec& c, Field<Codec, Proposal> p) {
  envelope(c, Kind::kProposal);
  c.u16("protocol", p.protocol);
  text<Codec>(c, "library version", p.library);
  c.u32("first rank", p.first_rank);
  if (p.protocol != kProtocol) return;
  c.u32("world", p.world);
  c.u8("backend", p.backend);
  c.u64("window bytes", p.window_bytes);
  c.list("areas", p.areas, kMostAreas, [&](Field<Codec, Area> area) {
    text<Codec>(c, "area", area.name);
    c.u64("offset", area.offset);
    c.u64("bytes", area.bytes);
  });
  c.list("ranks", p.ranks, kMostRanks, [&](Field<Codec, ProposedRank> rank) {
    c.u32("rank", rank.rank);
    text<Codec>(c, "device", rank.device);
    text<Codec>(c, "model", rank.model);
    c.u32("sm", rank.sm);
  });
  text<Codec>(c, "host", p.host);
  text<Codec>(c, "socket", p.socket);
  c.u8("fabric", p.fabric);
  c.u8("share gpus", p.share_gpus);
  c.u8("elastic", p.elastic);
  c.u64("generation", p.generation);
  c.u64("token", p.token);
  failure<Codec>(c, p.failure);
}

template <class Codec>
void fields(Codec& c, Field<Codec, Outcome> o) {
  envelope(c, Kind::kOutcome);
  c.u64("agreement", o.agreement);
  c.u32("step", o.step);
  c.u64("allocated bytes", o.allocated_bytes);
  c.list("windows", o.windows, kMostRanks, [&](Field<Codec, SharedWindow> window) {
    c.u32("rank", window.rank);
    c.string("fabric handle", window.fabric, kFabricBytes);
  });
  failure<Codec>(c, o.failure);
}

template <class Codec>
void members(Codec& c, Field<Codec, Attendee> a) {
  c.u64("token", a.token);
  c.list("ranks", a.ranks, kMostRanks,
         [&](Field<Codec, RosterRank> rank) { c.u32("rank", rank.rank); });
  if (a.ranks.empty()) c.bad_value("ranks of a process", 0, kMostRanks);
}

template <class Codec>
void fields(Codec& c, Field<Codec, Attendee> a) {
  envelope(c, Kind::kAttendee);
  members<Codec>(c, a);
}

template <class Codec>
void fields(Codec& c, Field<Codec, Roster> r) {
  envelope(c, Kind::kRoster);
  c.u64("generation", r.generation);
  c.u32("world", r.world);
  c.list("attendees", r.attendees, kMostRanks,
         [&](Field<Codec, Attendee> attendee) { members<Codec>(c, attendee); });
  if (r.attendees.empty()) c.bad_value("processes of a roster", 0, kMostRanks);
}

// Ranks of Windows are bare numbers; the codec's lists hold structs.
struct WindowRank {
  static constexpr std::size_t kMinEncodedBytes = 4;
  std::uint32_t rank = 0;
};

template <class Message>
Result<std::string> encode_as(const Message& message, const char* what) {
  std::vector<std::byte> out;
  Writer writer{wire::VectorSink(out)};
  fields<Writer>(writer, message);
  CROSSDOCK_CHECK_OK(writer.finish(what));
  return std::string(wire::as_text(out));
}
template <class Message>
Result<Message> decode_as(std::string_view bytes, const char* what) {
  Reader reader(wire::as_bytes(bytes));
  Message message;
  fields<Reader>(reader, message);
  CROSSDOCK_CHECK_OK(reader.finish(what));
  return message;
}

}  // namespace

Result<std::string> encode(const Proposal& proposal) {
  return encode_as(proposal, "proposal of a symmetric group");
}

Result<std::string> encode(const Outcome& outcome) {
  return encode_as(outcome, "outcome of a step of a symmetric group");
}

Result<std::string> encode(const Windows& windows) {
  std::vector<std::byte> out;
  Writer writer{wire::VectorSink(out)};
  envelope(writer, Kind::kWindows);
  writer.u64("agreement", windows.agreement);
  writer.u32("member", windows.member);
  std::vector<WindowRank> ranks;
  ranks.reserve(windows.ranks.size());
  for (const std::uint32_t rank : windows.ranks)
    ranks.push_back({rank});
  writer.list("ranks", ranks, kMostRanks, [&](const WindowRank& r) { writer.u32("rank", r.rank); });
  CROSSDOCK_CHECK_OK(writer.finish("windows of a symmetric group"));
  return std::string(wire::as_text(out));
}

Result<std::string> encode(const Attendee& attendee) {
  return encode_as(attendee, "process at the meeting of a symmetric group");
}

Result<std::string> encode(const Roster& roster) {
  return encode_as(roster, "roster of a symmetric group");
}

Result<Attendee> decode_attendee(std::string_view bytes) {
  return decode_as<Attendee>(bytes, "process at the meeting of a symmetric group");
}

Result<Roster> decode_roster(std::string_view bytes) {
  return decode_as<Roster>(bytes, "roster of a symmetric group");
}

Result<Proposal> decode_proposal(std::string_view bytes) {
  Reader reader(wire::as_bytes(bytes));
  Proposal proposal;
  fields<Reader>(reader, proposal);
  // What another protocol has after the fields that all have is its own business.
  if (!reader.failed() && proposal.protocol != kProtocol) return proposal;
  CROSSDOCK_CHECK_OK(reader.finish("proposal of a symmetric group"));
  return proposal;
}

Result<Outcome> decode_outcome(std::string_view bytes) {
  return decode_as<Outcome>(bytes, "outcome of a step of a symmetric group");
}

Result<Windows> decode_windows(std::string_view bytes) {
  Reader reader(wire::as_bytes(bytes));
  Windows windows;
  envelope(reader, Kind::kWindows);
  reader.u64("agreement", windows.agreement);
  reader.u32("member", windows.member);
  std::vector<WindowRank> ranks;
  reader.list("ranks", ranks, kMostRanks, [&](WindowRank& r) { reader.u32("rank", r.rank); });
  CROSSDOCK_CHECK_OK(reader.finish("windows of a symmetric group"));
  for (const WindowRank& r : ranks)
    windows.ranks.push_back(r.rank);
  return windows;
}

}  // namespace crossdock::symm::message
