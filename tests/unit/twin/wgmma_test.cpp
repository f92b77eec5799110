// wgmma against a plain product, for every operand layout the descriptors can say; the layouts are
// built here from the ISA's description, not from device/crossdock. Also the number formats.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "twin/numbers.hpp"
#include "unit/twin/kit.hpp"

namespace crossdock::twin {
namespace {

using namespace kit;
using hk::Element;

constexpr u64 descriptor(u32 address, u32 leading, u32 stride, u32 mode) {
  return u64{(address & 0x3ffff) >> 4} | u64{leading >> 4} << 16 | u64{stride >> 4} << 32 |
         u64{mode} << 62;
}

// How one operand lies in shared memory: `lines` rows of A or columns of B, 32 bytes of K.
struct Layout {
  const char* name;
  u32 mode;  // 0 none, 1: 128, 2: 64, 3: 32 bytes
  bool mn_major;
  u32 width() const { return mode == 0 ? 16 : 256u >> mode; }
};
constexpr Layout kLayouts[] = {{"k128", 1, false},    {"k64", 2, false},    {"k32", 3, false},
                               {"k_plain", 0, false}, {"mn128", 1, true},   {"mn64", 2, true},
                               {"mn32", 3, true},     {"mn_plain", 0, true}};

struct Placed {
  u64 descriptor;
  std::function<u32(u32 line, u32 k)> place;  // byte offset of an element from the tile's base
};

// The tile begins at shared address `address`, a multiple of 1024.
Placed place(const Layout& layout, u32 address, u32 lines, u32 bytes) {
  const u32 w = layout.width();
  const auto swizzled = [w](u32 at) { return w == 16 ? at : at ^ (at / 128 % (w / 16) * 16); };
  if (!layout.mn_major) {
    const u32 stride = w == 16 ? 256 : 8 * w;  // plain: two core matrices of 128 bytes side by side
    return {descriptor(address, w == 16 ? 128 : 16, stride, layout.mode), [=](u32 line, u32 k) {
              const u32 byte = k * bytes;
              if (w == 16) return line / 8 * 256 + byte / 16 * 128 + line % 8 * 16 + byte % 16;
              return swizzled(line * w + byte);
            }};
  }
  if (w == 16)  // core matrices of 8 elements by 8 of K; along the lines first
    return {descriptor(address, lines / 8 * 128, 128, 0), [=](u32 line, u32 k) {
              return k / 8 * (lines / 8 * 128) + line / 8 * 128 + k % 8 * 16 + line % 8 * 2;
            }};
  const u32 atom = 8 * w;           // 8 of K, w bytes of lines
  const u32 atoms = lines * 2 / w;  // along the lines
  return {descriptor(address, atom, atoms * atom, layout.mode), [=](u32 line, u32 k) {
            const u32 byte = line * 2;
            return swizzled(k / 8 * atoms * atom + byte / w * atom + k % 8 * w + byte % w);
          }};
}

void put(unsigned char* at, Element e, u32 value) {  // value 0..7, the same set in all formats
  constexpr u8 kE4m3[] = {0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e};
  constexpr u8 kE5m2[] = {0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47};
  if (e == Element::kE4m3) {
    *at = kE4m3[value];
  } else if (e == Element::kE5m2) {
    *at = kE5m2[value];
  } else {
    const u16 bits = e == Element::kBf16 ? float_to_bf16(static_cast<float>(value))
                                         : float_to_f16(static_cast<float>(value));
    __builtin_memcpy(at, &bits, 2);
  }
}
u32 a_value(u32 row, u32 k) {
  return (row * 3 + k * 5 + row * k) % 8;
}
u32 b_value(u32 column, u32 k) {
  return (column * 7 + k * 2 + column * k + 1) % 8;
}

struct Case {
  u32 n;
  Element element;
  Layout a;
  Layout b;
};

std::string run_case(const Case& c, std::uint64_t seed) {
  const u32 bytes = c.element == Element::kBf16 || c.element == Element::kF16 ? 2 : 1;
  const u32 depth = 32 / bytes;
  auto world = make_world(1);
  auto* out = make<float>(*world, 0, 64 * c.n);
  constexpr u32 kB = 16384;
  start(*world, {.block = 128, .shared_bytes = kB + 65536}, [=] {
    const Site s = Site::here();
    unsigned char* shared = dynamic_shared();
    const Placed a = place(c.a, hk::shared_address(shared), 64, bytes);
    const Placed b = place(c.b, hk::shared_address(shared + kB), c.n, bytes);
    if (thread_index() == 0)
      for (u32 k = 0; k < depth; ++k) {
        for (u32 row = 0; row < 64; ++row)
          put(shared + a.place(row, k), c.element, a_value(row, k));
        for (u32 column = 0; column < c.n; ++column)
          put(shared + kB + b.place(column, k), c.element, b_value(column, k));
      }
    hk::fence_proxy_async(s);
    syncthreads();
    float d[128];
    for (float& x : d)
      x = 1.0f;
    hk::Wgmma op{c.n, c.element, c.element, true};
    op.transpose_a = c.a.mn_major;
    op.transpose_b = c.b.mn_major;
    hk::wgmma_fence(s);
    hk::wgmma_ss(d, a.descriptor, b.descriptor, op, s);
    op.accumulate = true;  // twice, chained
    hk::wgmma_ss(d, a.descriptor, b.descriptor, op, s);
    hk::wgmma_commit(s);
    hk::wgmma_wait(0, s);
    const u32 t = thread_index();
    for (u32 i = 0; i < c.n / 2; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2);
      hk::store_as(out + row * c.n + i / 4 * 8 + t % 4 * 2 + i % 2, d[i], kWeak, s);
    }
  });
  const Report report = run(*world, {.seed = seed});
  if (!report.ok()) return report.message;
  for (u32 row = 0; row < 64; ++row)
    for (u32 column = 0; column < c.n; ++column) {
      u32 sum = 0;
      for (u32 k = 0; k < depth; ++k)
        sum += a_value(row, k) * b_value(column, k);
      if (out[row * c.n + column] != static_cast<float>(1 + 2 * sum))
        return "row " + std::to_string(row) + " column " + std::to_string(column) + ": " +
               std::to_string(out[row * c.n + column]) + " instead of " +
               std::to_string(1 + 2 * sum);
    }
  return {};
}

TEST(TwinWgmma, EveryOperandLayout) {
  std::uint64_t seed = 0;
  for (const Layout& a : kLayouts)
    for (const Layout& b : kLayouts)
      EXPECT_EQ(run_case({64, Element::kBf16, a, b}, ++seed), "") << a.name << " " << b.name;
}

TEST(TwinWgmma, EveryTypeAndSeveralWidths) {
  std::uint64_t seed = 0;
  for (Element e : {Element::kBf16, Element::kF16, Element::kE4m3, Element::kE5m2})
    for (u32 n : {8u, 64u, 96u, 128u, 256u})
      EXPECT_EQ(run_case({n, e, kLayouts[0], kLayouts[0]}, ++seed), "") << n;
}

TEST(TwinWgmma, OperandAInRegisters) {
  auto world = make_world(1);
  auto* out = make<float>(*world, 0, 64 * 8);
  start(*world, {.block = 128, .shared_bytes = 4096}, [=] {
    const Site s = Site::here();
    unsigned char* shared = dynamic_shared();
    const Placed b = place(kLayouts[0], hk::shared_address(shared), 8, 2);
    const u32 t = thread_index();
    if (t == 0)
      for (u32 k = 0; k < 16; ++k)
        for (u32 column = 0; column < 8; ++column)
          put(shared + b.place(column, k), Element::kBf16, b_value(column, k));
    hk::fence_proxy_async(s);
    syncthreads();
    u32 a[4];
    for (u32 r = 0; r < 4; ++r) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8;
      const u32 k = t % 4 * 2 + r / 2 * 8;
      a[r] = float_to_bf16(static_cast<float>(a_value(row, k))) |
             static_cast<u32>(float_to_bf16(static_cast<float>(a_value(row, k + 1)))) << 16;
    }
    float d[4];
    hk::wgmma_fence(s);
    hk::wgmma_rs(d, a, b.descriptor, {8, Element::kBf16, Element::kBf16, false}, s);
    hk::wgmma_commit(s);
    hk::wgmma_wait(0, s);
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2);
      hk::store_as(out + row * 8 + t % 4 * 2 + i % 2, d[i], kWeak, s);
    }
  });
  const Report report = run(*world, {.seed = 3});
  ASSERT_TRUE(report.ok()) << report.message;
  for (u32 row = 0; row < 64; ++row)
    for (u32 column = 0; column < 8; ++column) {
      u32 sum = 0;
      for (u32 k = 0; k < 16; ++k)
        sum += a_value(row, k) * b_value(column, k);
      ASSERT_EQ(out[row * 8 + column], static_cast<float>(sum));
    }
}

