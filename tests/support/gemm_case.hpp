// Grouped products under test, on GPUs or in the twin: data of a case, the product in fp64, and a
// rig that uploads, runs through the API and compares. Rows that no group names hold NaN, so does
// the output before a run. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <optional>
#include <vector>

#include <crossdock/layout/probe.cuh>
#include <crossdock/moe/grouped_gemm.hpp>
#include <crossdock/ptx/minifloat.cuh>

#include "moe/gemm_core.hpp"
#include "symm/copy.hpp"
#include "tensor_core.hpp"

namespace crossdock::testing {

using device::u32;
using device::u64;
using device::u8;
using u16 = device::u16;
using i32 = device::i32;

enum class GemmLayout { kContiguous, kMasked, kGather };

struct GemmCase {
  u32 n = 256;
  u32 k = 384;
  moe::Format format = moe::Format::kE4m3;
  std::vector<u32> counts = {5, 0, 130};  // rows of each expert
  u32 alignment = 128;
  GemmLayout layout = GemmLayout::kContiguous;
  moe::GemmTile tile = moe::GemmTile::k128;
  std::optional<moe::Swiglu> swiglu = {};
  bool row_weights = false;
  std::optional<moe::Number> bias = {};
  moe::ScaleType scale_type = moe::ScaleType::kF32;
  u32 samples = 0;  // columns compared in each row; 0: all
  u32 seed = 1;

  [[nodiscard]] u32 experts() const { return static_cast<u32>(counts.size()); }
  [[nodiscard]] bool fp8() const { return format != moe::Format::kBf16; }  // the input
  [[nodiscard]] bool ue8m0() const { return scale_type == moe::ScaleType::kUe8m0; }
  [[nodiscard]] u32 width() const { return fp8() ? 1 : 2; }
};

inline float gemm_number(u32 seed, u32 a, u64 b) {
  const u32 bits = device::mix(seed * 0x9e3779b9u + a * 0x85ebca6bu + static_cast<u32>(b) +
                               static_cast<u32>(b >> 32) * 77u);
  return static_cast<float>(bits % 4001) / 500.0f - 4.0f;
}
inline float gemm_scale(const GemmCase& c, u32 a, u64 b) {
  const float scale = 0.01f + std::abs(gemm_number(c.seed + 17, a, b)) / 64.0f;
  if (!c.ue8m0()) return scale;
  const u32 code = device::minifloat::encode_ue8m0(device::bit_cast<u32>(scale));
  return device::bit_cast<float>(device::minifloat::decode_ue8m0(code));
}
// Scales as the GPU takes them: f32, or bytes of ue8m0, `stride` apart from number to number.
inline void put_scale(const GemmCase& c, float scale, u8* to) {
  if (c.ue8m0()) {
    *to = static_cast<u8>(device::minifloat::encode_ue8m0(device::bit_cast<u32>(scale)));
  } else {
    std::memcpy(to, &scale, 4);
  }
}

// Codes of one matrix and what they stand for.
struct GemmMatrix {
  std::vector<u8> codes;
  std::vector<float> values;

  GemmMatrix(const GemmCase& c, u32 which, u64 rows) : values(rows * c.k) {
    if (which == 2 && c.format == moe::Format::kE2m1) {
      pack_fp4(c, rows);
    } else {
      fill(c, which, rows);
    }
  }

