// Figures of one host, to compare with: 4 x NVIDIA H200 (NV18 between all pairs), CUDA 13.0, driver
// 580, measured on 2026-11-29 by programs of their own, not by this library: rows by bulk copies
// through shared memory (7168-byte rows with 8 warps a block, 14336 with 4, two rows a warp in
// flight), single pairs by plain loads and stores. They hold for that card and for four ranks; with
// other numbers of ranks they are a yardstick only. Data, no code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "symm/kernels/probe.hpp"

namespace crossdock::tools::bench {

inline constexpr const char* kReferenceName = "4 x H200";

struct RowsReference {
  symm::Direction direction;
  std::uint32_t row_bytes;
  std::uint32_t sms;
  double gb_per_s;
};
// All GPUs at once, rows to or from random peers; GB/s of each GPU.
inline constexpr RowsReference kAllAtOnce[] = {
    {symm::Direction::kPush, 7168, 8, 342},   {symm::Direction::kPush, 7168, 16, 329},
    {symm::Direction::kPush, 7168, 24, 338},  {symm::Direction::kPush, 7168, 64, 347},
    {symm::Direction::kPush, 7168, 132, 351}, {symm::Direction::kPull, 7168, 8, 229},
    {symm::Direction::kPull, 7168, 16, 317},  {symm::Direction::kPull, 7168, 24, 317},
    {symm::Direction::kPull, 7168, 64, 302},  {symm::Direction::kPull, 7168, 132, 291},
    {symm::Direction::kPush, 14336, 8, 333},  {symm::Direction::kPush, 14336, 16, 324},
    {symm::Direction::kPush, 14336, 64, 340}, {symm::Direction::kPush, 14336, 132, 343},
    {symm::Direction::kPull, 14336, 8, 216},  {symm::Direction::kPull, 14336, 16, 311},
    {symm::Direction::kPull, 14336, 24, 313}, {symm::Direction::kPull, 14336, 132, 303},
};
// One GPU with another, the rest idle; by loads and stores whatever the row.
inline constexpr RowsReference kOnePair[] = {
    {symm::Direction::kPush, 7168, 16, 349},
    {symm::Direction::kPush, 7168, 132, 370},
    {symm::Direction::kPull, 7168, 16, 373},
    {symm::Direction::kPull, 7168, 132, 373},
};
inline constexpr double kCopyEnginePair = 395;  // GB/s
inline constexpr double kFlagRoundTripUs = 1.40;

// What the figures should be on H200s.
inline constexpr double kBarrierAimUs = 2.5;
inline constexpr double kGridBarrierAimUs = 5;
inline constexpr double kPushAimShare = 0.97;  // of the table's push with 8 SMs, four ranks
inline constexpr double kHeapAimMs = 1000;     // four windows of 8 GiB

}  // namespace crossdock::tools::bench
