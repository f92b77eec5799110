// How the rows of a combine of few tokens travel: as bf16, or compressed. The bits of compressed
// rows, shared by host, kernels and twin.
//
// A compressed row is units of 512 values, which are four groups of 128. Of a unit, all in the
// order of the values:
//
//   kFp8       512 bytes e4m3           |                                 | 4 scales of fp32
//   kLogFmt10  512 bytes, codes % 256   | 128 bytes: 2 bits a value, the  | 4 ranges, a word each
//                                       |  9th of the code, then the sign |
//
// e4m3: the value is code * scale; the scale is that of the cast of a dispatch (ep/cast.cuh), the
// largest magnitude of the group / 448, but for groups down to 2^-100.
//
// LogFMT-10: magnitudes are placed on a logarithmic scale between the smallest and the largest of
// their group. The logarithm is that of the bits themselves, exponent and then mantissa, which is
// linear within an octave: a bf16 without its sign is a whole number that counts 128ths of octaves.
//
//   range  lowest | highest << 16: such numbers, of the smallest magnitude that is not zero (but
//          not more than 4095 below) and of the largest
//   step   max(highest - lowest, 510) / 510
//   code   0: zero; else the magnitude is the float whose bits are
//          (lowest + (code - 1) * step) << 16
//
// So it takes integers only, and its bits are the same everywhere. A group whose magnitudes are all
// within 510 of these numbers, four octaves, comes out as it went in.
//
// The error of a value, D being the octaves from the smallest to the largest magnitude of its
// group, and M the largest (docs/design/ep.md has the reasons):
//
//   kFp8       |value| / 16 + max(M, 2^-100) / 2^18
//   kLogFmt10  |value| * D / 900, D <= 32, and nothing up to D = 3.8; values below M / 2^31 may
//              become zero; 2^-130 for those that are not normal numbers
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device {

enum class EpPayload : u32 { kBf16, kFp8, kLogFmt10 };
inline constexpr u32 kEpPayloads = 3;

inline constexpr u32 kEpUnitValues = 512;
inline constexpr u32 kEpUnitVectors = kEpUnitValues / 8;  // of 16 bytes of bf16
inline constexpr u32 kEpLogHigh = kEpUnitValues;          // offset of the upper bits in a unit
inline constexpr u32 kEpLogRanges = kEpLogHigh + kEpUnitValues / 4;
inline constexpr u32 kEpFp8Scales = kEpUnitValues;

CROSSDOCK_HOST_DEVICE constexpr u32 ep_unit_bytes(EpPayload payload) {
  if (payload == EpPayload::kFp8) return kEpFp8Scales + 16;
  if (payload == EpPayload::kLogFmt10) return kEpLogRanges + 16;
  return kEpUnitValues * 2;
}
// Of a row of `values`, a multiple of kEpUnitValues unless it is bf16.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_payload_bytes(EpPayload payload, u32 values) {
  if (payload == EpPayload::kBf16) return values * 2;
  return values / kEpUnitValues * ep_unit_bytes(payload);
}
// From row to row: each begins at a line of memory. Pulled parts that begin inside a sector of 32
// bytes take half as long again (docs/design/ep.md), so parts are pairs of units where they fit.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_payload_stride(EpPayload payload, u32 values) {
  return round_up(ep_payload_bytes(payload, values), 128u);
}
CROSSDOCK_HOST_DEVICE constexpr u32 ep_payload_grain(EpPayload payload, u32 stage_bytes,
                                                     u32 most_rows) {
  const u32 unit = ep_unit_bytes(payload);
  return 2 * unit * most_rows <= stage_bytes ? 2 * unit : unit;
}
// Of a row that is `bytes` long in format `from`, its length in format `to`.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_payload_bytes(EpPayload to, EpPayload from, u32 bytes) {
  return bytes / ep_unit_bytes(from) * ep_unit_bytes(to);
}

// The range of a group in LogFMT-10.
struct EpLogRange {
  static constexpr u32 kLast = 510;  // steps between the first code and the last
  static constexpr u32 kMost = 4095;
  static constexpr u32 kShift = 19;  // of the inverse
  static constexpr u32 kInfinity = 0x7f80;
  static constexpr u32 kNan = 0x7fc0;
  u32 lowest;
  u32 highest;

  // `lowest`: not counting zeros; 0 if all are.
  CROSSDOCK_HOST_DEVICE static constexpr EpLogRange of(u32 lowest, u32 highest) {
    if (highest >= kInfinity) return {kNan, kNan};
    return {highest - lowest > kMost ? highest - kMost : lowest, highest};
  }
  CROSSDOCK_HOST_DEVICE static constexpr EpLogRange from(u32 word) {
    return {word & 0xffffu, word >> 16};
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 word() const { return lowest | highest << 16; }
  // A group with an infinity or a NaN is NaN as a whole.
  CROSSDOCK_HOST_DEVICE constexpr bool is_nan() const { return highest >= kInfinity; }
  CROSSDOCK_HOST_DEVICE constexpr u32 width() const { return highest - lowest; }
  // Of two adjacent codes, in units of 2^-16.
  CROSSDOCK_HOST_DEVICE constexpr u32 step() const {
    return width() <= kLast ? 1u << 16 : (width() << 16) / kLast;
  }
  // What a distance from `lowest` is multiplied by, in units of 2^-kShift.
  CROSSDOCK_HOST_DEVICE constexpr u32 inverse() const {
    return width() <= kLast ? 1u << kShift : (kLast << kShift) / width();
  }
  // Of a magnitude, with the inverse of the range.
  CROSSDOCK_HOST_DEVICE constexpr u32 code(u32 magnitude, u32 inverse_step) const {
    if (is_nan()) return 1;
    if (magnitude < lowest) return 0;
    return (((magnitude - lowest) * inverse_step + (1u << (kShift - 1))) >> kShift) + 1;
  }
  // The bits of the float of code 1, less a step: a code other than 0 adds so many steps.
  CROSSDOCK_HOST_DEVICE constexpr u32 base() const { return (lowest << 16) - step(); }
};

}  // namespace crossdock::device
