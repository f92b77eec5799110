// Bulk and tensor copies: data, zero fill, swizzle, reductions, groups, and the checks of shared
// memory.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "twin/numbers.hpp"
#include "twin/tensor_map.hpp"
#include "unit/twin/kit.hpp"

namespace crossdock::twin {
namespace {

using namespace kit;

void wait_phase(void* barrier, u32 parity) {
  while (!hk::mbarrier_try_wait(barrier, parity, Site::here()))
    spin();
}

// A ring of rows through shared memory, wrapping several times, under every mode.
TEST(TwinCopy, RowsPassThroughSharedMemory) {
  constexpr u32 kRows = 12;
  constexpr u32 kBytes = 96;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    auto world = make_world(2);
    u32* from = make(*world, 0, kRows * kBytes / 4);
    u32* to = make(*world, 1, kRows * kBytes / 4);
    for (u32 i = 0; i < kRows * kBytes / 4; ++i)
      from[i] = i * 7 + 1;
    start(*world, {.block = 1, .shared_bytes = 1024}, [=] {
      const Site s = Site::here();
      unsigned char* shared = dynamic_shared();
      for (u32 stage = 0; stage < 2; ++stage)
        hk::mbarrier_init(shared + 512 + stage * 8, 1, s);
      for (u32 row = 0; row < kRows; ++row) {
        const u32 stage = row % 2;
        void* barrier = shared + 512 + stage * 8;
        hk::bulk_wait(1, true, s);
        hk::mbarrier_arrive_expect_tx(barrier, kBytes, s);
        hk::bulk_load(shared + stage * 128, from + row * kBytes / 4, kBytes, barrier, s);
        wait_phase(barrier, row / 2 & 1);
        hk::bulk_store(to + row * kBytes / 4, shared + stage * 128, kBytes, s);
        hk::bulk_commit(s);
      }
      hk::bulk_wait(0, true, s);  // the kernel's end completes the writes
    });
    const Report report = run(*world, schedule_of(seed));
    ASSERT_TRUE(report.ok()) << "seed " << seed << ": " << report.message;
    for (u32 i = 0; i < kRows * kBytes / 4; ++i)
      ASSERT_EQ(to[i], i * 7 + 1) << "seed " << seed;
  }
}

TEST(TwinCopy, ReductionsAddElementwise) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    auto world = make_world(1);
    auto* floats = make<float>(*world, 0, 16);
    auto* halves = make<u16>(*world, 0, 16);
    start(*world, {.grid = 4, .block = 1, .shared_bytes = 256}, [=] {
      const Site s = Site::here();
      auto* f = reinterpret_cast<float*>(dynamic_shared());
      auto* h = reinterpret_cast<u16*>(dynamic_shared() + 64);
      for (u32 i = 0; i < 16; ++i) {
        f[i] = static_cast<float>(i + 1);
        h[i] = float_to_bf16(static_cast<float>(i));
      }
      hk::fence_proxy_async(s);
      hk::bulk_reduce(floats, f, 64, hk::BulkReduce::kAddF32, s);
      hk::bulk_reduce(halves, h, 32, hk::BulkReduce::kAddBf16, s);
      hk::bulk_commit(s);
      hk::bulk_wait(0, false, s);
    });
    ASSERT_TRUE(run(*world, schedule_of(seed)).ok());
    for (u32 i = 0; i < 16; ++i) {
      ASSERT_EQ(floats[i], 4.0f * static_cast<float>(i + 1));
      ASSERT_EQ(bf16_to_float(halves[i]), 4.0f * static_cast<float>(i));
    }
  }
}

struct Tile {
  u32 swizzle;
  i32 x, y;
};

