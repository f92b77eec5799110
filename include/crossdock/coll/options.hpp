// What a group of collectives is made for, and the memory it takes. Plain values,
// thread-compatible. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::coll {
inline namespace v1 {

enum class DataType : std::uint8_t { kBf16 = 0, kF32 = 1 };

// Which ranks a rank sends tensors to and receives them from.
enum class Pipeline : std::uint8_t {
  kNeighbours,  // the previous and the next rank; the ring is closed
  kAll,         // any other rank
};

// The same on every rank of the group.
struct Options {
  // Gathers and scatters: bytes of the inputs of one session of a rank, each rounded up to 128; and
  // how many of them a session may have, 1 to 32. 0 bytes: there are none.
  std::uint64_t session_bytes = 0;
  std::uint32_t gathers = 8;
  bool reduce = false;  // reduce_scatter will be called: takes session_bytes of memory more

  // Tensors from rank to rank: bytes of the largest, 0: there are none; and how many of one rank
  // may be on their way to another without having been received, 1 to 64.
  std::uint64_t tensor_bytes = 0;
  std::uint32_t inflight = 2;
  Pipeline pipeline = Pipeline::kNeighbours;

  // A table of world * shard_rows rows, of which each rank has as many. 0: there is none.
  std::uint64_t shard_rows = 0;
  std::uint32_t row_bytes = 0;  // a multiple of 16, at most 12 KiB
  bool wide_indices = false;    // row numbers of 64 bits; else of 32
  std::uint32_t fetch_sms = 16;

  // The longest a stream waits for a peer before the call has failed, naming it.
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Memory of one rank, in bytes.
struct Sizes {
  std::uint64_t control_bytes = 0;
  std::uint64_t session_bytes = 0;
  std::uint64_t pipeline_bytes = 0;  // inflight tensors for each rank that is sent to
  std::uint64_t table_bytes = 0;
  std::uint64_t window_bytes = 0;  // symmetric: all of these
  std::uint64_t local_bytes = 0;   // besides the window: the parts of a reduce_scatter
};

// kInvalidArgument with the rule, the value and the fix where options are wrong.
CROSSDOCK_API Result<Sizes> sizes(const Options& options, std::uint32_t world);

}  // namespace v1
}  // namespace crossdock::coll