std::string wrong_use(const std::function<void(float*, Site)>& body) {
  auto world = make_world(1);
  start(*world, {.block = 128, .shared_bytes = 8192}, [&body] {
    float d[128] = {};
    body(d, Site::here());
  });
  return run(*world, {.seed = 1}).kind;
}

TEST(TwinWgmma, WrongUseIsAViolation) {
  const hk::Wgmma good{8, Element::kBf16, Element::kBf16, false};
  const u64 a = descriptor(1024, 16, 1024, 1);
  EXPECT_EQ(wrong_use([=](float* d, Site s) { hk::wgmma_ss(d, a, a, good, s); }),
            "wgmma");  // no fence
  EXPECT_EQ(wrong_use([=](float* d, Site s) {
              hk::wgmma_fence(s);
              hk::wgmma_ss(d, a, a + thread_index() % 2, good, s);
            }),
            "wgmma");
  EXPECT_EQ(wrong_use([=](float* d, Site s) {
              hk::wgmma_fence(s);
              hk::wgmma_ss(d, a, descriptor(1024 + 8192, 16, 1024, 1), good, s);
            }),
            "out-of-bounds");
  EXPECT_EQ(wrong_use([=](float* d, Site s) {
              hk::wgmma_fence(s);
              hk::wgmma_ss(d, a, a, {12, Element::kBf16, Element::kBf16, false}, s);
            }),
            "wgmma");
}

