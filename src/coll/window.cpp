// Rules and layout. See window.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/window.hpp"

#include <fmt/format.h>

namespace crossdock::coll {
namespace {

constexpr u64 kMostBytes = u64{1} << 36;  // what a tag can say
constexpr u32 kMostGathers = 32;
constexpr u32 kMostInflight = 64;
constexpr u32 kLargestRow = 12 << 10;  // two of two warps in shared memory

Result<> check_transfers(const Options& o) {
  if (o.session_bytes >= kMostBytes || o.tensor_bytes >= kMostBytes)
    return invalid_argument(
        fmt::format("coll: session_bytes = {} and tensor_bytes = {} must be below {}",
                    o.session_bytes, o.tensor_bytes, kMostBytes));
  if (o.gathers == 0 || o.gathers > kMostGathers)
    return invalid_argument(
        fmt::format("coll: gathers = {} must be 1 to {}", o.gathers, kMostGathers));
  if (o.inflight == 0 || o.inflight > kMostInflight)
    return invalid_argument(
        fmt::format("coll: inflight = {} must be 1 to {}", o.inflight, kMostInflight));
  return {};
}

Result<> check_table(const Options& o) {
  if (o.shard_rows == 0) return {};
  if (o.row_bytes == 0 || o.row_bytes % 16 != 0 || o.row_bytes > kLargestRow)
    return invalid_argument(
        fmt::format("coll: row_bytes = {} must be a multiple of 16, at most {}: pad the rows, or "
                    "make a row of the table out of several",
                    o.row_bytes, kLargestRow));
  if (o.fetch_sms == 0) return invalid_argument("coll: fetch_sms = 0 must be at least 1");
  if (o.shard_rows > (u64{1} << 40) / o.row_bytes)
    return invalid_argument(fmt::format(
        "coll: {} rows of {} bytes on each rank are more than 1 TiB", o.shard_rows, o.row_bytes));
  return {};
}

// A part of what add() gave, for ranks to compare.
void name_part(device::SymmetricLayout& layout, const device::SymmetricArea& part) {
  if (layout.count == device::SymmetricLayout::kMaxAreas) {
    layout.overflow = true;
  } else {
    layout.areas[layout.count++] = part;
  }
}

}  // namespace

Result<Window> make_window(const Options& o, u32 world) {
  if (world == 0 || world > 1024)
    return invalid_argument(fmt::format("coll: world = {} must be 1 to 1024 ranks", world));
  if (o.wait <= std::chrono::nanoseconds::zero())
    return invalid_argument("coll: wait must be longer than 0");
  CROSSDOCK_CHECK_OK(check_transfers(o));
  CROSSDOCK_CHECK_OK(check_table(o));
  Window w;
  w.world = world;
  w.gathers = o.gathers;
  w.inflight = o.inflight;
  w.pipeline = o.pipeline;
  w.channels = o.pipeline == Pipeline::kAll ? world : 2;
  w.slot_bytes = device::round_up<u64>(o.tensor_bytes, 128);
  device::SymmetricLayout& l = w.layout;
  w.failed = l.add("coll.failed", 8);
  w.free = l.add("coll.free", u64{world} * 8);
  w.posted = l.add("coll.posted", u64{world} * o.gathers * 8);
  w.seen = l.add("coll.seen", u64{world} * 8);
  w.here = l.add("coll.here", u64{world} * 8);
  w.credit = l.add("coll.credit", u64{world} * o.inflight * 8);
  w.arrived = l.add("coll.arrived", u64{world} * o.inflight * 8);
  w.control_bytes = l.bytes;
  w.inputs = l.add("coll.inputs", o.session_bytes);
  // What options mean for other ranks has to show in the areas, which ranks compare; sizes alone do
  // not tell two wide rows from four narrow ones, nor the channels of a world of 2.
  const bool any_rank = o.tensor_bytes > 0 && o.pipeline == Pipeline::kAll;
  w.slots = l.add(any_rank ? "coll.slots for any rank" : "coll.slots for neighbours",
                  u64{w.channels} * o.inflight * w.slot_bytes);
  w.table = l.add("coll.table", o.shard_rows * o.row_bytes);
  if (o.shard_rows > 0) name_part(l, {"coll.table row", w.table, o.row_bytes});
  return w;
}

inline namespace v1 {

Result<Sizes> sizes(const Options& o, std::uint32_t world) {
  CROSSDOCK_TRY(w, make_window(o, world));
  return Sizes{.control_bytes = w.control_bytes,
               .session_bytes = o.session_bytes,
               .pipeline_bytes = u64{w.channels} * o.inflight * w.slot_bytes,
               .table_bytes = o.shard_rows * o.row_bytes,
               .window_bytes = w.layout.bytes,
               .local_bytes = (o.reduce ? o.session_bytes : 0) + o.row_bytes};
}

}  // namespace v1
}  // namespace crossdock::coll
