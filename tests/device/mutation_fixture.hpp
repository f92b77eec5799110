// Runs the kernels of mutation_kernels.cuh on a small world and judges the outcome. Test code; one
// thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "mutation_kernels.cuh"
#include "twin/launch.hpp"

namespace crossdock::testing {

struct Verdict {
  bool wrong = false;
  std::string why;  // "wrong data", or the report's kind and message
};

template <class T>
T* take(twin::World& world, u32 rank, u64 count) {
  auto p = world.allocate(static_cast<int>(rank), count * sizeof(T), 1024);
  EXPECT_TRUE(p.ok()) << p.error().describe();
  return static_cast<T*>(p.value());
}

inline Verdict judge(Result<twin::Report> report) {
  EXPECT_TRUE(report.ok());
  if (report->ok()) return {};
  return {true, report->kind + ": " + report->message};
}

struct ExchangeShape {
  u32 world = 3;
  u32 blocks = 2;
  u32 rows = 32;  // 8 a sending warp: the ring of 2 stages wraps 4 times a round
  u32 rounds = 2;
};

inline Verdict run_exchange(Bug bug, const twin::Schedule& schedule,
                            const ExchangeShape& shape = {}) {
  auto made = twin::World::create({.ranks = static_cast<int>(shape.world), .heap_bytes = 1 << 20});
  EXPECT_TRUE(made.ok()) << made.error().describe();
  twin::World& world = **made;
  std::vector<ExchangeParams> params(shape.world);
  for (u32 rank = 0; rank < shape.world; ++rank) {
    ExchangeParams& p = params[rank];
    auto* window =
        take<ExchangeWindow>(world, rank, 1);  // first, so at the same offset on all ranks
    p = {rank,
         shape.world,
         shape.rows,
         shape.rounds,
         bug,
         reinterpret_cast<u8*>(window),
         world.heap_bytes(),
         nullptr,
         nullptr,
         nullptr,
         nullptr};
    auto* input = take<u32>(world, rank, u64{shape.rounds} * shape.rows * kRowBytes / 4);
    for (u32 round = 0; round < shape.rounds; ++round)
      for (u32 row = 0; row < shape.rows; ++row)
        for (u32 i = 0; i < kRowBytes / 4; ++i)
          input[(u64{round} * shape.rows + row) * (kRowBytes / 4) + i] =
              row_word(rank, round, row, i);
    p.input = reinterpret_cast<u8*>(input);
    p.slots = take<u32>(world, rank, shape.rows);
    p.ready = take<u32>(world, rank, 1);
    p.errors = take<u32>(world, rank, 1);
  }
  for (u32 rank = 0; rank < shape.world; ++rank) {
    auto launched = world.launch({.rank = static_cast<int>(rank),
                                  .grid = shape.blocks,
                                  .block = kExchangeThreads,
                                  .shared_bytes = kExchangeShared,
                                  .name = "exchange"},
                                 exchange, params[rank]);
    EXPECT_TRUE(launched.ok()) << launched.error().describe();
  }
  Verdict verdict = judge(world.run(schedule));
  for (const ExchangeParams& p : params)
    if (!verdict.wrong && *p.errors != 0) verdict = {true, "wrong data"};
  return verdict;
}

// Small integers as e4m3: 0..7, exact in products and sums.
inline u8 small_e4m3(u32 v) {
  constexpr u8 kCodes[] = {0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e};
  return kCodes[v];
}

inline Verdict run_multiply(Bug bug, const twin::Schedule& schedule, u32 blocks = 8) {
  auto made = twin::World::create({.ranks = 1, .heap_bytes = 1 << 20});
  EXPECT_TRUE(made.ok()) << made.error().describe();
  twin::World& world = **made;
  auto* a = take<u8>(world, 0, u64{blocks} * kTileBytes);
  auto* b = take<u8>(world, 0, u64{blocks} * kTileBytes);
  auto* d = take<float>(world, 0, 64 * 64);
  std::vector<u32> sums(64 * 64);
  const auto value = [](u32 which, u32 block, u32 row, u32 k) {
    return (row * 3 + k * 5 + block * 7 + which * 11 + row * k) % 8;
  };
  for (u32 block = 0; block < blocks; ++block)
    for (u32 row = 0; row < 64; ++row)
      for (u32 k = 0; k < 128; ++k) {
        const u32 at = block * kTileBytes + ptx::swizzled(ptx::Swizzle::k128, row * 128 + k);
        a[at] = small_e4m3(value(0, block, row, k));
        b[at] = small_e4m3(value(1, block, row, k));
        for (u32 column = 0; column < 64; ++column)
          sums[row * 64 + column] += value(0, block, row, k) * value(1, block, column, k);
      }
  auto launched =
      world.launch({.block = kMultiplyThreads, .shared_bytes = kMultiplyShared, .name = "multiply"},
                   multiply, MultiplyParams{a, b, d, blocks, bug});
  EXPECT_TRUE(launched.ok()) << launched.error().describe();
  Verdict verdict = judge(world.run(schedule));
  for (u32 i = 0; i < 64 * 64 && !verdict.wrong; ++i)
    if (!(d[i] == static_cast<float>(sums[i]))) verdict = {true, "wrong data"};
  return verdict;
}

}  // namespace crossdock::testing
