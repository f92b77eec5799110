// Expert parallelism over NVLink: dispatch brings every token once to each rank that owns an expert
// it chose, straight into its final row; combine brings the experts' outputs back as one sum.
//
//   Group ── dispatch(rank, tokens) ──> Handle ── received()      rows, in order of (rank, token)
//         <── combine(handle, ...) ───         └─ expert_input()  where the experts put their rows
//
// A group has the ranks of one NVLink domain, one or several of them in this process. Calls put
// work on a stream and return; nothing waits for the GPU, nothing allocates, and all of it may be
// captured into a CUDA graph. Every rank makes the same calls in the same order, on one stream or
// on streams that it orders itself. A rank's Group and Handles are single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/ep/options.hpp>
#include <crossdock/symm/group_options.hpp>

namespace crossdock::ep {

class Core;

inline namespace v1 {

// A CUstream of the rank's GPU. Null: the rank's own stream. Ignored on the CPU.
using StreamPtr = void*;

// The tokens of one rank; memory of its GPU that stays as it is until the dispatch has run.
struct Tokens {
  std::uint32_t count = 0;         // at most max_tokens; may be 0, and differ between ranks
  const void* rows = nullptr;      // 16-byte aligned; bf16 with `cast`, else bytes
  std::uint32_t row_bytes = 0;     // a multiple of 16; the same on all ranks
  std::uint64_t row_stride = 0;    // bytes; 0: row_bytes
  const void* scales = nullptr;    // go along with the rows, not with `cast`
  std::uint32_t scale_bytes = 0;   // of a row, a multiple of 4; the same on all ranks
  std::uint64_t scale_stride = 0;  // bytes; 0: scale_bytes
  bool cast = false;               // bf16 to e4m3 with one fp32 scale for 128 values
  bool scales_by_column = false;   // delivered as [words of a row][rows], for tensor maps
  const void* ids = nullptr;       // [count][top_k], i32 or i64 by Options::wide_ids; -1: masked
  const float* weights = nullptr;  // [count][top_k]; null: none are delivered
};

// What a dispatch delivers, in memory of the rank's GPU; there when the dispatch has run. Rows are
// in the order of their source rank, and of the tokens of one rank.
struct Received {
  void* rows = nullptr;
  std::uint32_t row_bytes = 0;      // rows are dense
  std::uint32_t capacity = 0;       // rows there is room for
  void* scales = nullptr;           // null: none
  std::uint32_t scale_bytes = 0;    // by row: the stride of a row
  std::uint32_t scale_columns = 0;  // by column: the stride of a word, in words; 0: by row
  std::int32_t* ids = nullptr;      // [row][top_k]: expert of this rank, counted from its first; -1
  float* weights = nullptr;         // [row][top_k]
  std::uint32_t* tokens = nullptr;  // [row]: the token's number at its rank
  const std::uint32_t* source_ends = nullptr;    // [world]: where the rows of each rank end
  const std::uint32_t* expert_counts = nullptr;  // [experts of this rank]: choices, not padded
};

// Where the experts put their output: row i belongs to the received row i.
struct ExpertInput {
  void* rows = nullptr;      // bf16, hidden values each, dense
  float* weights = nullptr;  // [row][top_k], for Combined::weights
};

// The routing and the memory of one dispatch. Dropping it gives its slot back to later dispatches
// of the rank, in the order of its calls.
class CROSSDOCK_API Handle {
 public:
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  ~Handle();

  [[nodiscard]] std::uint32_t rank() const noexcept;
  [[nodiscard]] const Received& received() const noexcept;
  [[nodiscard]] const ExpertInput& expert_input() const noexcept;
  // How many rows arrive. Known long before they are there, so outputs of the exact size can be
  // made while they travel. Polls memory; not for captured calls, whose launches come later.
  Result<std::uint32_t> rows(Deadline deadline) const;
  // Choices of each expert of this rank, when all rows are there. As rows().
  Result<std::vector<std::uint32_t>> expert_counts(Deadline deadline) const;

 private:
  friend class Group;
  friend class ep::Core;
  struct State;
  explicit Handle(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Received rows by expert: a place for every choice of an expert of this rank, expert by expert,
// each beginning at a multiple of Options::expert_alignment. Nothing is copied: places name rows.
struct Grouped {
  const std::uint32_t* offsets = nullptr;    // [experts of the rank + 1], padded
  const std::int32_t* rows = nullptr;        // [place]: a received row, in order; -1: padding
  const std::uint32_t* positions = nullptr;  // [row][top_k]: the place of a choice of this rank
  std::uint64_t places = 0;                  // the most there can be
};

// What combine makes of a rank's tokens: bf16, the sum of the rows of all ranks in the order of the
// ranks, in fp32. Memory of the rank's GPU.
struct Combined {
  void* rows = nullptr;          // [count of the dispatch], 16-byte aligned
  std::uint64_t row_stride = 0;  // bytes; 0: dense
  const void* bias[2] = {};      // added first, rows like the output; null: none
  std::uint64_t bias_stride[2] = {};
  float* weights = nullptr;  // [count][top_k]: sums of ExpertInput::weights; null: not wanted
};

struct GroupOptions {
  symm::GroupOptions ranks = {};
  Options ep = {};
};

// Kept by the device over all dispatches, copied to the host when asked for.
struct Statistics {
  std::vector<std::uint64_t> expert_selections;  // of the experts of the rank
  std::vector<std::uint64_t> source_wait_ns;     // waiting for the rows of each rank
};

class CROSSDOCK_API Group {
 public:
  // Collective among the processes; compiles the kernels or loads them from the cache.
  static Result<Group> create(const GroupOptions& options);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();

  [[nodiscard]] std::uint32_t world() const noexcept;
  [[nodiscard]] std::span<const std::uint32_t> local_ranks() const noexcept;
  [[nodiscard]] const Sizes& memory() const noexcept;

  // kBusy when all slots of the rank are held by handles.
  Result<Handle> dispatch(std::uint32_t rank, const Tokens& tokens, StreamPtr stream = nullptr);
  // Lists the received rows by expert, after the dispatch in the stream.
  Result<Grouped> group_rows(const Handle& handle, StreamPtr stream = nullptr);
  // Adds what the experts have made of each received row, bf16 rows by place, into its row of
  // expert_input(): in the order of the choices, in fp32, each times its weight if `weighted`.
  // `stride` in bytes, 0: dense. After group_rows of the same handle.
  Result<> reduce_rows(const Handle& handle, const void* by_place, std::uint64_t stride,
                       bool weighted, StreamPtr stream = nullptr);
  Result<> combine(const Handle& handle, const Combined& combined, StreamPtr stream = nullptr);

  // Waits for the ranks' own streams (on the CPU: runs what was called), then check().
  Result<> synchronize(Deadline deadline);
  // The first fault of a local rank, naming what failed and who is to blame. Never waits.
  [[nodiscard]] Result<> check() const;
  // After a fault: collective, when no work of the group is left on any stream of this process.
  // Handles from before stay valid as memory only.
  Result<> reset(Deadline deadline);
  Result<Statistics> statistics(std::uint32_t rank, Deadline deadline) const;

  // What the library's tools and tests need beside the API.
  [[nodiscard]] ep::Core& core() const noexcept { return *core_; }

 private:
  explicit Group(std::shared_ptr<ep::Core> core);
  std::shared_ptr<ep::Core> core_;
};

}  // namespace v1
}  // namespace crossdock::ep
