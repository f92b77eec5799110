// A case of an expert layer and its reference: plain weights, tokens of all ranks, and what the
// layer has to make of them, added up in fp64 and rounded exactly where docs/design/moe.md says.
// Plain loops over plain matrices: nothing of the library's preparation or routing is used. Test
// code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <crossdock/moe/layer.hpp>

#include "support/ep_case.hpp"

namespace crossdock::testing {

struct MoeCase {
  u32 world = 2;
  u32 experts = 6;
  u32 top_k = 3;
  u32 max_tokens = 12;
  u32 hidden = 256;
  u32 inter = 128;
  u32 shared_inter = 0;
  bool shared_weights = false;
  bool bias = false;
  moe::Format format = moe::Format::kE4m3;
  moe::ScaleType scales = moe::ScaleType::kF32;
  bool quantised_input = false;  // the caller's rows are e4m3 already
  u32 bf16_ranks = 0;            // but of these ranks, by bit
  float clamp = 4.0f;
  bool weights = true;
  u32 without_weights = 0;  // ranks that give none, by bit
  bool residual = false;
  bool wide_ids = false;
  u32 max_places = 0;
  moe::GemmTile tile = moe::GemmTile::kAuto;
  moe::RowOrder row_order = moe::RowOrder::kAuto;
  u32 expand_sms = 0;
  EpRoutingKind routing = EpRoutingKind::kRandom;
  std::vector<u32> tokens = {};  // of each rank; empty: max_tokens, one less, ...
  u32 samples = 0;               // tokens of each rank that are compared; 0: all
  u32 seed = 1;

  [[nodiscard]] bool weighs(u32 rank) const {
    return weights && (without_weights >> rank & 1) == 0;
  }
  [[nodiscard]] bool quantises(u32 rank) const {
    return quantised_input && (bf16_ranks >> rank & 1) == 0;
  }
  // Of the rows.
  [[nodiscard]] bool fp8() const { return format != moe::Format::kBf16; }
  [[nodiscard]] bool fp4() const { return format == moe::Format::kE2m1; }
  [[nodiscard]] bool ue8m0() const { return scales == moe::ScaleType::kUe8m0; }
  // The routing's half.
  [[nodiscard]] EpCase ep() const {
    return {.world = world,
            .experts = experts,
            .top_k = top_k,
            .max_tokens = max_tokens,
            .row_bytes = 16,
            .wide_ids = wide_ids,
            .routing = routing,
            .tokens = tokens};
  }
  [[nodiscard]] moe::LayerOptions options(symm::Backend backend) const {
    moe::LayerOptions o;
    o.ranks.world = world;
    o.ranks.backend = backend;
    o.experts = experts;
    o.top_k = top_k;
    o.max_tokens = max_tokens;
    o.hidden = hidden;
    o.inter = inter;
    o.shared_inter = shared_inter;
    o.format = format;
    o.scales = scales;
    o.wide_ids = wide_ids;
    o.clamp = clamp;
    o.max_places = max_places;
    o.tile = tile;
    o.row_order = row_order;
    o.expand_sms = expand_sms;
    return o;
  }
};

inline float moe_number(u32 seed, u64 index) {
  const u32 bits = mix(seed * 0x9e3779b9u + static_cast<u32>(index) +
                       static_cast<u32>(index >> 32) * 0x85ebca6bu);
  return static_cast<float>(bits % 8001) / 4000.0f - 1.0f;
}
inline float e4m3_value(u8 code) {
  return bit_cast<float>(minifloat::decode(minifloat::kE4m3, code));
}
inline u8 e4m3_of(float value) {
  return static_cast<u8>(minifloat::encode(minifloat::kE4m3, bit_cast<u32>(value)));
}
inline float rounded_to_e2m1(float value) {
  return bit_cast<float>(minifloat::decode(
      minifloat::kE2m1, minifloat::encode(minifloat::kE2m1, bit_cast<u32>(value))));
}
// Values that share a scale, their largest divided by 448.
inline float e4m3_scale(float peak, bool ue8m0) {
  const float scale = std::max(peak, 1e-10f) / 448.0f;
  return ue8m0 ? power_from(scale) : scale;
}

// All experts' matrices as a checkpoint has them: plain values, and what the layer's format keeps
// of them. Blocks of 128 x 128 differ in size, so that a scale in the wrong place is seen.
struct MoeMatrix {
  u32 rows, columns;
  std::vector<float> plain;
  std::vector<float> kept;

