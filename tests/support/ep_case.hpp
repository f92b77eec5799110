// A case of expert parallelism and its reference: inputs of all ranks made from a seed, and plain
// C++ that says where every token has to arrive and what combine has to give back. Used by the
// twin's tests and, on memory copied back, by those on GPUs. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/probe.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::testing {

using namespace crossdock::device;

enum class EpRoutingKind { kRandom, kOneExpert, kAllMasked, kSkewed };

struct EpCase {
  u32 world = 4;
  u32 experts = 16;
  u32 top_k = 4;
  u32 max_tokens = 32;
  u32 row_bytes = 64;  // of the input
  u32 scale_bytes = 0;
  bool scales_by_column = false;
  bool cast = false;
  bool cast_ue8m0 = false;
  bool wide_ids = false;
  bool weights = true;
  u32 combine_bytes = 64;  // of a row of expert outputs
  bool combine_weights = true;
  u32 biases = 0;
  EpRoutingKind routing = EpRoutingKind::kRandom;
  std::vector<u32> tokens = {};  // of each rank; empty: max_tokens, one less, ...
  std::vector<u32> blocks = {};  // of each rank; empty: two
  bool fixed = false;            // rows of source s begin at place s * max_tokens
  // Through the API:
  bool push = false;  // combine
  bool overlap = false;
  bool host_counts = true;

  [[nodiscard]] u32 tokens_of(u32 rank) const {
    if (!tokens.empty()) return tokens[rank % tokens.size()];
    return rank % (max_tokens + 1) > max_tokens ? 0 : max_tokens - rank % (max_tokens + 1);
  }
  [[nodiscard]] u32 blocks_of(u32 rank) const {
    return blocks.empty() ? 2 : blocks[rank % blocks.size()];
  }
  [[nodiscard]] u32 most_blocks() const {
    u32 most = 0;
    for (u32 rank = 0; rank < world; ++rank)
      most = std::max(most, blocks_of(rank));
    return most;
  }
  [[nodiscard]] EpExperts expert_map() const { return EpExperts::make(experts, world); }
  // The place of a source's first row, where it is known beforehand; else `row`.
  [[nodiscard]] u32 first_row(u32 source, u32 row) const {
    return fixed ? source * max_tokens : row;
  }
  [[nodiscard]] u32 values() const { return row_bytes / 2; }
  [[nodiscard]] EpOutputLayout output() const {
    const u32 groups = ceil_div(values(), kEpScaleGroup);
    const u32 cast_scales = round_up(groups * (cast_ue8m0 ? 1 : 4), 16u);
    return ep_output_layout({.capacity = world * max_tokens,
                             .row_bytes = cast ? values() : row_bytes,
                             .scale_bytes = cast ? cast_scales : scale_bytes,
                             .scales_by_column = scales_by_column,
                             .top_k = top_k,
                             .cast_ue8m0 = cast_ue8m0});
  }
};

// The tokens of one rank.
struct EpTokensIn {
  u32 tokens = 0;
  std::vector<u8> rows;
  std::vector<u8> scales;
  std::vector<i64> ids;
  std::vector<float> weights;
};

inline u16 bf16_of(float value) {
  return static_cast<u16>(minifloat::encode_bf16(bit_cast<u32>(value)));
}
inline float from_bf16(u16 bits) {
  return bit_cast<float>(u32{bits} << 16);
}

class EpInputs {
 public:
  EpInputs(const EpCase& c, u32 seed) : case_(c) {
    std::mt19937 random(seed * 7919 + c.world);
    for (u32 rank = 0; rank < c.world; ++rank)
      ranks_.push_back(make(rank, random));
  }
  [[nodiscard]] const EpTokensIn& of(u32 rank) const { return ranks_[rank]; }
  [[nodiscard]] EpTokensIn& of(u32 rank) { return ranks_[rank]; }

