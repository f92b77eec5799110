// Grouped matrix products for expert layers: the rows of each expert times the weights of that
// expert, all experts in one launch. How many rows an expert has is read by the GPU, so no call
// waits for it and all of them may be captured into a CUDA graph.
//
//   Gemm ── prepare(call)                 once for each kind of call: compiles or loads its kernel
//        ── run(rank, call, stream)       checks the arguments, launches, returns
//
// Three layouts, by GemmGroups: contiguous (expert segments at `offsets`, as ep::Grouped has them),
// masked ([experts][expert_rows], `counts` valid ones) and gathered (a list names the input's row
// for each place: the rows that a dispatch delivered are used where they are).
//
// bf16 x bf16, or e4m3 x e4m3 with a scale for 1 x 128 values of the input and 128 x 128 of the
// weights, or e4m3 x e2m1, whose weights become e4m3 in the kernel; all are added up in fp32, e4m3
// exactly promoted every 128 values. Results do not
// depend on the grid, the layout or what runs beside: the same bits every time. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/symm/group_options.hpp>

namespace crossdock::moe {

class GemmCore;

inline namespace v1 {

// A CUstream of the rank's GPU. Null: the rank's own stream. Ignored on the CPU.
using StreamPtr = void*;

enum class Format : std::uint8_t {
  kBf16 = 0,
  kE4m3 = 1,  // with scales
  kE2m1 = 2,  // weights only: fp4 as Weights::prepare() packs it, with scales
};

// Of all scales of a call: those of the input, of the weights, and of the output.
enum class ScaleType : std::uint8_t {
  kF32 = 0,
  kUe8m0 = 1,  // 2^(code - 127) in a byte; 0 counts as 0, 255 (NaN) as infinite
};

// Of plain numbers: biases, and matrices from checkpoints.
enum class Number : std::uint8_t {
  kF32 = 0,
  kBf16 = 1,
  kE4m3 = 2,  // with scales for 128 x 128 values
  kE2m1 = 3,  // two in a byte, the first in the lower bits, with a power of two for 32 along K
};

// The weights of all experts of a rank, K-major and dense.
struct GemmWeights {
  Format format = Format::kBf16;
  // [experts][n][k], 16-byte aligned; e2m1: [experts][n / 128][k / 128] blocks of 8704 bytes
  const void* rows = nullptr;
  const void* scales = nullptr;  // not bf16: [experts][n / 128][k / 128]
  std::uint32_t experts = 0;     // of the rank, 1 to 512
  std::uint32_t n = 0;           // columns of the result, a multiple of 128 (gate and up: of 256)
  std::uint32_t k = 0;           // a multiple of 128
};

// Rows of the same format as the weights, of e4m3 with weights of e2m1. Rows that no group names
// are never read as numbers: they may hold anything.
struct GemmInput {
  const void* rows = nullptr;    // [count][k], 16-byte aligned
  std::uint32_t count = 0;       // rows there is memory for; 0: nothing else here is looked at
  std::uint64_t row_stride = 0;  // bytes, a multiple of 16; 0: dense
  // e4m3: [k / 128][scale_columns], a column for each row. kUe8m0: words of 4 bytes, each with the
  // scales of 4 x 128 values, the first in the lowest byte: [k / 512, rounded up][scale_columns].
  const void* scales = nullptr;
  std::uint64_t scale_columns = 0;  // a multiple of 4, at least count; 0: count
};

// Which rows belong to which expert; memory of the GPU, read when the kernel runs. An expert with
// more rows than there is room for fails the call: a fault says which. Unless gathered, the rows
// of an expert in e4m3 begin at a multiple of 4, where their scales are at 16 bytes.
struct GemmGroups {
  // Contiguous: [experts + 1], first place of each expert. Null: masked.
  const std::uint32_t* offsets = nullptr;
  const std::uint32_t* counts = nullptr;  // [experts]; null: up to the next offset
  std::uint32_t expert_rows = 0;          // masked: places of each expert
  // Gather: [places], the input's row for each place, -1: none (its sums are 0: with a bias the
  // result is that of the bias).
  const std::int32_t* rows = nullptr;
  std::uint32_t places = 0;  // gather: entries of `rows`, and rows of the result
};

// Columns of the weights are gate and up in groups of 8 (gate 0-7, up 0-7, gate 8-15, ...), and
// their scales in turns too: of 256 rows, the first scale is that of the 128 gates, the second that
// of the ups. The result is n / 2 columns wide: silu(gate) * up * weight of the row, from gate and
// up as rounded to bf16. Stored as bf16, or as e4m3 with a scale for 128 values: their largest
// magnitude (at least 1e-10) divided by 448, with kUe8m0 the next power of two.
struct Swiglu {
  float clamp = std::numeric_limits<float>::infinity();  // gate <= clamp, -clamp <= up <= clamp
  bool fast = false;                                     // approximate exponential and reciprocal
  const float* row_weights = nullptr;                    // [places]; null: 1
};

// Added in fp32 to the sums of each column before they are rounded to bf16, in every epilogue;
// memory of the GPU. With Swiglu its columns are gate and up in groups of 8, like those of the
// weights.
struct Bias {
  const void* values = nullptr;  // [experts][n], 16-byte aligned
  Number number = Number::kF32;  // or kBf16
};

// A row for each place, written where the place is valid.
struct GemmOutput {
  Format format = Format::kBf16;    // e4m3 after Swiglu, unless the weights are bf16
  void* rows = nullptr;             // 16-byte aligned
  std::uint64_t row_stride = 0;     // bytes, a multiple of 16; 0: dense
  void* scales = nullptr;           // e4m3: like GemmInput::scales, of columns / 128
  std::uint64_t scale_columns = 0;  // at least the places; 0: as many
};

// How the work is cut: rows of an expert that a block takes at once, by 256 columns.
enum class GemmTile : std::uint8_t {
  kAuto = 0,   // by GemmCall::expected_rows, see choose_tile()
  k128 = 1,    // many rows: the tensor cores are the limit
  k64 = 2,     // the weights' bytes are the limit
  kFew32 = 3,  // the same for few rows: the weights are the tensor cores' left operand
  kFew16 = 4,
  kFew8 = 5,
};

struct GemmCall {
  GemmWeights weights = {};
  GemmInput input = {};
  GemmGroups groups = {};
  GemmOutput output = {};
  std::optional<Swiglu> swiglu = {};
  std::optional<Bias> bias = {};
  ScaleType scale_type = ScaleType::kF32;
  GemmTile tile = GemmTile::kAuto;
  // Rows an expert has on average, as far as the caller knows; 0: many. Chooses the tile only.
  std::uint32_t expected_rows = 0;
};

// More than 64 rows an expert: k128; more than 32: k64; else the smallest kFew that holds them.
CROSSDOCK_API GemmTile choose_tile(std::uint32_t expected_rows);

struct GemmOptions {
  symm::GroupOptions ranks = {};
  std::uint32_t sms = 0;  // blocks of a launch; 0: all multiprocessors
  // The longest a kernel waits for its own copies before the call fails.
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

class CROSSDOCK_API Gemm {
 public:
  static Result<Gemm> create(const GemmOptions& options);
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;
  ~Gemm();

  [[nodiscard]] std::span<const std::uint32_t> local_ranks() const noexcept;

  // Makes the kernel of calls like this one ready on all local ranks; the call's memory is not
  // looked at, but whether there is a list of rows and a bias. With weights.k = 0 for sums of any
  // length. Refused while a rank's own stream is being captured.
  Result<> prepare(const GemmCall& like, Deadline deadline);
  // kInvalidArgument with the rule, the value and the fix; also where prepare() was not called for
  // such a call, since compiling would hold up the stream.
  Result<> run(std::uint32_t rank, const GemmCall& call, StreamPtr stream = nullptr);

  // Waits for the ranks' own streams (on the CPU: runs what was called), then check().
  Result<> synchronize(Deadline deadline);
  // The first fault of a local rank. Never waits.
  [[nodiscard]] Result<> check() const;
  // After a fault: when no work of the group is left on any stream of this process.
  Result<> reset(Deadline deadline);

  // What the library's tools and tests need beside the API.
  [[nodiscard]] moe::GemmCore& core() const noexcept { return *core_; }

 private:
  explicit Gemm(std::shared_ptr<moe::GemmCore> core);
  std::shared_ptr<moe::GemmCore> core_;
};

}  // namespace v1
}  // namespace crossdock::moe