  MoeMatrix(const MoeCase& c, u32 seed, u32 of_rows, u32 of_columns)
      : MoeMatrix(c, seed, c.experts, of_rows, of_columns) {}
  MoeMatrix(const MoeCase& c, u32 seed, u32 experts, u32 of_rows, u32 of_columns)
      : rows(of_rows), columns(of_columns), plain(u64{experts} * of_rows * of_columns) {
    const float size = 3.0f / std::sqrt(static_cast<float>(columns));
    for (u64 i = 0; i < plain.size(); ++i) {
      const u32 block = static_cast<u32>(i / columns / 128 * 7 + i % columns / 128);
      const float factor = std::ldexp(1.0f, static_cast<int>(block % 3) - 1);
      plain[i] = from_bf16(bf16_of(moe_number(seed, i) * size * factor));
    }
    kept = plain;
    if (c.fp4()) {
      quantise_to_fp4();
    } else if (c.fp8()) {
      quantise(experts, c.ue8m0());
    }
  }
  [[nodiscard]] const float* row(u32 expert, u32 of) const {
    return &kept[(u64{expert} * rows + of) * columns];
  }

 private:
  // 32 values along K share a power of two. Those of a block here are near each other, so all of
  // them fit beside the block's scale.
  void quantise_to_fp4() {
    for (u64 first = 0; first < plain.size(); first += 32) {
      float peak = 0;
      for (u64 i = first; i < first + 32; ++i)
        peak = std::max(peak, std::abs(plain[i]));
      const float power = peak == 0 ? 1.0f : power_from(peak / 6.0f);
      for (u64 i = first; i < first + 32; ++i)
        kept[i] = rounded_to_e2m1(plain[i] / power) * power;
    }
  }
  void quantise(u32 experts, bool ue8m0) {
    for (u64 block = 0; block < u64{experts} * rows / 128; ++block)
      for (u32 group = 0; group < columns / 128; ++group) {
        const auto at = [&](u32 i) {
          return (block * 128 + i / 128) * columns + group * 128 + i % 128;
        };
        float peak = 0;
        for (u32 i = 0; i < 128 * 128; ++i)
          peak = std::max(peak, std::abs(plain[at(i)]));
        const float scale = e4m3_scale(peak, ue8m0);
        for (u32 i = 0; i < 128 * 128; ++i)
          kept[at(i)] = e4m3_value(e4m3_of(plain[at(i)] * (1.0f / scale))) * scale;
      }
  }
};

// The tokens of one rank, as given to the layer and as its products see them.
struct MoeTokens {
  std::vector<u16> rows;
  std::vector<u8> codes;    // quantised_input
  std::vector<u32> scales;  // quantised_input: [token][hidden / 128] f32, or four ue8m0 in a word
  std::vector<float> seen;
  std::vector<u16> residual;
  std::vector<float> shared_weights;
};

class MoeData {
 public:
  explicit MoeData(const MoeCase& of)
      : c(of),
        ep_case(of.ep()),
        routing(ep_case, of.seed),
        gate_up(of, 11, 2 * of.inter, of.hidden),
        down(of, 13, of.hidden, of.inter),
        shared_gate_up(of, 17, 1, 2 * of.shared_inter, of.hidden),
        shared_down(of, 19, 1, of.hidden, of.shared_inter) {
    for (u64 i = 0; i < u64{of.experts} * 2 * of.inter; ++i)
      gate_up_bias.push_back(from_bf16(bf16_of(moe_number(23, i))));
    for (u64 i = 0; i < u64{of.experts} * of.hidden; ++i)
      down_bias.push_back(from_bf16(bf16_of(moe_number(29, i))));
    for (u32 r = 0; r < c.world; ++r)
      tokens_.push_back(make(r));
  }
  [[nodiscard]] const MoeTokens& of(u32 rank) const { return tokens_[rank]; }
  [[nodiscard]] const EpTokensIn& routes(u32 rank) const { return routing.of(rank); }
  [[nodiscard]] u32 count(u32 rank) const { return routing.of(rank).tokens; }

