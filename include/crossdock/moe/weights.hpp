// Weights of an expert layer, from the plain matrices of a checkpoint to what the grouped products
// take: gate and up in groups of 8 rows, e4m3 with scales for 128 x 128 values, or bf16. Done on
// the CPU, once. A WeightLayout goes with the bytes and says what they are, so that weights of
// another version or shape are an error and not a wrong result. Plain values, thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

  friend bool operator==(const WeightLayout&, const WeightLayout&) = default;
};
// "version 1, e4m3, 64 experts, hidden 7168, inter 2048"
CROSSDOCK_API std::string describe(const WeightLayout& layout);

// Prepared weights somewhere in memory. Dense; scales only with e4m3.
//
//   gate_up         [experts][2 * inter][hidden]: gate 0-7, up 0-7, gate 8-15, ...
//   gate_up_scales  [experts][2 * inter / 128][hidden / 128]: gates 0-127, ups 0-127, ...
//   down            [experts][hidden][inter]
//   down_scales     [experts][hidden / 128][inter / 128]
struct WeightsView {
  WeightLayout layout = {};
  const void* gate_up = nullptr;
  const float* gate_up_scales = nullptr;
  const void* down = nullptr;
  const float* down_scales = nullptr;
};
struct WeightSizes {
  std::uint64_t gate_up_bytes = 0;
  std::uint64_t gate_up_scales = 0;  // numbers
  std::uint64_t down_bytes = 0;
  std::uint64_t down_scales = 0;
};
// kInvalidArgument for a version that this library does not know, and for shapes that no product
// takes.
CROSSDOCK_API Result<WeightSizes> weight_sizes(const WeightLayout& layout);

// The matrices of some experts as checkpoints have them, in memory of the host.
struct PlainWeights {
  Number number = Number::kBf16;
  std::uint32_t experts = 0;
  std::uint32_t hidden = 0;               // a multiple of 128
  std::uint32_t inter = 0;                // a multiple of 128
  const void* gate_up = nullptr;          // [experts][2 * inter][hidden]: all gates, then all ups
  bool up_first = false;                  // all ups, then all gates
  const void* down = nullptr;             // [experts][hidden][inter]
  const float* gate_up_scales = nullptr;  // e4m3: [experts][2 * inter / 128][hidden / 128]
  const float* down_scales = nullptr;     // e4m3: [experts][hidden / 128][inter / 128]
};

// Prepared weights in memory of the host.
class CROSSDOCK_API Weights {
 public:
  // Values that are not finite, and codes and scales that are NaN, infinite or negative, are
  // kInvalidArgument and named. To e4m3: 128 x 128 values share the scale
  // max(largest magnitude, 1e-10) / 448; each is multiplied by 1 / scale, rounded to nearest even
  // and saturated. Weights that are e4m3 stay as they are. To bf16: rounded to nearest even, from
  // e4m3 as value times scale.
  static Result<Weights> prepare(const PlainWeights& plain, Format format);

  [[nodiscard]] const WeightLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] WeightsView view() const noexcept;

 private:
  explicit Weights(const WeightLayout& layout) : layout_(layout) {}
  WeightLayout layout_;
  std::vector<std::byte> gate_up_, down_;
  std::vector<float> gate_up_scales_, down_scales_;
};

}  // namespace v1
}  // namespace crossdock::moe