 private:
  void fill(const GemmCase& c, u32 which, u64 rows) {
    codes.resize(rows * c.k * c.width());
    for (u64 i = 0; i < values.size(); ++i) {
      const u32 bits = device::bit_cast<u32>(gemm_number(c.seed, which, i));
      if (c.fp8()) {
        const u32 code = device::minifloat::encode(device::minifloat::kE4m3, bits);
        codes[i] = static_cast<u8>(code);
        values[i] =
            device::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, code));
      } else {
        const auto code = static_cast<u16>(device::minifloat::encode_bf16(bits));
        std::memcpy(&codes[i * 2], &code, 2);
        values[i] = device::bit_cast<float>(u32{code} << 16);
      }
    }
  }
  // Every code and every shift.
  void pack_fp4(const GemmCase& c, u64 rows) {
    codes.assign(
        rows * c.k / device::kFp4BlockRows / device::kFp4BlockRows * device::kFp4BlockBytes, 0);
    for (u64 row = 0; row < rows; ++row)
      for (u32 k = 0; k < c.k; ++k) {
        const u32 code = device::mix(c.seed * 77u + static_cast<u32>(row) * 8191u + k) % 16;
        const u32 group = device::mix(c.seed + static_cast<u32>(row) * 131u + k / 32);
        const i32 shift = device::kFp4SmallestShift + static_cast<i32>(group % device::kFp4Shifts);
        const u32 e4m3 = device::e4m3_from_fp4(code, shift);
        values[row * c.k + k] =
            device::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, e4m3));
        u8* block = &codes[(row / 128 * (c.k / 128) + k / 128) * device::kFp4BlockBytes];
        const u32 in_row = static_cast<u32>(row % 128), step = k % 128 / 32, in_step = k % 32;
        u32 word;
        u8* at = block + device::fp4_word_offset(in_row, step, in_step % 16 / 4);
        std::memcpy(&word, at, 4);
        word |= device::fp4_in_word(in_step / 16 * 4 + in_step % 4, code);
        std::memcpy(at, &word, 4);
        block[device::fp4_shift_offset(in_row, step)] =
            static_cast<u8>(device::fp4_shift_code(shift));
      }
  }
};

// A place of an expert whose entry in the list names no row of the input.
inline constexpr int kNamesNone = -2;

// Where everything lies, and the numbers.
struct GemmData {
  u32 expert_rows = 0;
  u32 places = 0;
  u32 rows = 0;             // of the input
  std::vector<int> list;    // gather
  std::vector<int> source;  // [place]: row of the input or kNamesNone, -1: not valid
  std::vector<u32> expert;  // [place]
  // After all that place() fills in.
  std::vector<u32> offsets;  // of places
  GemmMatrix input, weights;
  std::vector<float> input_scales;   // [k / 128][columns]
  std::vector<float> weight_scales;  // [expert][n / 128][k / 128]
  std::vector<float> row_weights;    // [place]
  std::vector<float> bias;           // [expert][n], as rounded to its format; or empty
  u32 columns = 0;

  explicit GemmData(const GemmCase& c)
      : offsets(place(c)), input(c, 1, rows), weights(c, 2, u64{c.experts()} * c.n) {
    const u64 row_bytes = u64{c.k} * c.width();
    std::vector<bool> used(rows, false);
    for (const int row : source)
      if (row >= 0) used[static_cast<u32>(row)] = true;
    columns = device::round_up(rows, 4u) + 4;
    input_scales.resize(u64{c.k} / 128 * columns, std::nanf(""));
    for (u32 row = 0; row < rows; ++row) {
      if (!used[row]) std::memset(&input.codes[row * row_bytes], 0xff, row_bytes);
      for (u32 g = 0; used[row] && g < c.k / 128; ++g)
        input_scales[u64{g} * columns + row] = gemm_scale(c, 3, u64{row} * 64 + g);
    }
    weight_scales.resize(u64{c.experts()} * c.n / 128 * (c.k / 128));
    for (u64 i = 0; i < weight_scales.size(); ++i)
      weight_scales[i] = gemm_scale(c, 4, i);
    for (u32 p = 0; p < places; ++p)
      row_weights.push_back(0.1f + std::abs(gemm_number(c.seed, 5, p)) / 8);
    for (u64 i = 0; c.bias && i < u64{c.experts()} * c.n; ++i) {
      const u32 bits = device::bit_cast<u32>(gemm_number(c.seed, 6, i));
      const u32 kept =
          *c.bias == moe::Number::kBf16 ? device::minifloat::encode_bf16(bits) << 16 : bits;
      bias.push_back(device::bit_cast<float>(kept));
    }
  }
  // The same as the GPU takes them.
  [[nodiscard]] std::vector<u8> input_scale_bytes(const GemmCase& c) const {
    const u64 groups = c.k / 128;
    std::vector<u8> bytes((c.ue8m0() ? (groups + 3) / 4 : groups) * columns * 4, 0xff);
    for (u64 g = 0; g < groups; ++g)
      for (u64 row = 0; row < columns; ++row)
        put_scale(
            c, input_scales[g * columns + row],
            &bytes[c.ue8m0() ? (g / 4 * columns + row) * 4 + g % 4 : (g * columns + row) * 4]);
    return bytes;
  }
  [[nodiscard]] std::vector<u8> weight_scale_bytes(const GemmCase& c) const {
    const u64 width = c.ue8m0() ? 1 : 4;
    std::vector<u8> bytes(weight_scales.size() * width);
    for (u64 i = 0; i < weight_scales.size(); ++i)
      put_scale(c, weight_scales[i], &bytes[i * width]);
    return bytes;
  }
  // The bias as the GPU takes it.
  [[nodiscard]] std::vector<u8> bias_bytes(const GemmCase& c) const {
    const u32 width = c.bias == moe::Number::kBf16 ? 2 : 4;
    std::vector<u8> bytes(bias.size() * width);
    for (u64 i = 0; i < bias.size(); ++i) {
      const u32 bits = device::bit_cast<u32>(bias[i]);
      const u32 code = width == 2 ? bits >> 16 : bits;
      std::memcpy(&bytes[i * width], &code, width);
    }
    return bytes;
  }

