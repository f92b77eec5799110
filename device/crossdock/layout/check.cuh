// Parameters of the kernels that check the hardware against plain definitions: convert_check and
// wgmma_check. Plain data, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device {

struct ConvertCheckConfig {
  u32 threads;  // of a block
};
// fp32 bit patterns first, first + stride, ...: `count` of them; and every code of the formats.
struct ConvertCheckParams {
  u32* mismatches;  // [kConvertChecks], device memory, added to
  u32 first;
  u32 stride;
  u32 count;
};
enum class ConvertCheck : u32 { kE4m3, kE5m2, kE2m1, kBf16, kFromE4m3, kFromE5m2 };
inline constexpr u32 kConvertChecks = 6;

// D[64][n] = A[64][k] * B[n][k]^T. A and B are row-major with rows of k_blocks * 128 bytes.
struct WgmmaCheckConfig {
  u32 n;                     // 8, 16, 32, 64, 96, 128, 192 or 256
  bool fp8;                  // e4m3; else bf16
  bool a_registers = false;  // A from registers (bf16 only)
  // Tiles come by tensor map; else by ordinary loads and the swizzle function.
  bool tensor_map = false;
};
struct WgmmaCheckParams {
  TensorMap a_map;  // box 64 rows x 128 bytes, swizzle 128
  TensorMap b_map;  // box n rows x 128 bytes, swizzle 128
  const u8* a;
  const u8* b;
  float* d;
  u32 k_blocks;
};

}  // namespace crossdock::device
