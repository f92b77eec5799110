// Gathers and scatters. Every rank pulls, so that bytes go straight from the peer's window to where
// the caller wants them:
//
//   rank r                                                peers
//     begin:   free[p] == 1 for all p, = 0           <-     have read the inputs of the last
//     session gather:  input -> window (unless it is there)
//              posted[g][r] = tag                    ->     of every peer
//              posted[g][p] == tag for all p, = 0    <-
//              copy engine: input of p -> output[p]
//              failed == 0                           <-     nobody has given up before it was read
//     end:     free[r] = 1                           ->     of every peer
//
// A word is set by one rank and cleared by the other, in turns, so it needs no epoch: a captured
// graph says the same in every replay. A tag has the size and the place, and the wait is for that
// very value: ranks that do not agree are found out, at the deadline.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <optional>
#include <utility>

#include "coll/launch.hpp"
#include "symm/pointers.hpp"

namespace crossdock::coll {
namespace {

// Enough to keep up with the memory of a GPU; a block takes 8 KiB at a time.
constexpr u32 kMostAddBlocks = 132;

u64 size_of(DataType type) {
  return type == DataType::kBf16 ? 2 : 4;
}

Result<> check_part(const char* call, const void* input, const void* output, u64 bytes) {
  if (bytes == 0 || bytes % 16 != 0)
    return invalid_argument(fmt::format(
        "coll {}: {} bytes of a rank must be a positive multiple of 16: pad it", call, bytes));
  if (input == nullptr || output == nullptr)
    return invalid_argument(
        fmt::format("coll {}: {} is null", call, input == nullptr ? "input" : "output"));
  return {};
}

}  // namespace

Result<Session> Core::begin(u32 r, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r, "begin"));
  if (options_.session_bytes == 0)
    return invalid_argument(
        "coll begin: the group was made without session_bytes, which sessions need");
  if (state->in_session)
    return Error{.code = Code::kBusy,
                 .retry = Retry::kLater,
                 .message = fmt::format("coll begin: rank {} has a session that has not ended: "
                                        "end() it first",
                                        r)};
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  std::optional<NoteAtEnd> noted(std::in_place, state->given, lane);
  CROSSDOCK_CHECK_OK(follow(*state, kGatherSite, lane));
  CROSSDOCK_CHECK_OK(lane.words(steps(*state).await(kGatherSite, {.what = What::kFree}).take()));
  noted.reset();  // before the lane goes into the session
  state->in_session = true;
  return Session(std::make_unique<Session::State>(Session::State{.core = shared_from_this(),
                                                                 .rank = state,
                                                                 .lane = std::move(lane),
                                                                 .generation = generation_}));
}

Result<> Core::refuse_session(const Session::State& s, const char* call) const {
  if (s.ended || s.generation != generation_)
    return make_error(Code::kClosed,
                      fmt::format("coll {}: the session of rank {} has ended{}", call, s.rank->rank,
                                  s.ended ? "" : " with a reset of the group"));
  return check();
}

Result<void*> Core::input(Session::State& s, u64 bytes) {
  CROSSDOCK_CHECK_OK(refuse_session(s, "input"));
  const u64 room = options_.session_bytes - std::min<u64>(s.placed, options_.session_bytes);
  if (bytes == 0 || bytes > room)
    return invalid_argument(
        fmt::format("coll: an input of {} bytes in a session that has {} of session_bytes = {} "
                    "left: make the group with more, or end the session and begin another",
                    bytes, room, options_.session_bytes));
  u8* const at = rank_of(*s.rank).at<u8>(window_.inputs + s.placed);
  s.placed += device::round_up<u64>(bytes, 128);
  return static_cast<void*>(at);
}

Result<u64> Core::place(Session::State& s, const void* input_at, u64 bytes) {
  if (s.calls == options_.gathers)
    return invalid_argument(
        fmt::format("coll: a session has at most gathers = {} calls: make the group with more, or "
                    "end the session and begin another",
                    options_.gathers));
  const u8* const inputs = rank_of(*s.rank).at<u8>(window_.inputs);
  const auto* const given = static_cast<const u8*>(input_at);
  if (given < inputs || given >= inputs + options_.session_bytes) {
    CROSSDOCK_TRY(at, input(s, bytes));
    CROSSDOCK_CHECK_OK(s.lane.copy(at, input_at, bytes));
    return static_cast<u64>(static_cast<const u8*>(at) - inputs);
  }
  const auto offset = static_cast<u64>(given - inputs);
  if (offset % 128 != 0 || offset > s.placed || bytes > s.placed - offset)
    return invalid_argument(
        fmt::format("coll: an input at {} bytes of the window's inputs is none that input() gave "
                    "out, with room for {} bytes, in this session",
                    offset, bytes));
  return offset;
}