 private:
  std::vector<u32> place(const GemmCase& c) {
    std::vector<u32> at;
    for (const u32 count : c.counts) {
      expert_rows = std::max(expert_rows, count);
      at.push_back(places);
      places += device::round_up(count, c.alignment);
    }
    at.push_back(places);
    expert_rows += 3;
    if (c.fp8()) expert_rows = device::round_up(expert_rows, device::kGemmScaledBegin);
    if (c.layout == GemmLayout::kMasked) places = c.experts() * expert_rows;
    places = std::max(places, 1u);
    source.assign(places, -1);
    expert.assign(places, 0);
    list.assign(places, -1);
    const bool gather = c.layout == GemmLayout::kGather;
    rows = gather ? std::max(places / 2, 1u) : places;
    for (u32 e = 0; e < c.experts(); ++e)
      for (u32 i = 0; i < c.counts[e]; ++i) {
        const u32 p = (c.layout == GemmLayout::kMasked ? e * expert_rows : at[e]) + i;
        expert[p] = e;
        source[p] = list[p] = static_cast<int>(gather ? device::mix(c.seed * 31 + p) % rows : p);
        if (!gather || device::mix(c.seed + p) % 8 != 0) continue;
        source[p] = kNamesNone;
        list[p] = -1;
      }
    return at;
  }
};

// Weights of e2m1 as codes of e4m3, row by row.
inline std::vector<u8> expanded(const GemmData& d) {
  std::vector<u8> codes;
  for (const float value : d.weights.values)
    codes.push_back(static_cast<u8>(
        device::minifloat::encode(device::minifloat::kE4m3, device::bit_cast<u32>(value))));
  return codes;
}

