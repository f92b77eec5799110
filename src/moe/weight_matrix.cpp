// See weight_matrix.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe/weight_matrix.hpp"

#include <fmt/format.h>

namespace crossdock::moe {

using device::u32;
using device::u64;
using device::u8;
using device::WeightFlaw;
using device::WeightNumber;

namespace {

const char* name_of(Number number) {
  switch (number) {
    case Number::kF32:
      return "f32";
    case Number::kBf16:
      return "bf16";
    case Number::kE4m3:
      return "e4m3";
    case Number::kE2m1:
      return "e2m1";
  }
  return "unknown";
}
u32 bits_of(WeightNumber number) {
  switch (number) {
    case WeightNumber::kF32:
      return 32;
    case WeightNumber::kBf16:
      return 16;
    case WeightNumber::kE4m3:
      return 8;
    default:
      return 4;
  }
}

// Which the flaw is about: a value, or the scale that it has.
Result<float> flawed_number(const device::WeightMatrix& m, u64 index, bool scale,
                            const ReadPlain& read) {
  u32 code = 0;
  if (!scale) {
    const u32 bits = bits_of(m.number);
    CROSSDOCK_CHECK_OK(read(&code, m.from + index * bits / 8, (bits + 7) / 8));
    return device::weight_number(m.number, bits == 4 ? code >> (index % 2 * 4) & 0xfu : code);
  }
  if (m.number == WeightNumber::kE2m1) {
    CROSSDOCK_CHECK_OK(read(&code, m.from_scales + index / device::kFp4Group, 1));
    return device::ue8m0_number(code);
  }
  const u64 row = index / m.columns;
  const u64 tile = row / device::kWeightTile * m.groups() + index % m.columns / device::kWeightTile;
  CROSSDOCK_CHECK_OK(read(&code, m.from_scales + tile * 4, 4));
  return device::bit_cast<float>(code);
}

}  // namespace

std::array<NamedMatrix, 2> weight_matrices(const PlainWeights& plain, const WeightsView& to) {
  const auto bytes = [](const void* p) { return static_cast<const u8*>(p); };
  const auto target = [](const void* p) { return static_cast<u8*>(const_cast<void*>(p)); };
  const device::WeightMatrix both{.from = nullptr,
                                  .from_scales = nullptr,
                                  .to = nullptr,
                                  .to_scales = nullptr,
                                  .experts = plain.experts,
                                  .rows = 0,
                                  .columns = 0,
                                  .number = static_cast<WeightNumber>(plain.number),
                                  .format = static_cast<device::WeightFormat>(to.layout.format),
                                  .ue8m0 = to.layout.scales == ScaleType::kUe8m0,
                                  .interleaved = false,
                                  .up_first = false};
  std::array<NamedMatrix, 2> out{{{"gate_up", both}, {"down", both}}};
  device::WeightMatrix& gate_up = out[0].matrix;
  gate_up.from = bytes(plain.gate_up);
  gate_up.from_scales = bytes(plain.gate_up_scales);
  gate_up.to = target(to.gate_up);
  gate_up.to_scales = target(to.gate_up_scales);
  gate_up.rows = 2 * plain.inter;
  gate_up.columns = plain.hidden;
  gate_up.interleaved = true;
  gate_up.up_first = plain.up_first;
  device::WeightMatrix& down = out[1].matrix;
  down.from = bytes(plain.down);
  down.from_scales = bytes(plain.down_scales);
  down.to = target(to.down);
  down.to_scales = target(to.down_scales);
  down.rows = plain.hidden;
  down.columns = plain.inter;
  return out;
}

WeightLayout layout_of(const PlainWeights& plain, const PrepareOptions& options) {
  return {.format = options.format,
          .experts = plain.experts,
          .hidden = plain.hidden,
          .inter = plain.inter,
          .scales = options.scales};
}

u64 folded_groups(const PlainWeights& plain, const WeightLayout& to) {
  const bool folded =
      to.format == Format::kE2m1 || (to.format == Format::kE4m3 && plain.number == Number::kE2m1);
  return folded ? u64{3} * to.experts * to.hidden * to.inter / device::kFp4Group : 0;
}

Result<> check_plain(const PlainWeights& plain, const WeightLayout& to) {
  if (plain.number > Number::kE2m1)
    return invalid_argument(fmt::format("moe weights: plain weights of the unknown number type {}",
                                        static_cast<unsigned>(plain.number)));
  if (to.format == Format::kBf16 && to.scales != ScaleType::kF32)
    return invalid_argument("moe weights: bf16 has no scales: leave their type f32");
  if (plain.gate_up == nullptr || plain.down == nullptr)
    return invalid_argument(fmt::format(
        "moe weights: gate_up at {} and down at {} must both be given", plain.gate_up, plain.down));
  const bool wanted = plain.number == Number::kE4m3 || plain.number == Number::kE2m1;
  if (wanted == (plain.gate_up_scales != nullptr) && wanted == (plain.down_scales != nullptr))
    return {};
  return invalid_argument(fmt::format(
      "moe weights: plain weights of {} {} scales{}, but those of gate_up are at {} and those of "
      "down at {}",
      wanted ? name_of(plain.number) : "f32 or bf16", wanted ? "need" : "have no",
      plain.number == Number::kE2m1   ? ", one ue8m0 byte for 32 values"
      : plain.number == Number::kE4m3 ? ", one for 128 x 128 values"
                                      : "",
      plain.gate_up_scales, plain.down_scales));
}

Error weight_flaw_error(const NamedMatrix& m, u64 flaw, const ReadPlain& read) {
  const u64 index = flaw / 4;
  const auto kind = static_cast<WeightFlaw>(flaw % 4);
  const bool scale = kind == WeightFlaw::kBadScale || kind == WeightFlaw::kNotAPower;
  const auto value = flawed_number(m.matrix, index, scale, read);
  if (!value.ok()) return value.error();
  const u64 row = index / m.matrix.columns;
  const char* what = kind == WeightFlaw::kTooLarge ? "as bf16 the value"
                     : scale                       ? "scale"
                                                   : "the value";
  const char* rule = kind == WeightFlaw::kNotAPower
                         ? "be a power of two to be ue8m0: keep scales of f32, or prepare from "
                           "weights that are not quantised"
                     : scale ? "be finite and not negative: repair the checkpoint"
                             : "be finite: repair the checkpoint";
  return invalid_argument(fmt::format(
      "moe weights: {} {} of {} at expert {}, row {}, column {} must {}", what, *value, m.name,
      row / m.matrix.rows, row % m.matrix.rows, index % m.matrix.columns, rule));
}

u32 width_of(ScaleType type) {
  return type == ScaleType::kUe8m0 ? 1 : 4;
}

}  // namespace crossdock::moe