TEST(TwinCopy, TensorTilesAreSwizzledAndFilledWithZeros) {
  constexpr u32 kWidth = 40;  // elements of 2 bytes: the second tile across sticks out
  constexpr u32 kHeight = 20;
  for (const Tile& tile : {Tile{0, 0, 0}, Tile{32, 16, 8}, Tile{64, 0, 16}, Tile{64, 32, 4},
                           Tile{128, -8, -3}, Tile{128, 8, 15}}) {
    const u32 box_width = tile.swizzle == 0 ? 32 : tile.swizzle / 2;
    auto world = make_world(1);
    auto* in = make<u16>(*world, 0, kWidth * kHeight);
    auto* out = make<u16>(*world, 0, kWidth * kHeight);
    auto* seen = make<u16>(*world, 0, box_width * 8);
    for (u32 i = 0; i < kWidth * kHeight; ++i)
      in[i] = static_cast<u16>(i + 1);
    TensorMapOptions options{in,           TensorElement::kU16, 2,           {kWidth, kHeight},
                             {kWidth * 2}, {box_width, 8},      tile.swizzle};
    const auto in_map = encode_tensor_map(options).value();
    options.base = out;
    const auto out_map = encode_tensor_map(options).value();
    const u32 bytes = box_width * 16;
    start(*world, {.block = 1, .shared_bytes = 4096}, [=] {
      const Site s = Site::here();
      const i32 at[2] = {tile.x, tile.y};
      unsigned char* shared = dynamic_shared();
      hk::mbarrier_init(shared + 3072, 1, s);
      hk::mbarrier_arrive_expect_tx(shared + 3072, bytes, s);
      hk::tensor_load(shared, &in_map, at, shared + 3072, s);
      wait_phase(shared + 3072, 0);
      for (u32 i = 0; i < bytes / 2; ++i) {
        // Bytes of a line are moved by 16-byte chunks, XORed with the line's number.
        const u32 linear = i * 2;
        const u32 chunk = tile.swizzle == 0 ? 0 : linear / 128 % (tile.swizzle / 16);
        seen[i] = *reinterpret_cast<u16*>(shared + (linear ^ chunk * 16));
      }
      if (tile.x < 0 || tile.y < 0) return;  // not for stores, see below
      hk::tensor_store(&out_map, at, shared, s);
      hk::bulk_commit(s);
      hk::bulk_wait(0, false, s);
    });
    const Report report = run(*world, {.seed = tile.swizzle + 1u});
    ASSERT_TRUE(report.ok()) << report.message;
    for (i32 row = 0; row < 8; ++row)
      for (i32 column = 0; column < static_cast<i32>(box_width); ++column) {
        const i32 x = tile.x + column;
        const i32 y = tile.y + row;
        const bool inside =
            x >= 0 && y >= 0 && x < static_cast<i32>(kWidth) && y < static_cast<i32>(kHeight);
        const u32 index = static_cast<u32>(y * static_cast<i32>(kWidth) + x);
        ASSERT_EQ(seen[static_cast<u32>(row) * box_width + static_cast<u32>(column)],
                  inside ? index + 1 : 0u);
        if (inside && tile.x >= 0 && tile.y >= 0) {
          ASSERT_EQ(out[index], index + 1);
        }
      }
  }
}

TEST(TwinCopy, ATensorLoadThatBeginsBetweenSixteenBytesIsAViolation) {
  for (const i32 x : {3, 8}) {  // elements of 2 bytes
    auto world = make_world(1);
    auto* memory = make<u16>(*world, 0, 128);
    const auto map =
        encode_tensor_map({memory, TensorElement::kU16, 2, {16, 8}, {32}, {8, 8}, 0}).value();
    start(*world, {.block = 1, .shared_bytes = 1024}, [=] {
      const Site s = Site::here();
      const i32 at[2] = {x, 0};
      unsigned char* shared = dynamic_shared();
      hk::mbarrier_init(shared + 512, 1, s);
      hk::mbarrier_arrive_expect_tx(shared + 512, 128, s);
      hk::tensor_load(shared, &map, at, shared + 512, s);
      wait_phase(shared + 512, 0);
    });
    EXPECT_EQ(run(*world, {}).kind, x == 8 ? "" : "tensor") << x;
  }
}

TEST(TwinCopy, ATensorStoreAtANegativeCoordinateIsAViolation) {
  auto world = make_world(1);
  auto* memory = make<u16>(*world, 0, 64);
  const auto map =
      encode_tensor_map({memory, TensorElement::kU16, 2, {8, 8}, {16}, {8, 8}, 0}).value();
  start(*world, {.block = 1, .shared_bytes = 1024}, [=] {
    const i32 at[2] = {0, -1};
    hk::tensor_store(&map, at, dynamic_shared(), Site::here());
  });
  EXPECT_EQ(run(*world, {}).kind, "tensor");
}

TEST(TwinCopy, BadTensorMapsAreErrors) {
  alignas(16) static u32 memory[64];
  const TensorMapOptions good{memory, TensorElement::kU32, 2, {8, 8}, {32}, {8, 8}, 32};
  EXPECT_TRUE(encode_tensor_map(good).ok());
  const auto code_with = [&](auto change) {
    TensorMapOptions options = good;
    change(options);
    return encode_tensor_map(options).code();
  };
  EXPECT_EQ(code_with([](auto& o) { o.rank = 6; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.box[0] = 3; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.strides[0] = 20; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.box[0] = 16; }),
            Code::kInvalidArgument);  // wider than the swizzle
  EXPECT_EQ(code_with([](auto& o) { o.swizzle_bytes = 48; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.base = memory + 1; }), Code::kInvalidArgument);
}

// One block of 64 threads that stages a tile; `order` says which fences and syncs it has.
struct Order2 {
  bool writer_fence;
  bool reader_fence;
  bool wait_before_reuse = true;
};