struct GemmExact {
  double value = 0;
  double magnitude = 0;  // sum of the products' magnitudes
};
// Exactly, or as the tensor core aligns products of e4m3: in its 32 along K at a time.
enum class Sums { kExact, kAligned };
inline GemmExact gemm_exact(const GemmCase& c, const GemmData& d, u32 place, u32 column,
                            Sums sums = Sums::kExact) {
  const u64 row = static_cast<u64>(d.source[place]);
  const u64 weight = u64{d.expert[place]} * c.n + column;
  // With SwiGLU the scales of 256 columns are those of their gates and of their ups.
  const u32 block = c.swiglu ? column / 256 * 2 + column / 8 % 2 : column / 128;
  GemmExact sum;
  for (u32 g = 0; d.source[place] >= 0 && g < c.k / 128; ++g) {
    double part = 0, size = 0, products[32];
    for (u32 k = g * 128; k < (g + 1) * 128; ++k) {
      const double x = double{d.input.values[row * c.k + k]} * d.weights.values[weight * c.k + k];
      products[k % 32] = x;
      if (sums == Sums::kExact) part += x;
      if (sums == Sums::kAligned && k % 32 == 31) part = add_aligned(part, products);
      size += std::abs(x);
    }
    const double scale =
        c.fp8() ? double{d.input_scales[u64{g} * d.columns + row]} *
                      d.weight_scales[(u64{d.expert[place]} * c.n / 128 + block) * (c.k / 128) + g]
                : 1.0;
    sum.value += part * scale;
    sum.magnitude += size * scale;
  }
  if (c.bias) {
    sum.value += d.bias[weight];
    sum.magnitude += std::abs(d.bias[weight]);
  }
  return sum;
}
// Half a step of bf16, and what a tensor core drops when it aligns the products of e4m3. Where few
// products are large that may be more: then what a GPU says is this near to Sums::kAligned.
inline double gemm_bound(const GemmCase& c, const GemmExact& e) {
  return std::ldexp(std::abs(e.value), -8) + std::ldexp(e.magnitude, c.fp8() ? -12 : -16);
}

class GemmRig {
 public:
  static Result<GemmRig> create(symm::Backend backend, u32 sms = 0) {
    moe::GemmOptions options;
    options.ranks.world = 1;
    options.ranks.backend = backend;
    options.sms = sms;
    CROSSDOCK_TRY(gemm, moe::Gemm::create(options));
    return GemmRig(std::move(gemm));
  }
  [[nodiscard]] moe::Gemm& gemm() { return gemm_; }
  [[nodiscard]] symm::Rank& rank() { return gemm_.core().group().rank(0); }
  static Deadline soon() { return Deadline::in(std::chrono::seconds(120)); }

