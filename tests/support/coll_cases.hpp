// What groups of collectives have to do on any backend: each case runs rounds on a rig and compares
// every byte. The unit tests run them on the CPU, the GPU tests on GPUs. One thread plays all
// ranks, so memory is made and filled before a stream waits for a rank whose turn is yet to come.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "support/coll_rig.hpp"

namespace crossdock::testing {

inline coll::Options coll_options() {
  return {.session_bytes = 64 << 10,
          .gathers = 4,
          .reduce = true,
          .tensor_bytes = 8 << 10,
          .inflight = 2,
          .pipeline = coll::Pipeline::kAll,
          .shard_rows = 37,
          .row_bytes = 208,
          .fetch_sms = 3,
          .wait = std::chrono::seconds(20)};
}

// Sessions of two gathers, one of them of an input that is made in the window.
inline void check_gathers(CollRig& rig, u32 rounds, u64 bytes) {
  const u32 world = rig.world();
  for (u32 round = 0; round < rounds; ++round) {
    std::vector<u8*> inputs;
    std::vector<u8*> outputs;
    std::vector<u8*> others;
    for (u32 r = 0; r < world; ++r) {
      inputs.push_back(rig.memory(r, bytes_of(r, round, bytes)));
      outputs.push_back(rig.memory<u8>(r, world * bytes));
      others.push_back(rig.memory<u8>(r, world * 16));
    }
    for (u32 r = 0; r < world; ++r) {
      auto session = rig.group().begin(r);
      ASSERT_TRUE(session.ok()) << session.error().describe();
      auto view = session->input(16);
      ASSERT_TRUE(view.ok()) << view.error().describe();
      // All peers have ended the session before, so the place is free at once.
      rig.write(r, static_cast<u8*>(*view), bytes_of(r, round + 100, 16));
      EXPECT_OK(session->all_gather(inputs[r], outputs[r], bytes));
      EXPECT_OK(session->all_gather(*view, others[r], 16));
      EXPECT_OK(session->end());
    }
    ASSERT_NO_FATAL_FAILURE(rig.finish());
    for (u32 r = 0; r < world; ++r)
      for (u32 from = 0; from < world; ++from) {
        ASSERT_EQ(rig.read(r, outputs[r] + from * bytes, bytes), bytes_of(from, round, bytes))
            << "round " << round << " at rank " << r << " from " << from;
        ASSERT_EQ(rig.read(r, others[r] + from * 16, 16), bytes_of(from, round + 100, 16));
      }
  }
}

// Small whole numbers: their sums are exact in either type.
inline float value_of(u32 rank, u32 to, u64 i) {
  return static_cast<float>((rank * 5 + to * 3 + i) % 9) - 4.0F;
}
template <class T>
T encode(float value) {
  if constexpr (sizeof(T) == 2)
    return static_cast<T>(std::bit_cast<u32>(value) >> 16);
  else
    return std::bit_cast<T>(value);
}

template <class T>
void check_scatters(CollRig& rig, u32 rounds, u64 count) {
  const u32 world = rig.world();
  const auto type = sizeof(T) == 2 ? coll::DataType::kBf16 : coll::DataType::kF32;
  for (u32 round = 0; round < rounds; ++round) {
    std::vector<T*> outputs;
    for (u32 r = 0; r < world; ++r) {
      std::vector<T> values;
      for (u32 to = 0; to < world; ++to)
        for (u64 i = 0; i < count; ++i)
          values.push_back(encode<T>(value_of(r + round, to, i)));
      outputs.push_back(rig.memory<T>(r, count));
      auto session = rig.group().begin(r);
      ASSERT_TRUE(session.ok()) << session.error().describe();
      EXPECT_OK(session->reduce_scatter(rig.memory(r, values), outputs[r], count, type));
    }
    ASSERT_NO_FATAL_FAILURE(rig.finish());
    for (u32 r = 0; r < world; ++r) {
      std::vector<T> expected;
      for (u64 i = 0; i < count; ++i) {
        float sum = 0;
        for (u32 from = 0; from < world; ++from)
          sum += value_of(from + round, r, i);
        expected.push_back(encode<T>(sum));
      }
      ASSERT_EQ(rig.read(r, outputs[r], count), expected) << "round " << round << " rank " << r;
    }
  }
}

// Every rank sends `tensors` tensors to the rank `step` after it, more than are in flight at once.
inline void check_pipeline(CollRig& rig, u32 step, u32 tensors) {
  const u32 world = rig.world();
  std::vector<std::vector<u8*>> inputs(world);
  std::vector<std::vector<u8*>> outputs(world);
  for (u32 t = 0; t < tensors; ++t)
    for (u32 r = 0; r < world; ++r) {
      inputs[r].push_back(rig.memory(r, bytes_of(r, t, 16 * (1 + t % 3))));
      outputs[r].push_back(rig.memory<u8>(r, 48));
    }
  for (u32 t = 0; t < tensors; ++t)
    for (u32 r = 0; r < world; ++r) {
      const u64 bytes = 16 * (1 + t % 3);
      EXPECT_OK(rig.group().send(r, (r + step) % world, inputs[r][t], bytes));
      EXPECT_OK(rig.group().receive(r, (r + world - step) % world, outputs[r][t], bytes));
    }
  ASSERT_NO_FATAL_FAILURE(rig.finish());
  for (u32 r = 0; r < world; ++r)
    for (u32 t = 0; t < tensors; ++t) {
      const u64 bytes = 16 * (1 + t % 3);
      ASSERT_EQ(rig.read(r, outputs[r][t], bytes), bytes_of((r + world - step) % world, t, bytes))
          << "tensor " << t << " at rank " << r;
    }
}

// All rows written twice, then any of them fetched by every rank, some of them none.
template <class Number>
void check_rows(CollRig& rig, u32 count) {
  const u32 world = rig.world();
  const auto& options = rig.group().core().options();
  const u64 row = options.row_bytes;
  std::vector<u8*> outputs;
  std::vector<std::vector<Number>> numbers(world);
  std::vector<Number*> lists;
  std::vector<u8*> rows[2];
  for (u32 r = 0; r < world; ++r) {
    for (u32 i = 0; i < count; ++i)
      numbers[r].push_back(
          i % 11 == 5 ? Number(-1)
                      : static_cast<Number>((i * 7919 + r * 13) % (options.shard_rows * world)));
    lists.push_back(rig.memory(r, numbers[r]));
    outputs.push_back(rig.memory<u8>(r, count * row));
    for (const u32 round : {0u, 1u})
      rows[round].push_back(rig.memory(r, bytes_of(r, round, options.shard_rows * row)));
  }
  for (const u32 round : {0u, 1u})
    for (u32 r = 0; r < world; ++r)
      EXPECT_OK(rig.group().write_rows(r, 0, rows[round][r], options.shard_rows));
  for (u32 r = 0; r < world; ++r)
    EXPECT_OK(rig.group().fetch_rows(r, lists[r], count, outputs[r]));
  ASSERT_NO_FATAL_FAILURE(rig.finish());
  for (u32 r = 0; r < world; ++r) {
    const std::vector<u8> got = rig.read(r, outputs[r], count * row);
    for (u32 i = 0; i < count; ++i)
      for (u64 b = 0; b < row; ++b) {
        const auto number = static_cast<u64>(numbers[r][i]);
        const u8 expected = numbers[r][i] == Number(-1)
                                ? u8{0}
                                : byte_of(static_cast<u32>(number / options.shard_rows), 1,
                                          number % options.shard_rows * row + b);
        ASSERT_EQ(got[i * row + b], expected) << "row " << i << " byte " << b << " at rank " << r;
      }
  }
}

}  // namespace crossdock::testing
