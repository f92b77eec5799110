// Preparation of weights on the CPU: 128 rows of a plain matrix at a time, since those share
// scales.
// See crossdock/moe/weights.hpp. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <span>

#include <crossdock/layout/grouped_gemm.cuh>
#include <crossdock/moe/weights.hpp>
#include <crossdock/ptx/minifloat.cuh>

namespace crossdock::moe {
namespace {

using device::u32;
using device::u64;
using device::u8;
using u16 = device::u16;

constexpr u32 kGroup = device::kGemmScaleGroup;
constexpr float kSmallestPeak = 1e-10f;
constexpr float kLargestE4m3 = 448.0f;

const char* name_of(Format format) {
  return format == Format::kE4m3 ? "e4m3" : "bf16";
}
u32 width_of(Format format) {
  return format == Format::kE4m3 ? 1 : 2;
}
u32 width_of(Number number) {
  return number == Number::kF32 ? 4 : number == Number::kBf16 ? 2 : 1;
}

Result<> check_shape(u32 experts, u32 hidden, u32 inter) {
  if (experts == 0 || experts > device::kGemmMaxExperts)
    return invalid_argument(fmt::format("moe weights: experts = {} must be 1 to {} on one rank",
                                        experts, device::kGemmMaxExperts));
  for (const auto& [what, value] : {std::pair{"hidden", hidden}, std::pair{"inter", inter}})
    if (value == 0 || value % kGroup != 0)
      return invalid_argument(
          fmt::format("moe weights: {} = {} must be a positive multiple of {}, the values that "
                      "share a scale: pad with zeros to {}",
                      what, value, kGroup, device::round_up(std::max(value, 1u), kGroup)));
  return {};
}

// One of the two matrices of all experts, plain and prepared.
struct Matrix {
  const char* name;
  u32 rows, columns;
  const u8* from;
  const float* from_scales;
  Number number;
  std::byte* to;
  float* to_scales;
  Format format;
  // 128 rows of the plain matrix go to: every row 8 by 8 into a stripe of 256, or as they are.
  bool interleaved;
  bool up_first;

  [[nodiscard]] u32 blocks() const { return rows / kGroup; }
  [[nodiscard]] u32 groups() const { return columns / kGroup; }
  // Where a block of 128 rows goes: its scales, and its row i.
  [[nodiscard]] u32 block_to(u32 block) const {
    if (!interleaved) return block;
    const u32 half = blocks() / 2;
    const u32 second = block / half;
    return block % half * 2 + (up_first ? 1 - second : second);
  }
  [[nodiscard]] u32 row_to(u32 block, u32 i) const {
    const u32 at = block_to(block);
    if (!interleaved) return at * kGroup + i;
    return at / 2 * 2 * kGroup + i / 8 * 16 + at % 2 * 8 + i % 8;
  }
};

struct Place {
  u32 expert, row, column;
};
Error bad_value(const Matrix& m, const Place& at, const char* what, float value) {
  return invalid_argument(fmt::format(
      "moe weights: {} {} of {} at expert {}, row {}, column {} must be finite{}: repair the "
      "checkpoint",
      what, value, m.name, at.expert, at.row, at.column,
      what[0] == 's' ? " and not negative" : ""));
}

float number_at(const Matrix& m, u64 index) {
  if (m.number == Number::kF32) {
    float value;
    std::memcpy(&value, m.from + index * 4, 4);
    return value;
  }
  if (m.number == Number::kBf16) {
    u16 code;
    std::memcpy(&code, m.from + index * 2, 2);
    return std::bit_cast<float>(u32{code} << 16);
  }
  return std::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, m.from[index]));
}