  template <class T>
  symm::LocalMemory put(const std::vector<T>& values) {
    auto memory = rank().allocate(std::max<u64>(values.size() * sizeof(T), 16)).value();
    EXPECT_TRUE(symm::upload(rank(), memory.template as<T>(), values, soon()).ok());
    return memory;
  }
  // Everything of one case in the rank's memory, and the call for it.
  struct Loaded {
    GemmCase c;
    GemmData data;
    symm::LocalMemory input = {}, weights = {}, input_scales = {}, weight_scales = {};
    symm::LocalMemory offsets = {}, counts = {}, list = {}, row_weights = {};
    symm::LocalMemory bias = {};
    symm::LocalMemory output = {}, output_scales = {};
    moe::GemmCall call = {};
    u32 columns = 0;  // of the output
  };
  Loaded load(const GemmCase& c) {
    Loaded l{.c = c, .data = GemmData(c)};
    const GemmData& d = l.data;
    l.columns = c.swiglu ? c.n / 2 : c.n;
    const bool quantised = c.swiglu && c.fp8();
    l.input = put(d.input.codes);
    l.weights = put(d.weights.codes);
    l.input_scales = put(d.input_scale_bytes(c));
    l.weight_scales = put(d.weight_scale_bytes(c));
    l.offsets = put(d.offsets);
    l.counts = put(c.counts);
    l.list = put(d.list);
    l.row_weights = put(d.row_weights);
    l.bias = put(d.bias_bytes(c));
    l.output = rank().allocate(u64{d.places} * l.columns * (quantised ? 1 : 2)).value();
    l.output_scales = rank().allocate(u64{d.places} * l.columns / 128 * 4 + 16).value();
    l.call.weights = {.format = c.format,
                      .rows = l.weights.address(),
                      .scales = c.fp8() ? l.weight_scales.address() : nullptr,
                      .experts = c.experts(),
                      .n = c.n,
                      .k = c.k};
    l.call.input = {.rows = l.input.address(),
                    .count = d.rows,
                    .scales = c.fp8() ? l.input_scales.address() : nullptr,
                    .scale_columns = c.fp8() ? d.columns : 0};
    l.call.groups.counts = l.counts.as<u32>();
    if (c.layout == GemmLayout::kMasked) {
      l.call.groups.expert_rows = d.expert_rows;
    } else {
      l.call.groups.offsets = l.offsets.as<u32>();
    }
    if (c.layout == GemmLayout::kGather) {
      l.call.groups.rows = l.list.as<int>();
      l.call.groups.places = d.places;
    }
    l.call.output = {.format = quantised ? moe::Format::kE4m3 : moe::Format::kBf16,
                     .rows = l.output.address(),
                     .scales = quantised ? l.output_scales.address() : nullptr};
    l.call.swiglu = c.swiglu;
    if (c.swiglu && c.row_weights) l.call.swiglu->row_weights = l.row_weights.as<float>();
    if (c.bias) l.call.bias = moe::Bias{.values = l.bias.address(), .number = *c.bias};
    l.call.tile = c.tile;
    l.call.scale_type = c.scale_type;
    return l;
  }
  void poison(Loaded& l) {
    const std::vector<u8> nan(l.output.bytes(), 0xff);
    EXPECT_TRUE(symm::upload(rank(), l.output.as<u8>(), nan, soon()).ok());
    const std::vector<u8> scales(l.output_scales.bytes(), 0xff);
    EXPECT_TRUE(symm::upload(rank(), l.output_scales.as<u8>(), scales, soon()).ok());
  }
  void run(Loaded& l) {
    const auto prepared = gemm_.prepare(l.call, soon());
    ASSERT_TRUE(prepared.ok()) << prepared.error().describe();
    poison(l);
    const auto called = gemm_.run(0, l.call);
    ASSERT_TRUE(called.ok()) << called.error().describe();
    const auto done = gemm_.synchronize(soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  std::vector<u8> bytes(const Loaded& l) {
    auto all = symm::download(rank(), l.output.as<u8>(), l.output.bytes(), soon()).value();
    const auto scales =
        symm::download(rank(), l.output_scales.as<u8>(), l.output_scales.bytes(), soon()).value();
    all.insert(all.end(), scales.begin(), scales.end());
    return all;
  }
  // Every valid row within the bound, every other one untouched.
  void check(const Loaded& l) {
    const auto out = bytes(l);
    const u32 width = l.call.output.format == moe::Format::kE4m3 ? 1 : 2;
    for (u32 place = 0; place < l.data.places; ++place) {
      if (l.data.source[place] != -1) {
        auto right = check_place(l, out, place, Sums::kExact);
        if (!right && aligns(l.c)) right = check_place(l, out, place, Sums::kAligned);
        ASSERT_TRUE(right) << "place " << place;
        continue;
      }
      for (u64 i = 0; i < u64{l.columns} * width; ++i)
        ASSERT_EQ(out[u64{place} * l.columns * width + i], 0xff)
            << "place " << place << " is not valid and was written at byte " << i;
    }
  }
  void round(const GemmCase& c) {
    Loaded l = load(c);
    ASSERT_NO_FATAL_FAILURE(run(l));
    ASSERT_NO_FATAL_FAILURE(check(l));
  }

 private:
  explicit GemmRig(moe::Gemm gemm) : gemm_(std::move(gemm)) {}

  static float bf16_at(const std::vector<u8>& out, u64 index) {
    u16 code;
    std::memcpy(&code, &out[index * 2], 2);
    return device::bit_cast<float>(u32{code} << 16);
  }
  // In the twin sums are exact but for their rounding.
  [[nodiscard]] bool aligns(const GemmCase& c) {
    return c.fp8() && gemm_.core().group().backend() == symm::Backend::kGpu;
  }
  using Verdict = ::testing::AssertionResult;
  static Verdict check_place(const Loaded& l, const std::vector<u8>& out, u32 place, Sums sums) {
    return l.c.swiglu ? check_swiglu(l, out, place, sums) : check_row(l, out, place, sums);
  }
  static Verdict check_row(const Loaded& l, const std::vector<u8>& out, u32 place, Sums sums) {
    const u32 step = l.c.samples == 0 ? 1 : std::max(l.columns / l.c.samples, 1u);
    for (u32 column = place % step; column < l.columns; column += step) {
      const GemmExact exact = gemm_exact(l.c, l.data, place, column, sums);
      const float got = bf16_at(out, u64{place} * l.columns + column);
      if (!(std::abs(got - exact.value) <= gemm_bound(l.c, exact)))
        return ::testing::AssertionFailure()
               << "column " << column << ": " << got << " for " << exact.value;
    }
    return ::testing::AssertionSuccess();
  }
  struct Activation {
    double value, error;
  };
  static Activation activation(const Loaded& l, u32 place, u32 column, Sums sums) {
    const u32 gate_at = column / 8 * 16 + column % 8;
    const GemmExact g = gemm_exact(l.c, l.data, place, gate_at, sums);
    const GemmExact u = gemm_exact(l.c, l.data, place, gate_at + 8, sums);
    const double clamp = l.c.swiglu->clamp;
    const double gate = std::min(g.value, clamp), up = std::clamp(u.value, -clamp, clamp);
    const double weight = l.c.row_weights ? l.data.row_weights[place] : 1.0;
    const double silu = gate / (1 + std::exp(-gate));
    // silu's slope is at most 1.1.
    const double error = 1.1 * gemm_bound(l.c, g) * (std::abs(up) + gemm_bound(l.c, u)) +
                         std::abs(silu) * gemm_bound(l.c, u) + 1e-5 * std::abs(silu * up);
    return {silu * up * weight, error * weight};
  }
  static float scale_at(const Loaded& l, const std::vector<u8>& out, u32 place, u32 group) {
    const u8* scales = &out[l.output.bytes()];
    if (l.c.ue8m0())
      return device::bit_cast<float>(device::minifloat::decode_ue8m0(
          scales[(u64{group} / 4 * l.data.places + place) * 4 + group % 4]));
    float scale;
    std::memcpy(&scale, scales + (u64{group} * l.data.places + place) * 4, 4);
    return scale;
  }
  // The 128 values of each row that share a scale.
  static Verdict check_swiglu(const Loaded& l, const std::vector<u8>& out, u32 place, Sums sums) {
    for (u32 first = 0; first < l.columns; first += 128) {
      if (l.c.samples != 0 && (place + first / 128) % 16 != 0) continue;
      Activation exact[128];
      double low = 0, high = 1e-10;
      for (u32 i = 0; i < 128; ++i) {
        exact[i] = activation(l, place, first + i, sums);
        low = std::max(low, std::abs(exact[i].value) - exact[i].error);
        high = std::max(high, std::abs(exact[i].value) + exact[i].error);
      }
      const bool quantised = l.call.output.format == moe::Format::kE4m3;
      float scale = 0;
      if (quantised) {
        scale = scale_at(l, out, place, first / 128);
        const double up = l.c.ue8m0() ? 2 : 1;  // to the next power of two
        if (!(scale * 448.0 >= low * 0.999999 && scale * 448.0 <= up * high * 1.000001))
          return ::testing::AssertionFailure()
                 << "group " << first << ": scale " << scale << " for a peak of " << high;
      }
      for (u32 i = 0; i < 128; ++i) {
        const u64 at = u64{place} * l.columns + first + i;
        double got, step;  // half a step of the format
        if (quantised) {
          const double code =
              device::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, out[at]));
          got = code * scale;
          step = std::max(std::abs(code) / 16, 1.0 / 1024) * scale;
        } else {
          got = bf16_at(out, at);
          step = std::ldexp(std::abs(exact[i].value), -8);
        }
        if (!(std::abs(got - exact[i].value) <= exact[i].error + step))
          return ::testing::AssertionFailure()
                 << "value " << first + i << ": " << got << " for " << exact[i].value;
      }
    }
    return ::testing::AssertionSuccess();
  }
  moe::Gemm gemm_;
};

}  // namespace crossdock::testing
