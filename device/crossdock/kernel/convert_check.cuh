// convert_check: compares the GPU's conversion instructions with minifloat.cuh, bit by bit. In the
// twin both are the same code and nothing can differ; the twin's formats are tested on the host
// against their textbook definition.
// Launch: any grid, block = kConfig.threads (a multiple of 32), no shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/check.cuh>
#include <crossdock/ptx/atomic.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device::kernel {

CROSSDOCK_DEVICE void count_mismatch(const ConvertCheckParams& p, ConvertCheck which, u32 got,
                                     u32 want) {
  if (got != want) ptx::red_add_relaxed_gpu(p.mismatches + static_cast<u32>(which), 1u);
}

// Each value goes through both halves of the packed conversion.
CROSSDOCK_DEVICE void check_encoding(const ConvertCheckParams& p, u32 bits) {
  const float x = bit_cast<float>(bits);
  const float y = bit_cast<float>(bits ^ 0x80000001u);
  const auto pair = [&](minifloat::Format f, u32 shift) {
    return minifloat::encode(f, bits) | minifloat::encode(f, bits ^ 0x80000001u) << shift;
  };
  count_mismatch(p, ConvertCheck::kE4m3, ptx::e4m3x2_from_f32(x, y), pair(minifloat::kE4m3, 8));
  count_mismatch(p, ConvertCheck::kE5m2, ptx::e5m2x2_from_f32(x, y), pair(minifloat::kE5m2, 8));
  count_mismatch(p, ConvertCheck::kE2m1, ptx::e2m1x2_from_f32(x, y), pair(minifloat::kE2m1, 4));
  count_mismatch(p, ConvertCheck::kBf16, ptx::bf16x2_from_f32(x, y),
                 minifloat::encode_bf16(bits) | minifloat::encode_bf16(bits ^ 0x80000001u) << 16);
}

// Any NaN is as good as another.
CROSSDOCK_DEVICE u32 one_nan(float x) {
  return x == x ? bit_cast<u32>(x) : minifloat::kF32Nan;
}
CROSSDOCK_DEVICE void check_decoding(const ConvertCheckParams& p, u32 code) {
  const ptx::F32x2 e4m3 = ptx::f32_from_e4m3x2(code);
  const ptx::F32x2 e5m2 = ptx::f32_from_e5m2x2(code);
  const auto want = [](minifloat::Format f, u32 c) {
    return one_nan(bit_cast<float>(minifloat::decode(f, c)));
  };
  count_mismatch(p, ConvertCheck::kFromE4m3, one_nan(e4m3.lo), want(minifloat::kE4m3, code & 255u));
  count_mismatch(p, ConvertCheck::kFromE4m3, one_nan(e4m3.hi), want(minifloat::kE4m3, code >> 8));
  count_mismatch(p, ConvertCheck::kFromE5m2, one_nan(e5m2.lo), want(minifloat::kE5m2, code & 255u));
  count_mismatch(p, ConvertCheck::kFromE5m2, one_nan(e5m2.hi), want(minifloat::kE5m2, code >> 8));
}

template <ConvertCheckConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    convert_check(CROSSDOCK_PARAMS(ConvertCheckParams, p)) {
  const u32 first = block_index() * block_size() + thread_index();
  const u32 step = grid_size() * block_size();
  for (u32 i = first; i < p.count; i += step)
    check_encoding(p, p.first + i * p.stride);
  for (u32 code = first; code < 0x10000u; code += step)
    check_decoding(p, code);
}

}  // namespace crossdock::device::kernel