  // The plain matrices of the experts of one rank.
  [[nodiscard]] moe::PlainWeights plain(u32 rank) const {
    const auto experts = ep_case.expert_map();
    const u64 first = experts.first(rank);
    return {.number = moe::Number::kF32,
            .experts = experts.count(rank),
            .hidden = c.hidden,
            .inter = c.inter,
            .gate_up = &gate_up.plain[first * gate_up.rows * gate_up.columns],
            .down = &down.plain[first * down.rows * down.columns]};
  }

  [[nodiscard]] moe::ExpertBias bias(u32 rank) const {
    const u64 first = ep_case.expert_map().first(rank);
    return {.gate_up = &gate_up_bias[first * 2 * c.inter], .down = &down_bias[first * c.hidden]};
  }
  [[nodiscard]] moe::PlainWeights plain_shared() const {
    return {.number = moe::Number::kF32,
            .experts = 1,
            .hidden = c.hidden,
            .inter = c.shared_inter,
            .gate_up = shared_gate_up.plain.data(),
            .down = shared_down.plain.data()};
  }

  const MoeCase c;
  const EpCase ep_case;
  const EpInputs routing;
  const MoeMatrix gate_up, down;
  const MoeMatrix shared_gate_up, shared_down;
  std::vector<float> gate_up_bias, down_bias;  // [expert][column]

 private:
  [[nodiscard]] MoeTokens make(u32 rank) const {
    MoeTokens t;
    const u64 values = u64{count(rank)} * c.hidden;
    for (u64 i = 0; i < values; ++i) {
      const float factor = 1.0f + static_cast<float>(i / 128 % 5);  // groups differ
      t.rows.push_back(bf16_of(moe_number(c.seed * 101 + rank, i) * factor));
      t.residual.push_back(bf16_of(moe_number(c.seed * 103 + rank, i)));
    }
    for (u32 i = 0; i < count(rank); ++i)
      t.shared_weights.push_back(1.0f + moe_number(c.seed * 107 + rank, i) / 2);
    for (u64 i = 0; i < values; i += 128) {
      if (!c.fp8()) {
        for (u64 j = i; j < i + 128; ++j)
          t.seen.push_back(from_bf16(t.rows[j]));
        continue;
      }
      const EpCastGroup group = reference_cast(&t.rows[i], c.ue8m0());
      add_scale(t, static_cast<u32>(i % c.hidden / 128), group.scale);
      for (const u8 code : group.values) {
        t.codes.push_back(code);
        t.seen.push_back(e4m3_value(code) * group.scale);
      }
    }
    return t;
  }
  void add_scale(MoeTokens& t, u32 group, float scale) const {
    if (!c.ue8m0()) return t.scales.push_back(bit_cast<u32>(scale));
    if (group % 4 == 0) t.scales.push_back(0);
    t.scales.back() |= static_cast<u32>(std::ilogb(scale) + 127) << (group % 4 * 8);
  }
  std::vector<MoeTokens> tokens_;
};

// A value, and the sum of the magnitudes of the products that it was made of.
struct MoeValue {
  float value = 0;
  double magnitude = 0;
};

class MoeReference {
 public:
  explicit MoeReference(const MoeData& data) : d_(data) {}

