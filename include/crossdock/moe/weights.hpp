// Weights of an expert layer, from the plain matrices of a checkpoint to what the grouped products
// take: gate and up in groups of 8 rows; bf16, or e4m3 or e2m1 with scales for 128 x 128 values.
// Done once, on the CPU or on a GPU, which give the same bits. A WeightLayout goes with the bytes
// and says what they are, so that weights of another version or shape are an error and not a wrong
// result. Plain values, thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/moe/grouped_gemm.hpp>

namespace crossdock::moe {
inline namespace v1 {

// Goes up when prepared bytes change their meaning.
inline constexpr std::uint32_t kWeightLayoutVersion = 1;

// What prepared weights are. Keep it beside the bytes where they are stored.
struct WeightLayout {
  std::uint32_t version = kWeightLayoutVersion;
  Format format = Format::kBf16;
  std::uint32_t experts = 0;  // of the rank
  std::uint32_t hidden = 0;
  std::uint32_t inter = 0;  // values between the two products
  ScaleType scales = ScaleType::kF32;

  friend bool operator==(const WeightLayout&, const WeightLayout&) = default;
};
// "version 1, e4m3, 64 experts, hidden 7168, inter 2048"
CROSSDOCK_API std::string describe(const WeightLayout& layout);

// Prepared weights somewhere in memory. Dense; no scales with bf16.
//
//   gate_up         [experts][2 * inter][hidden]: gate 0-7, up 0-7, gate 8-15, ...
//   gate_up_scales  [experts][2 * inter / 128][hidden / 128]: gates 0-127, ups 0-127, ...
//   down            [experts][hidden][inter]
//   down_scales     [experts][hidden / 128][inter / 128]
//
// e2m1: 128 x 128 values of these rows and columns are a block of 8704 bytes.
struct WeightsView {
  WeightLayout layout = {};
  const void* gate_up = nullptr;
  const void* gate_up_scales = nullptr;
  const void* down = nullptr;
  const void* down_scales = nullptr;
};
struct WeightSizes {
  std::uint64_t gate_up_bytes = 0;
  std::uint64_t gate_up_scales = 0;  // numbers
  std::uint64_t down_bytes = 0;
  std::uint64_t down_scales = 0;
  std::uint32_t scale_bytes = 0;  // of a number
};
// kInvalidArgument for a version that this library does not know, and for shapes that no product
// takes.
CROSSDOCK_API Result<WeightSizes> weight_sizes(const WeightLayout& layout);

// The matrices of some experts as checkpoints have them.
struct PlainWeights {
  Number number = Number::kBf16;
  std::uint32_t experts = 0;
  std::uint32_t hidden = 0;       // a multiple of 128
  std::uint32_t inter = 0;        // a multiple of 128
  const void* gate_up = nullptr;  // [experts][2 * inter][hidden]: all gates, then all ups
  bool up_first = false;          // all ups, then all gates
  const void* down = nullptr;     // [experts][hidden][inter]
  // e4m3: f32 [experts][2 * inter / 128][hidden / 128]; e2m1: ue8m0 [experts][2 * inter][hidden /
  // 32]
  const void* gate_up_scales = nullptr;
  const void* down_scales = nullptr;  // [experts][hidden / 128][inter / 128]; [hidden][inter / 32]
};

struct PrepareOptions {
  Format format = Format::kE4m3;
  ScaleType scales = ScaleType::kF32;  // not bf16
};

// How e2m1 came out. 32 values along K share a power of two, and 128 x 128 values a scale: the
// largest of these powers, divided by 2^6. Groups whose power is 2^15 or more below the largest do
// not fit next to it in e4m3, and are rounded to multiples of 2^-9 of the scale.
struct WeightReport {
  std::uint64_t groups = 0;          // of 32 values, where e2m1 is made or comes in
  std::uint64_t inexact_groups = 0;  // of these: those with a value that changed
};

// Prepared weights in memory of a rank, which they keep. Move-only, single-owner.
class CROSSDOCK_API PreparedWeights {
 public:
  PreparedWeights(PreparedWeights&&) noexcept;
  PreparedWeights& operator=(PreparedWeights&&) noexcept;
  ~PreparedWeights();

  [[nodiscard]] const WeightLayout& layout() const noexcept { return layout_; }
  // For GemmCall and Layer::use().
  [[nodiscard]] WeightsView view() const noexcept;
  [[nodiscard]] const WeightReport& report() const noexcept { return report_; }

 private:
  friend class Weights;
  struct Memory;
  PreparedWeights(const WeightLayout& layout, std::unique_ptr<Memory> memory);
  WeightLayout layout_;
  WeightReport report_;
  std::unique_ptr<Memory> memory_;
};

// Prepared weights in memory of the host.
class CROSSDOCK_API Weights {
 public:
  // Values that are not finite, and codes and scales that are NaN, infinite or negative, are
  // kInvalidArgument and named.
  // To e4m3: 128 x 128 values share the scale max(largest magnitude, 1e-10) / 448, with kUe8m0 the
  // next power of two; each is multiplied by 1 / scale, rounded to nearest even and saturated. What
  // is e4m3 stays as it is, and its scales too: kUe8m0 refuses those that are no powers of two.
  // What is e2m1 becomes what the kernels make of it. To e2m1: 32 values along K share the smallest
  // power of two that is not below their largest magnitude / 6, so that none saturates: a value is
  // off by at most half of a step of e2m1 times that power, 1/4 below 2, 1/2 below 4, 1 above, and
  // where the group does not fit (WeightReport) by up to 2^-10 of the scale more, since it is
  // rounded twice. What is e2m1 stays as it is. To bf16: rounded to nearest even, as value times
  // scale.
  static Result<Weights> prepare(const PlainWeights& plain, Format format,
                                 ScaleType scales = ScaleType::kF32);
  // The same on a rank of the group: `plain` is memory of its GPU, its matrices on multiples of 16
  // bytes. Compiles or loads a kernel, allocates and waits.
  static Result<PreparedWeights> prepare(Gemm& gemm, std::uint32_t rank, const PlainWeights& plain,
                                         const PrepareOptions& options, Deadline deadline);

  [[nodiscard]] const WeightLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] WeightsView view() const noexcept;
  [[nodiscard]] const WeightReport& report() const noexcept { return report_; }

 private:
  friend class Layer;
  // `keeper` keeps the core's ranks.
  static Result<PreparedWeights> prepare(moe::GemmCore& core, std::shared_ptr<void> keeper,
                                         std::uint32_t rank, const PlainWeights& plain,
                                         const PrepareOptions& options, Deadline deadline);
  explicit Weights(const WeightLayout& layout) : layout_(layout) {}
  WeightLayout layout_;
  WeightReport report_;
  std::vector<std::byte> gate_up_, gate_up_scales_, down_, down_scales_;
};

}  // namespace v1
}  // namespace crossdock::moe
