// wgmma_check in the twin: every width, both element types, A from shared memory and from
// registers, tiles by ordinary loads and by tensor map, against a plain product of small integers,
// which are exact in every format. Also convert_check, which must find nothing here.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <gtest/gtest.h>

#include <crossdock/kernel/convert_check.cuh>
#include <crossdock/kernel/wgmma_check.cuh>

#include "ranks.hpp"
#include "twin/tensor_map.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kBlocks = 2;

// Small integers, exact in e4m3, so that the order of the additions does not matter.
float element(u32 matrix, u32 row, u32 k) {
  return static_cast<float>(mix(matrix * 0x51ed27u + row * 1021 + k) % 9) - 4.0f;
}

template <WgmmaCheckConfig kConfig>
struct Product {
  static constexpr u32 kElementBytes = kConfig.fp8 ? 1 : 2;
  static constexpr u32 kDepth = kBlocks * kernel::kWgmmaRowBytes / kElementBytes;

  static void fill(u8* to, u32 matrix, u32 rows) {
    for (u32 row = 0; row < rows; ++row)
      for (u32 k = 0; k < kDepth; ++k) {
        const float x = element(matrix, row, k);
        const u32 code =
            kConfig.fp8 ? ptx::e4m3x2_from_f32(x, 0) & 0xff : ptx::bf16x2_from_f32(x, 0) & 0xffff;
        std::memcpy(to + (u64{row} * kDepth + k) * kElementBytes, &code, kElementBytes);
      }
  }
  static TensorMap map(u8* base, u32 rows) {
    twin::TensorMapOptions options;
    options.base = base;
    options.element = kConfig.fp8 ? twin::TensorElement::kU8 : twin::TensorElement::kBf16;
    options.dims = {kDepth, rows};
    options.strides = {u64{kDepth} * kElementBytes};
    options.box = {kernel::kWgmmaRowBytes / kElementBytes, rows};
    options.swizzle_bytes = 128;
    auto made = twin::encode_tensor_map(options);
    EXPECT_TRUE(made.ok());
    return made.ok() ? made.value() : TensorMap{};
  }

  static void check(u32 seeds) {
    SCOPED_TRACE(::testing::Message()
                 << "n " << kConfig.n << " fp8 " << kConfig.fp8 << " registers "
                 << kConfig.a_registers << " map " << kConfig.tensor_map);
    Ranks ranks(1, {});
    u8* a = ranks.local<u8>(0, 64 * kDepth * kElementBytes, 1024);
    u8* b = ranks.local<u8>(0, u64{kConfig.n} * kDepth * kElementBytes, 1024);
    fill(a, 1, 64);
    fill(b, 2, kConfig.n);
    WgmmaCheckParams p{};
    if (kConfig.tensor_map) {
      p.a_map = map(a, 64);
      p.b_map = map(b, kConfig.n);
    }
    p.a = a;
    p.b = b;
    p.d = ranks.local<float>(0, 64 * kConfig.n);
    p.k_blocks = kBlocks;
    for (u32 seed = 1; seed <= seeds; ++seed) {
      std::memset(p.d, 0xff, 64 * kConfig.n * sizeof(float));
      ranks.launch(0, {1, 128, kernel::wgmma_check_shared_bytes(kConfig.n), "wgmma_check"},
                   kernel::wgmma_check<kConfig>, p);
      ASSERT_NO_FATAL_FAILURE(ranks.run(schedule(seed)));
      for (u32 row = 0; row < 64; ++row)
        for (u32 column = 0; column < kConfig.n; ++column) {
          float want = 0;
          for (u32 k = 0; k < kDepth; ++k)
            want += element(1, row, k) * element(2, column, k);
          ASSERT_EQ(p.d[row * kConfig.n + column], want)
              << "seed " << seed << " row " << row << " column " << column;
        }
    }
  }
};

template <u32 kN>
void check_width() {
  Product<WgmmaCheckConfig{.n = kN, .fp8 = true}>::check(2);
  Product<WgmmaCheckConfig{.n = kN, .fp8 = true, .a_registers = true}>::check(2);
  Product<WgmmaCheckConfig{.n = kN, .fp8 = false}>::check(2);
  Product<WgmmaCheckConfig{.n = kN, .fp8 = false, .a_registers = true}>::check(2);
}

TEST(Wgmma, EveryWidthGivesTheProduct) {
  check_width<8>();
  check_width<16>();
  check_width<32>();
  check_width<64>();
  check_width<96>();
  check_width<128>();
  check_width<192>();
  check_width<256>();
}

TEST(Wgmma, TilesByTensorMap) {
  Product<WgmmaCheckConfig{.n = 128, .fp8 = true, .tensor_map = true}>::check(kSeeds);
  Product<WgmmaCheckConfig{.n = 64, .fp8 = false, .a_registers = true, .tensor_map = true}>::check(
      kSeeds);
}

TEST(ConvertCheck, FindsNothingInTheTwin) {
  Ranks ranks(1, {});
  ConvertCheckParams p{ranks.local<u32>(0, kConvertChecks), 0, 7777777, 500};
  ranks.launch(0, {1, 64, 0, "convert_check"}, kernel::convert_check<{.threads = 64}>, p);
  ASSERT_NO_FATAL_FAILURE(ranks.run(schedule(1)));
  for (u32 i = 0; i < kConvertChecks; ++i)
    EXPECT_EQ(p.mismatches[i], 0u) << "check " << i;
}

}  // namespace
}  // namespace crossdock::testing