  // One token of one rank: [hidden], rounded to bf16.
  [[nodiscard]] std::vector<MoeValue> token(u32 rank, u32 t) const {
    const MoeCase& c = d_.c;
    const EpTokensIn& in = d_.routes(rank);
    const auto experts = d_.ep_case.expert_map();
    std::vector<MoeValue> out(c.hidden);
    for (u32 h = 0; c.residual && h < c.hidden; ++h)
      out[h].value = from_bf16(d_.of(rank).residual[u64{t} * c.hidden + h]);
    if (c.shared_inter != 0) {
      const float weight = c.shared_weights ? d_.of(rank).shared_weights[t] : 1.0f;
      const auto made = expert({d_.shared_gate_up, d_.shared_down, 0, c.shared_inter},
                               &d_.of(rank).seen[u64{t} * c.hidden], weight);
      for (u32 h = 0; h < c.hidden; ++h) {
        out[h].value += made[h].value;
        out[h].magnitude += made[h].magnitude;
      }
    }
    for (u32 destination = 0; destination < c.world; ++destination) {
      if (!d_.routing.goes_to(rank, t, destination)) continue;
      std::vector<MoeValue> row(c.hidden);  // what the destination sends back
      for (u32 k = 0; k < c.top_k; ++k) {
        const i64 id = in.ids[u64{t} * c.top_k + k];
        if (id < 0 || experts.owner(static_cast<u32>(id)) != destination) continue;
        const float weight = c.weighs(rank) ? in.weights[u64{t} * c.top_k + k] : 1.0f;
        // With a bias the weight comes late.
        const auto made = expert({d_.gate_up, d_.down, static_cast<u32>(id), c.inter, c.bias},
                                 &d_.of(rank).seen[u64{t} * c.hidden], c.bias ? 1.0f : weight);
        for (u32 h = 0; h < c.hidden; ++h) {
          const float factor = c.bias ? weight : 1.0f;
          row[h].value = std::fma(factor, made[h].value, row[h].value);
          row[h].magnitude += factor * made[h].magnitude;
        }
      }
      for (u32 h = 0; h < c.hidden; ++h) {
        out[h].value += from_bf16(bf16_of(row[h].value));
        out[h].magnitude += row[h].magnitude;
      }
    }
    for (MoeValue& v : out)
      v.value = from_bf16(bf16_of(v.value));
    return out;
  }

 private:
  static double dot(const float* a, const float* b, u32 count) {
    double sum = 0;
    for (u32 i = 0; i < count; ++i)
      sum += double{a[i]} * b[i];
    return sum;
  }
  struct Expert {
    const MoeMatrix& gate_up;
    const MoeMatrix& down;
    u32 index;
    u32 inter;
    bool bias = false;
  };
  [[nodiscard]] std::vector<MoeValue> expert(const Expert& of, const float* x, float weight) const {
    const MoeCase& c = d_.c;
    const u32 e = of.index;
    std::vector<float> activations(of.inter);
    for (u32 i = 0; i < of.inter; ++i) {
      const auto rounded = [&](u32 row) {
        const double bias = of.bias ? d_.gate_up_bias[u64{e} * 2 * of.inter + row] : 0.0;
        return from_bf16(
            bf16_of(static_cast<float>(bias + dot(x, of.gate_up.row(e, row), c.hidden))));
      };
      const float gate = std::min(rounded(i), c.clamp);
      const float up = std::clamp(rounded(of.inter + i), -c.clamp, c.clamp);
      activations[i] = gate / (1.0f + std::exp(-gate)) * up * weight;
    }
    for (u32 i = 0; i < of.inter; i += 128)
      round_group(&activations[i]);
    std::vector<MoeValue> out(c.hidden);
    for (u32 h = 0; h < c.hidden; ++h) {
      const float* row = of.down.row(e, h);
      const double bias = of.bias ? d_.down_bias[u64{e} * c.hidden + h] : 0.0;
      out[h].value =
          from_bf16(bf16_of(static_cast<float>(bias + dot(activations.data(), row, of.inter))));
      out[h].magnitude = std::abs(bias);
      for (u32 i = 0; i < of.inter; ++i)
        out[h].magnitude += std::abs(double{activations[i]} * row[i]);
    }
    return out;
  }
  void round_group(float* values) const {
    if (!d_.c.fp8()) {
      for (u32 i = 0; i < 128; ++i)
        values[i] = from_bf16(bf16_of(values[i]));
      return;
    }
    float peak = 0;
    for (u32 i = 0; i < 128; ++i)
      peak = std::max(peak, std::abs(values[i]));
    const float scale = e4m3_scale(peak, d_.c.ue8m0());
    for (u32 i = 0; i < 128; ++i)
      values[i] = e4m3_value(e4m3_of(values[i] * (1.0f / scale))) * scale;
  }
  const MoeData& d_;
};

}  // namespace crossdock::testing