TEST(TwinWgmma, AccumulatorsAreUnreadableUntilTheWait) {
  const auto trap_if_readable = [](float* d, Site s) {
    const u64 a = descriptor(1024, 16, 1024, 1);
    hk::wgmma_fence(s);
    hk::wgmma_ss(d, a, a, {8, Element::kBf16, Element::kBf16, false}, s);
    hk::wgmma_commit(s);
    if (!std::isnan(d[0])) hk::trap("readable", s);
    hk::wgmma_wait(0, s);
  };
  auto world = make_world(1);
  start(*world, {.block = 128, .shared_bytes = 8192}, [&] {
    float d[4] = {};
    trap_if_readable(d, Site::here());
  });
  const Report report = run(*world, {.seed = 1, .async_mode = AsyncMode::kLate});
  EXPECT_TRUE(report.ok()) << report.message;
}

TEST(TwinNumbers, FormatsMatchTheirDefinitions) {
  EXPECT_EQ(e4m3_to_float(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_float(0x01), std::ldexp(1.0f, -9));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xff)));
  EXPECT_EQ(e5m2_to_float(0x7b), 57344.0f);
  EXPECT_EQ(float_to_bf16(1.00390625f), 0x3f80);  // a tie goes to even
  EXPECT_EQ(float_to_bf16(1.01171875f), 0x3f82);
  EXPECT_EQ(float_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7c00);
  for (u32 bits = 0; bits < 0x7c00; ++bits)
    ASSERT_EQ(float_to_f16(f16_to_float(static_cast<u16>(bits))), bits);
}

}  // namespace
}  // namespace crossdock::twin