// 128 rows of one expert as numbers; those of e4m3 without their scales.
Result<> read_block(const Matrix& m, u32 expert, u32 block, std::vector<float>& values) {
  const u64 first = (u64{expert} * m.rows + block * kGroup) * m.columns;
  for (u64 i = 0; i < values.size(); ++i) {
    values[i] = number_at(m, first + i);
    if (std::isfinite(values[i])) continue;
    return bad_value(
        m,
        {expert, block * kGroup + static_cast<u32>(i / m.columns), static_cast<u32>(i % m.columns)},
        "the value", values[i]);
  }
  return {};
}

// The scales of a block of 128 rows, one for 128 columns: those given with e4m3, or of the peaks.
Result<> find_scales(const Matrix& m, u32 expert, u32 block, std::span<const float> values,
                     std::span<float> scales) {
  for (u32 g = 0; g < m.groups(); ++g) {
    if (m.number == Number::kE4m3) {
      scales[g] = m.from_scales[(u64{expert} * m.blocks() + block) * m.groups() + g];
      if (!std::isfinite(scales[g]) || scales[g] < 0)
        return bad_value(m, {expert, block * kGroup, g * kGroup}, "scale", scales[g]);
      continue;
    }
    float peak = kSmallestPeak;
    for (u32 row = 0; row < kGroup; ++row)
      for (u32 i = 0; i < kGroup; ++i)
        peak = std::max(peak, std::abs(values[u64{row} * m.columns + g * kGroup + i]));
    scales[g] = peak / kLargestE4m3;
  }
  return {};
}

// The column whose value does not fit the format, or the number of columns.
u32 write_row(const Matrix& m, std::span<const float> values, std::span<const float> scales,
              std::byte* to) {
  for (u32 i = 0; i < m.columns; ++i) {
    const float scale = scales[i / kGroup];
    if (m.format == Format::kBf16) {
      const float value = m.number == Number::kE4m3 ? values[i] * scale : values[i];
      const auto code = static_cast<u16>(device::minifloat::encode_bf16(std::bit_cast<u32>(value)));
      if ((code & 0x7f80) == 0x7f80) return i;  // rounded to infinity
      std::memcpy(to + u64{i} * 2, &code, 2);
    } else {
      const float value = values[i] * (1.0f / scale);
      to[i] = static_cast<std::byte>(
          device::minifloat::encode(device::minifloat::kE4m3, std::bit_cast<u32>(value)));
    }
  }
  return m.columns;
}

Result<> prepare_matrix(const Matrix& m, u32 experts) {
  std::vector<float> values(u64{kGroup} * m.columns);
  std::vector<float> scales(m.groups());
  const u64 row_bytes = u64{m.columns} * width_of(m.format);
  // Same numbers in and out: rows only move. They are read all the same, to be checked.
  const bool same = width_of(m.number) == width_of(m.format);
  for (u32 expert = 0; expert < experts; ++expert)
    for (u32 block = 0; block < m.blocks(); ++block) {
      CROSSDOCK_CHECK_OK(read_block(m, expert, block, values));
      CROSSDOCK_CHECK_OK(find_scales(m, expert, block, values, scales));
      if (m.format == Format::kE4m3)
        std::copy(scales.begin(), scales.end(),
                  m.to_scales + (u64{expert} * m.blocks() + m.block_to(block)) * m.groups());
      for (u32 i = 0; i < kGroup; ++i) {
        const u64 from = u64{expert} * m.rows + block * kGroup + i;
        std::byte* to = m.to + (u64{expert} * m.rows + m.row_to(block, i)) * row_bytes;
        if (same) {
          std::memcpy(to, m.from + from * row_bytes, row_bytes);
          continue;
        }
        const auto row = std::span(values).subspan(u64{i} * m.columns, m.columns);
        const u32 bad = write_row(m, row, scales, to);
        if (bad != m.columns)
          return bad_value(m, {expert, block * kGroup + i, bad}, "as bf16 the value", row[bad]);
      }
    }
  return {};
}