Result<> Core::all_gather(Session::State& s, const void* input_at, void* output, u64 bytes) {
  CROSSDOCK_CHECK_OK(refuse_session(s, "all_gather"));
  CROSSDOCK_CHECK_OK(check_part("all_gather", input_at, output, bytes));
  const symm::Rank& rank = rank_of(*s.rank);
  CROSSDOCK_CHECK_OK(symm::check_copied(rank, {"coll", "all_gather", input_at, "values to give"}));
  CROSSDOCK_CHECK_OK(symm::check_copied(rank, {"coll", "all_gather", output, "values gathered"}));
  const NoteAtEnd noted(s.rank->given, s.lane);
  CROSSDOCK_TRY(offset, place(s, input_at, bytes));
  const u32 self = rank.rank();
  const u32 call = s.calls++;
  const u64 said = tag(Said::kGather, offset, bytes);
  CROSSDOCK_CHECK_OK(
      s.lane.words(steps(*s.rank)
                       .tell_peers(window_.posted_at(call, self), said)
                       .await(kGatherSite, {.what = What::kPosted, .index = call, .value = said})
                       .take()));
  auto* const all = static_cast<u8*>(output);
  for (u32 i = 0; i < window_.world; ++i) {
    const u32 peer = (self + i) % window_.world;
    const u8* const from = rank.at<u8>(window_.inputs + offset, peer);
    CROSSDOCK_CHECK_OK(s.lane.copy(all + peer * bytes, from, bytes));
  }
  return s.lane.words(steps(*s.rank).await(kGatherSite, {.what = What::kFailed}).take());
}

Result<> Core::reduce_scatter(Session::State& s, const Scatter& c) {
  CROSSDOCK_CHECK_OK(refuse_session(s, "reduce_scatter"));
  const u64 most = options_.session_bytes / window_.world / size_of(c.type);
  if (c.count > most)
    return invalid_argument(
        fmt::format("coll reduce_scatter: {} values of {} bytes for each of {} ranks are more than "
                    "the {} that session_bytes = {} has room for: make the group with more",
                    c.count, size_of(c.type), window_.world, most, options_.session_bytes));
  const u64 bytes = c.count * size_of(c.type);
  CROSSDOCK_CHECK_OK(check_part("reduce_scatter", c.input, c.output, bytes));
  if (!options_.reduce)
    return invalid_argument("coll reduce_scatter: the group was made without Options::reduce");
  if (!kernels_)
    return make_error(Code::kUnsupported,
                      "coll reduce_scatter: sums take a kernel, and ranks of the CPU backend run "
                      "kernels only when all of them are in one process");
  if (reinterpret_cast<u64>(c.output) % 16 != 0)
    return invalid_argument(fmt::format(
        "coll reduce_scatter: output at {} must begin at a multiple of 16 bytes", c.output));
  const symm::Rank& rank = rank_of(*s.rank);
  CROSSDOCK_CHECK_OK(symm::check_copied(rank, {"coll", "reduce_scatter", c.input, "values"}));
  CROSSDOCK_CHECK_OK(symm::check_pointer(rank, {"coll", "reduce_scatter", c.output, "sums"}));
  const NoteAtEnd noted(s.rank->given, s.lane);
  CROSSDOCK_TRY(offset, place(s, c.input, bytes * window_.world));
  const u32 self = rank.rank();
  const u32 call = s.calls++;
  const u64 said = tag(Said::kScatter, offset, bytes);
  CROSSDOCK_CHECK_OK(
      s.lane.words(steps(*s.rank)
                       .tell_peers(window_.posted_at(call, self), said)
                       .await(kGatherSite, {.what = What::kPosted, .index = call, .value = said})
                       .take()));
  auto* const parts = s.rank->parts.as<u8>();
  const u64 mine = window_.inputs + offset + self * bytes;
  for (u32 i = 1; i < window_.world; ++i) {
    const u32 peer = (self + i) % window_.world;
    CROSSDOCK_CHECK_OK(s.lane.copy(parts + peer * bytes, rank.at<u8>(mine, peer), bytes));
  }
  CROSSDOCK_CHECK_OK(
      s.lane.words(steps(*s.rank).await(kGatherSite, {.what = What::kFailed}).take()));
  const device::AddPartsParams p{.common = rank.common(device::KernelId::kAddParts, options_.wait),
                                 .parts = parts,
                                 .own = rank.at<u8>(mine),
                                 .output = static_cast<u8*>(c.output),
                                 .pitch = bytes,
                                 .vectors = bytes / 16,
                                 .world = window_.world};
  const u64 blocks = device::ceil_div<u64>(p.vectors, 512);
  return launch(*s.rank, s.lane,
                c.type == DataType::kBf16 ? *kernels_->add_bf16 : *kernels_->add_f32,
                {.grid = static_cast<u32>(std::min<u64>(blocks, kMostAddBlocks))}, p);
}

Result<> Core::end(Session::State& s) {
  if (s.ended) return {};
  s.ended = true;
  if (s.generation != generation_) return {};
  s.rank->in_session = false;
  const NoteAtEnd noted(s.rank->given, s.lane);
  CROSSDOCK_CHECK_OK(
      s.lane.words(steps(*s.rank).tell_peers(window_.free + u64{s.rank->rank} * 8, 1).take()));
  return note(*s.rank, kGatherSite, s.lane);
}

}  // namespace crossdock::coll