  // Whether the token goes to `destination`.
  [[nodiscard]] bool goes_to(u32 source, u32 token, u32 destination) const {
    const auto map = case_.expert_map();
    for (u32 k = 0; k < case_.top_k; ++k) {
      const i64 id = ranks_[source].ids[u64{token} * case_.top_k + k];
      if (id < 0) continue;
      const auto local = id - map.first(destination);
      if (local >= 0 && local < map.count(destination)) return true;
    }
    return false;
  }

  // What is left when `gone` is masked: none of its tokens, and no choices of its experts.
  [[nodiscard]] EpInputs without(u32 gone) const {
    EpInputs out = *this;
    out.of(gone).tokens = 0;
    const auto map = case_.expert_map();
    for (EpTokensIn& in : out.ranks_)
      for (i64& id : in.ids)
        if (id >= 0 && map.owner(static_cast<u32>(id)) == gone) id = -1;
    return out;
  }

 private:
  [[nodiscard]] EpTokensIn make(u32 rank, std::mt19937& random) const {
    EpTokensIn in;
    in.tokens = case_.tokens_of(rank);
    in.rows.resize(u64{in.tokens} * case_.row_bytes);
    in.scales.resize(u64{in.tokens} * case_.scale_bytes);
    if (case_.cast) {
      fill_bf16(in.rows, random);
    } else {
      for (u8& byte : in.rows)
        byte = static_cast<u8>(random());
    }
    for (u8& byte : in.scales)
      byte = static_cast<u8>(random());
    for (u32 t = 0; t < in.tokens; ++t)
      for (u32 k = 0; k < case_.top_k; ++k) {
        in.ids.push_back(pick(random));
        in.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
      }
    return in;
  }
  [[nodiscard]] i64 pick(std::mt19937& random) const {
    switch (case_.routing) {
      case EpRoutingKind::kOneExpert:
        return case_.experts - 1;
      case EpRoutingKind::kAllMasked:
        return -1;
      case EpRoutingKind::kSkewed:
        return random() % 4 == 0 ? random() % case_.experts : random() % 2;
      default:
        return random() % 9 == 0 ? -1 : static_cast<i64>(random() % case_.experts);
    }
  }
  static void fill_bf16(std::vector<u8>& rows, std::mt19937& random) {
    for (u64 i = 0; i + 1 < rows.size(); i += 2) {
      const float value = (static_cast<float>(random() % 20001) - 10000) / 700.0f;
      u16 bits = bf16_of(value);
      const u32 dice = random() % 4096;
      if (dice == 0) bits = 0x7fc0;  // NaN
      if (dice == 1) bits = 0x7f80;  // infinity
      if (dice == 2) bits = 0;
      std::memcpy(&rows[i], &bits, 2);
    }
  }
  EpCase case_;
  std::vector<EpTokensIn> ranks_;
};

// One group of 128 values as the cast has to deliver it.
struct EpCastGroup {
  u8 values[kEpScaleGroup];
  float scale;
};
// The smallest power of two that is not below a positive number.
inline float power_from(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}
// ue8m0: the scale is the next power of two.
inline EpCastGroup reference_cast(const u16* bf16, bool ue8m0 = false) {
  float amax = 0;
  bool number = false;
  for (u32 i = 0; i < kEpScaleGroup; ++i) {
    const float magnitude = std::abs(from_bf16(bf16[i]));
    if (magnitude != magnitude) continue;
    number = true;
    amax = std::max(amax, magnitude);
  }
  if (!number || amax < 1e-4f) amax = 1e-4f;
  EpCastGroup out{};
  out.scale = amax / 448.0f;
  float inverse = 448.0f / amax;
  if (ue8m0) {
    if (std::isfinite(out.scale)) out.scale = power_from(out.scale);
    inverse = 1.0f / out.scale;
  }
  for (u32 i = 0; i < kEpScaleGroup; ++i) {
    const float scaled = from_bf16(bf16[i]) * inverse;
    out.values[i] = static_cast<u8>(minifloat::encode(minifloat::kE4m3, bit_cast<u32>(scaled)));
  }
  return out;
}

// ---- combine
// ---------------------------------------------------------------------------------------