Result<> check_plain(const PlainWeights& plain) {
  if (plain.gate_up == nullptr || plain.down == nullptr)
    return invalid_argument(fmt::format(
        "moe weights: gate_up at {} and down at {} must both be given", plain.gate_up, plain.down));
  const bool wanted = plain.number == Number::kE4m3;
  if (wanted == (plain.gate_up_scales != nullptr) && wanted == (plain.down_scales != nullptr))
    return {};
  return invalid_argument(fmt::format(
      "moe weights: plain weights of {} {} scales, one for 128 x 128 values, but those of gate_up "
      "are at {} and those of down at {}",
      wanted ? "e4m3" : "f32 or bf16", wanted ? "need" : "have no",
      static_cast<const void*>(plain.gate_up_scales), static_cast<const void*>(plain.down_scales)));
}

}  // namespace

inline namespace v1 {

std::string describe(const WeightLayout& layout) {
  return fmt::format("version {}, {}, {} experts, hidden {}, inter {}", layout.version,
                     name_of(layout.format), layout.experts, layout.hidden, layout.inter);
}

Result<WeightSizes> weight_sizes(const WeightLayout& layout) {
  if (layout.version != kWeightLayoutVersion)
    return invalid_argument(
        fmt::format("moe weights: a layout of version {}; this library makes and takes version {}: "
                    "prepare the weights again",
                    layout.version, kWeightLayoutVersion));
  CROSSDOCK_CHECK_OK(check_shape(layout.experts, layout.hidden, layout.inter));
  const u64 values = u64{layout.experts} * layout.hidden * layout.inter;
  const u64 scales = layout.format == Format::kE4m3 ? values / (kGroup * kGroup) : 0;
  return WeightSizes{.gate_up_bytes = 2 * values * width_of(layout.format),
                     .gate_up_scales = 2 * scales,
                     .down_bytes = values * width_of(layout.format),
                     .down_scales = scales};
}

Result<Weights> Weights::prepare(const PlainWeights& plain, Format format) {
  const WeightLayout layout{
      .format = format, .experts = plain.experts, .hidden = plain.hidden, .inter = plain.inter};
  CROSSDOCK_TRY(sizes, weight_sizes(layout));
  CROSSDOCK_CHECK_OK(check_plain(plain));
  Weights out(layout);
  out.gate_up_.resize(sizes.gate_up_bytes);
  out.gate_up_scales_.resize(sizes.gate_up_scales);
  out.down_.resize(sizes.down_bytes);
  out.down_scales_.resize(sizes.down_scales);
  CROSSDOCK_CHECK_OK(prepare_matrix({.name = "gate_up",
                                     .rows = 2 * plain.inter,
                                     .columns = plain.hidden,
                                     .from = static_cast<const u8*>(plain.gate_up),
                                     .from_scales = plain.gate_up_scales,
                                     .number = plain.number,
                                     .to = out.gate_up_.data(),
                                     .to_scales = out.gate_up_scales_.data(),
                                     .format = format,
                                     .interleaved = true,
                                     .up_first = plain.up_first},
                                    plain.experts));
  CROSSDOCK_CHECK_OK(prepare_matrix({.name = "down",
                                     .rows = plain.hidden,
                                     .columns = plain.inter,
                                     .from = static_cast<const u8*>(plain.down),
                                     .from_scales = plain.down_scales,
                                     .number = plain.number,
                                     .to = out.down_.data(),
                                     .to_scales = out.down_scales_.data(),
                                     .format = format,
                                     .interleaved = false,
                                     .up_first = false},
                                    plain.experts));
  return out;
}

WeightsView Weights::view() const noexcept {
  const bool scaled = layout_.format == Format::kE4m3;
  return {.layout = layout_,
          .gate_up = gate_up_.data(),
          .gate_up_scales = scaled ? gate_up_scales_.data() : nullptr,
          .down = down_.data(),
          .down_scales = scaled ? down_scales_.data() : nullptr};
}

}  // namespace v1
}  // namespace crossdock::moe
