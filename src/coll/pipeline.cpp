// Tensors from rank to rank. A tensor waits in a slot of the sender's own window, from where the
// receiver pulls it:
//
//   rank a: send, slot s = number of the call % inflight     rank b: receive, the same slot
//     credit[b][s] == 1, = 0                             <-
//     tensor -> slot s
//     arrived[a][s] of b = tag                           ->    arrived[a][s] == tag, = 0
//                                                              copy engine: slot s of a -> tensor
//                                                              failed == 0
//                                                        <-    credit[b][s] of a = 1
//
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "coll/core.hpp"
#include "symm/pointers.hpp"

namespace crossdock::coll {

Result<> Core::check_tensor(const RankState& state, u32 peer, const char* call, const void* tensor,
                            u64 bytes) const {
  const u32 world = window_.world;
  const u32 self = state.rank;
  if (options_.tensor_bytes == 0)
    return invalid_argument(
        fmt::format("coll {}: the group was made without tensor_bytes, which tensors need", call));
  if (peer >= world || peer == self)
    return invalid_argument(
        fmt::format("coll {}: rank {} with rank {}: it must be another of the "
                    "{} ranks",
                    call, self, peer, world));
  const bool neighbour = peer == (self + 1) % world || self == (peer + 1) % world;
  if (options_.pipeline == Pipeline::kNeighbours && !neighbour)
    return invalid_argument(
        fmt::format("coll {}: rank {} with rank {} of {}: the group was made for tensors between "
                    "neighbours: Options::pipeline = Pipeline::kAll",
                    call, self, peer, world));
  if (bytes == 0 || bytes % 16 != 0 || bytes > options_.tensor_bytes)
    return invalid_argument(
        fmt::format("coll {}: a tensor of {} bytes must be a positive multiple of 16, at most "
                    "tensor_bytes = {}",
                    call, bytes, options_.tensor_bytes));
  if (tensor == nullptr) return invalid_argument(fmt::format("coll {}: the tensor is null", call));
  return symm::check_copied(rank_of(state), {"coll", call, tensor, "values of the tensor"});
}

Result<> Core::send(u32 r, u32 to, const void* tensor, u64 bytes, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r, "send"));
  CROSSDOCK_CHECK_OK(check_tensor(*state, to, "send", tensor, bytes));
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  const NoteAtEnd noted(state->given, lane);
  const symm::Rank& rank = rank_of(*state);
  const auto slot = static_cast<u32>(state->sent[to]++ % window_.inflight);
  const Awaited credit{.what = What::kCredit, .index = slot, .peer = to};
  CROSSDOCK_CHECK_OK(follow(*state, send_site(to), lane));
  CROSSDOCK_CHECK_OK(lane.words(steps(*state).await(send_site(to), credit).take()));
  CROSSDOCK_CHECK_OK(lane.copy(rank.at<u8>(window_.slot_at(r, to, slot)), tensor, bytes));
  u64* const word = rank.at<u64>(window_.arrived_at(r, slot), to);
  CROSSDOCK_CHECK_OK(lane.words(steps(*state).say(word, tag(Said::kTensor, 0, bytes)).take()));
  return note(*state, send_site(to), lane);
}

Result<> Core::receive(u32 r, u32 from, void* tensor, u64 bytes, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r, "receive"));
  CROSSDOCK_CHECK_OK(check_tensor(*state, from, "receive", tensor, bytes));
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  const NoteAtEnd noted(state->given, lane);
  const symm::Rank& rank = rank_of(*state);
  const auto slot = static_cast<u32>(state->received[from]++ % window_.inflight);
  const u32 site = receive_site(from);
  const Awaited arrived{
      .what = What::kArrived, .index = slot, .peer = from, .value = tag(Said::kTensor, 0, bytes)};
  CROSSDOCK_CHECK_OK(follow(*state, site, lane));
  CROSSDOCK_CHECK_OK(lane.words(steps(*state).await(site, arrived).take()));
  CROSSDOCK_CHECK_OK(lane.copy(tensor, rank.at<u8>(window_.slot_at(from, r, slot), from), bytes));
  u64* const credit = rank.at<u64>(window_.credit_at(r, slot), from);
  CROSSDOCK_CHECK_OK(
      lane.words(steps(*state).await(site, {.what = What::kFailed}).say(credit, 1).take()));
  return note(*state, site, lane);
}

}  // namespace crossdock::coll