// Value `i` of what the experts of `rank` make of a token in a round.
inline u16 expert_value(u32 rank, u32 source, u32 token, u32 i, u32 round) {
  const u32 x = mix(rank * 7919 + source * 104729 + token * 1299709 + i * 31 + round * 65537);
  return bf16_of((static_cast<float>(x % 4001) - 2000.0f) / 300.0f);
}
inline u16 bias_value(u32 which, u32 rank, u32 token, u32 i) {
  return expert_value(1000 + which, rank, token, i, 0);
}
inline float expert_weight(u32 rank, u32 row, u32 k) {
  return static_cast<float>(mix(rank * 31 + row * 1009 + k) % 100) / 64.0f;
}

// What one rank got, in host memory.
struct EpDelivered {
  const u8* block;
  const u32* source_ends;
  const u32* expert_counts;
};

class EpReference {
 public:
  EpReference(const EpCase& c, const EpInputs& inputs) : case_(c), inputs_(inputs) {}

  // Everything of the dispatch at `rank`; the first difference ends the test.
  void check(u32 rank, const EpDelivered& got) const {
    const EpOutputLayout out = case_.output();
    std::vector<u32> counts(case_.expert_map().count(rank), 0);
    u32 row = 0;
    for (u32 source = 0; source < case_.world; ++source) {
      row = case_.first_row(source, row);
      for (u32 token = 0; token < inputs_.of(source).tokens; ++token) {
        count(rank, source, token, counts);
        if (!inputs_.goes_to(source, token, rank)) continue;
        SCOPED_TRACE("rank " + std::to_string(rank) + " row " + std::to_string(row) + " = token " +
                     std::to_string(token) + " of rank " + std::to_string(source));
        ASSERT_NO_FATAL_FAILURE(check_row(rank, row, source, token, got.block, out));
        ++row;
      }
      ASSERT_EQ(got.source_ends[source], row) << "rank " << rank << " source " << source;
    }
    for (u32 e = 0; e < counts.size(); ++e)
      ASSERT_EQ(got.expert_counts[e], counts[e]) << "rank " << rank << " local expert " << e;
  }
  // The combined rows of `rank`, bit by bit.
  void check_combined(u32 rank, const u8* rows, u32 round) const {
    for (u32 token = 0; token < inputs_.of(rank).tokens; ++token)
      for (u32 i = 0; i < case_.combine_bytes / 2; ++i) {
        float sum = 0;
        for (u32 which = 0; which < case_.biases; ++which)
          sum += from_bf16(bias_value(which, rank, token, i));
        for (u32 d = 0; d < case_.world; ++d)
          if (inputs_.goes_to(rank, token, d))
            sum += from_bf16(expert_value(d, rank, token, i, round));
        const u64 at = u64{token} * (case_.combine_bytes / 2) + i;
        ASSERT_EQ(reinterpret_cast<const u16*>(rows)[at], bf16_of(sum))
            << "rank " << rank << " token " << token << " value " << i << " round " << round;
      }
  }
  // The sums of the weights that the experts gave back with the rows.
  void check_weights(u32 rank, const float* weights) const {
    for (u32 token = 0; token < inputs_.of(rank).tokens; ++token)
      for (u32 k = 0; k < case_.top_k; ++k) {
        float sum = 0;
        for (u32 d = 0; d < case_.world; ++d)
          if (inputs_.goes_to(rank, token, d)) sum += expert_weight(d, row_of(rank, token, d), k);
        ASSERT_EQ(weights[u64{token} * case_.top_k + k], sum) << "rank " << rank << " " << token;
      }
  }
  // The row of a token that goes to `destination`.
  [[nodiscard]] u32 row_of(u32 source, u32 token, u32 destination) const {
    u32 row = case_.first_row(source, 0);
    for (u32 s = case_.fixed ? source : 0; s <= source; ++s)
      for (u32 t = 0; t < (s == source ? token : inputs_.of(s).tokens); ++t)
        row += inputs_.goes_to(s, t, destination);
    return row;
  }
  // Rows that arrive at `rank`.
  [[nodiscard]] u32 rows_at(u32 rank) const {
    u32 rows = 0;
    for (u32 source = 0; source < case_.world; ++source)
      for (u32 token = 0; token < inputs_.of(source).tokens; ++token)
        rows += inputs_.goes_to(source, token, rank);
    return rows;
  }