std::string staging_kind(const Order2& order, std::uint64_t seed) {
  auto world = make_world(1);
  u32* out = make(*world, 0, 128);
  start(*world, {.block = 64, .shared_bytes = 1024}, [=] {
    const Site s = Site::here();
    auto* tile = reinterpret_cast<u32*>(dynamic_shared());
    for (u32 round = 0; round < 2; ++round) {
      st(tile + thread_index(), round * 100 + thread_index());
      if (order.writer_fence) hk::fence_proxy_async(s);
      syncthreads();
      if (thread_index() == 0) {
        if (order.reader_fence) hk::fence_proxy_async(s);
        hk::bulk_store(out + round * 64, tile, 256, s);
        hk::bulk_commit(s);
        if (order.wait_before_reuse) hk::bulk_wait(0, true, s);
      }
      syncthreads();
    }
    if (thread_index() == 0) hk::bulk_wait(0, false, s);
  });
  return run(*world, {.seed = seed}).kind;
}

TEST(TwinSharedChecker, AcceptsFencesOnEitherSideOfTheBarrier) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    EXPECT_EQ(staging_kind({true, false}, seed), "");
    EXPECT_EQ(staging_kind({false, true}, seed), "");
  }
}

TEST(TwinSharedChecker, FindsMissingFencesAndWaits) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    EXPECT_EQ(staging_kind({false, false}, seed), "proxy");
    EXPECT_EQ(staging_kind({true, false, false}, seed), "smem-reuse");
  }
}

TEST(TwinCopy, WrongUseIsAViolation) {
  const auto kind = [](auto body) {
    auto world = make_world(1);
    u32* memory = make(*world, 0, 64);
    start(*world, {.block = 1, .shared_bytes = 256},
          [=] { body(memory, dynamic_shared(), Site::here()); });
    return run(*world, {}).kind;
  };
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_store(g, s, 8, at); }), "bulk");
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_store(g + 1, s, 16, at); }),
            "bulk");
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_store(g, s, 512, at); }),
            "out-of-bounds");
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_store(g + 60, s, 64, at); }),
            "out-of-bounds");
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_load(s, g, 16, s + 64, at); }),
            "mbarrier");
  EXPECT_EQ(kind([](u32* g, unsigned char* s, Site at) { hk::bulk_store(g, s, 64, at); }), "exit");
  EXPECT_EQ(kind([](u32* g, unsigned char*, Site at) { hk::load(g, 8, {}, at); }), "");
  EXPECT_EQ(kind([](u32* g, unsigned char*, Site at) { hk::load(g + 1, 8, {}, at); }),
            "misaligned");
}

// cp.async: groups of a thread arrive when it waits for them, in order; zeros where there is no
// source.
TEST(TwinCopy, CopiesOfThreadsArriveWhenTheyAreWaitedFor) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    auto world = make_world(1);
    u32* from = make(*world, 0, 8);
    u32* seen = make(*world, 0, 12);
    for (u32 i = 0; i < 8; ++i)
      from[i] = i + 1;
    start(*world, {.block = 1, .shared_bytes = 64}, [=] {
      const Site s = Site::here();
      auto* shared = reinterpret_cast<u32*>(dynamic_shared());
      hk::copy_async(shared, from, 16, s);
      hk::copy_async_commit(s);
      hk::copy_async(shared + 4, from + 5, 4, s);
      hk::copy_async(shared + 8, nullptr, 16, s);
      hk::copy_async_commit(s);
      hk::copy_async_wait(1, s);
      st(seen, ld(shared + 3));
      st(seen + 1, ld(shared + 4));  // not yet
      hk::copy_async_wait(0, s);
      st(seen + 2, ld(shared + 4));
      st(seen + 3, ld(shared + 9));
    });
    ASSERT_TRUE(run(*world, schedule_of(seed)).ok());
    EXPECT_EQ(seen[0], 4u);
    EXPECT_EQ(seen[1], 0xffffffffu);
    EXPECT_EQ(seen[2], 6u);
    EXPECT_EQ(seen[3], 0u);
  }
}

TEST(TwinCopy, CopiesOfThreadsWantAFenceBeforeTheAsyncProxy) {
  for (const bool fenced : {false, true}) {
    auto world = make_world(1);
    u32* from = make(*world, 0, 4);
    u32* to = make(*world, 0, 4);
    start(*world, {.block = 1, .shared_bytes = 64}, [=] {
      const Site s = Site::here();
      hk::copy_async(dynamic_shared(), from, 16, s);
      hk::copy_async_commit(s);
      hk::copy_async_wait(0, s);
      if (fenced) hk::fence_proxy_async(s);
      hk::bulk_store(to, dynamic_shared(), 16, s);
      hk::bulk_commit(s);
      hk::bulk_wait(0, false, s);
    });
    const Report report = run(*world, schedule_of(1));
    EXPECT_EQ(report.ok(), fenced) << report.message;
    EXPECT_EQ(report.kind, fenced ? "" : "proxy");
  }
}

}  // namespace
}  // namespace crossdock::twin
