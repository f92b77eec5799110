// The table of rows, and the barrier of streams that its writing needs:
//
//   rank r                                  peers
//     seen[p] == 1 for all p, = 0      <-     are past the barrier before
//     here[r] = 1                      ->     of every peer
//     here[p] == 1 for all p, = 0      <-
//     seen[r] = 1                      ->     of every peer
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "coll/launch.hpp"
#include "symm/pointers.hpp"

namespace crossdock::coll {
namespace {

Error no_table(const char* call) {
  return invalid_argument(
      fmt::format("coll {}: the group was made without shard_rows, which a table needs", call));
}

}  // namespace

Result<> Core::barrier(u32 r, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r, "barrier"));
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  const NoteAtEnd noted(state->given, lane);
  const u64 own = u64{r} * 8;
  CROSSDOCK_CHECK_OK(follow(*state, kBarrierSite, lane));
  CROSSDOCK_CHECK_OK(lane.words(steps(*state)
                                    .await(kBarrierSite, {.what = What::kSeen})
                                    .tell_peers(window_.here + own, 1)
                                    .await(kBarrierSite, {.what = What::kHere})
                                    .tell_peers(window_.seen + own, 1)
                                    .take()));
  return note(*state, kBarrierSite, lane);
}

Result<std::span<std::byte>> Core::shard(u32 r) {
  if (options_.shard_rows == 0) return no_table("shard");
  CROSSDOCK_TRY(state, find(r, "shard"));
  return std::span<std::byte>(rank_of(*state).at<std::byte>(window_.table),
                              options_.shard_rows * options_.row_bytes);
}

Result<> Core::write_rows(u32 r, const Rows& rows, StreamPtr stream) {
  if (options_.shard_rows == 0) return no_table("write_rows");
  CROSSDOCK_TRY(state, find(r, "write_rows"));
  if (rows.first > options_.shard_rows || rows.count > options_.shard_rows - rows.first)
    return invalid_argument(fmt::format("coll write_rows: rows {} to {} of the {} that rank {} has",
                                        rows.first, rows.first + rows.count, options_.shard_rows,
                                        r));
  if (rows.rows == nullptr && rows.count > 0)
    return invalid_argument("coll write_rows: the rows are null");
  if (rows.count > 0)
    CROSSDOCK_CHECK_OK(
        symm::check_copied(rank_of(*state), {"coll", "write_rows", rows.rows, "rows"}));
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  const NoteAtEnd noted(state->given, lane);
  CROSSDOCK_CHECK_OK(barrier(r, stream));
  const u64 row_bytes = options_.row_bytes;
  u8* const to = rank_of(*state).at<u8>(window_.table + rows.first * row_bytes);
  CROSSDOCK_CHECK_OK(lane.copy(to, rows.rows, rows.count * row_bytes));
  return barrier(r, stream);
}

Result<> Core::fetch_rows(u32 r, const Fetch& f, StreamPtr stream) {
  if (options_.shard_rows == 0) return no_table("fetch_rows");
  CROSSDOCK_TRY(state, find(r, "fetch_rows"));
  if (!kernels_)
    return make_error(Code::kUnsupported,
                      "coll fetch_rows: rows are fetched by a kernel, and ranks of the CPU backend "
                      "run kernels only when all of them are in one process");
  if (f.count == 0) return {};
  if (f.numbers == nullptr || f.output == nullptr)
    return invalid_argument(fmt::format("coll fetch_rows: {} is null",
                                        f.numbers == nullptr ? "the list of rows" : "output"));
  if (reinterpret_cast<u64>(f.output) % 16 != 0)
    return invalid_argument("coll fetch_rows: output must begin at a multiple of 16 bytes");
  const u32 number_bytes = options_.wide_indices ? 8 : 4;
  if (reinterpret_cast<u64>(f.numbers) % number_bytes != 0)
    return invalid_argument(fmt::format(
        "coll fetch_rows: the list of rows at {} must begin at a multiple of {} bytes, the size of "
        "its numbers",
        f.numbers, number_bytes));
  const symm::Rank& rank = rank_of(*state);
  CROSSDOCK_CHECK_OK(symm::check_pointer(rank, {"coll", "fetch_rows", f.numbers, "row numbers"}));
  CROSSDOCK_CHECK_OK(symm::check_pointer(rank, {"coll", "fetch_rows", f.output, "output rows"}));
  CROSSDOCK_TRY(lane, lane_of(*state, stream));
  const NoteAtEnd noted(state->given, lane);
  const device::FetchRowsParams p{
      .common = rank.common(device::KernelId::kFetchRows, options_.wait),
      .view = rank.view(),
      .table = window_.table,
      .indices = f.numbers,
      .zeros = state->zeros.as<u8>(),
      .output = static_cast<u8*>(f.output),
      .output_stride = options_.row_bytes,
      .shard_rows = options_.shard_rows,
      .rows = f.count,
      .row_bytes = options_.row_bytes};
  const u32 needed = device::ceil_div(f.count, kernels_->fetch_warps);
  return launch(*state, lane, *kernels_->fetch, {.grid = std::min(needed, options_.fetch_sms)}, p);
}

}  // namespace crossdock::coll