 private:
  void count(u32 rank, u32 source, u32 token, std::vector<u32>& counts) const {
    const u32 first = case_.expert_map().first(rank);
    for (u32 k = 0; k < case_.top_k; ++k) {
      const i64 local = inputs_.of(source).ids[u64{token} * case_.top_k + k] - first;
      if (local >= 0 && local < static_cast<i64>(counts.size())) ++counts[local];
    }
  }
  void check_row(u32 rank, u32 row, u32 source, u32 token, const u8* block,
                 const EpOutputLayout& out) const {
    const EpTokensIn& in = inputs_.of(source);
    ASSERT_EQ(reinterpret_cast<const u32*>(block + out.sources)[row], token);
    const u8* got = block + out.rows + u64{row} * out.row_bytes;
    const u8* sent = &in.rows[u64{token} * case_.row_bytes];
    if (case_.cast) {
      ASSERT_NO_FATAL_FAILURE(check_cast(row, reinterpret_cast<const u16*>(sent), block, out));
    } else {
      ASSERT_EQ(std::memcmp(got, sent, out.row_bytes), 0)
          << "payload " << u32{got[0]} << "," << u32{got[out.row_bytes - 1]} << " for "
          << u32{sent[0]} << "," << u32{sent[out.row_bytes - 1]};
      for (u32 i = 0; i < case_.scale_bytes / 4; ++i)
        ASSERT_EQ(scale_word(block, out, row, i),
                  reinterpret_cast<const u32*>(&in.scales[u64{token} * case_.scale_bytes])[i])
            << "scale " << i;
    }
    const i64 first = case_.expert_map().first(rank);
    for (u32 k = 0; k < case_.top_k; ++k) {
      const u64 at = u64{token} * case_.top_k + k;
      const i64 local = in.ids[at] - first;
      const bool here = in.ids[at] >= 0 && local >= 0 && local < case_.expert_map().count(rank);
      const u64 there = u64{row} * case_.top_k + k;
      ASSERT_EQ(reinterpret_cast<const i32*>(block + out.ids)[there], here ? local : -1) << k;
      if (!case_.weights) continue;
      ASSERT_EQ(reinterpret_cast<const float*>(block + out.weights)[there],
                here ? in.weights[at] : 0.0f)
          << k;
    }
  }
  static u32 scale_word(const u8* block, const EpOutputLayout& out, u32 row, u32 i) {
    const auto* words = reinterpret_cast<const u32*>(block + out.scales);
    return out.scale_columns == 0 ? words[u64{row} * (out.scale_bytes / 4) + i]
                                  : words[u64{i} * out.scale_columns + row];
  }
  static u32 ue8m0_of(float power) {
    return std::isfinite(power) ? static_cast<u32>(std::ilogb(power) + 127) : 255;
  }
  static void check_cast(u32 row, const u16* sent, const u8* block, const EpOutputLayout& out) {
    for (u32 group = 0; group < out.row_bytes / kEpScaleGroup; ++group) {
      const EpCastGroup want = reference_cast(sent + group * kEpScaleGroup, out.cast_ue8m0);
      if (out.cast_ue8m0) {
        const u32 code = scale_word(block, out, row, group / 4) >> (group % 4 * 8) & 0xffu;
        ASSERT_EQ(code, ue8m0_of(want.scale)) << "group " << group;
      } else {
        ASSERT_EQ(scale_word(block, out, row, group), bit_cast<u32>(want.scale)) << group;
      }
      const u8* got = block + out.rows + u64{row} * out.row_bytes + group * kEpScaleGroup;
      for (u32 i = 0; i < kEpScaleGroup; ++i)
        ASSERT_EQ(got[i], want.values[i]) << "group " << group << " value " << i;
    }
  }
  const EpCase& case_;
  const EpInputs& inputs_;
};

}  // namespace crossdock::testing
