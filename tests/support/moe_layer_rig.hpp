// An expert layer under test, on GPUs or in the twin: weights and tokens of a case in memory of the
// ranks, forwards through the API, results against the reference. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include "moe/layer_core.hpp"
#include "support/moe_case.hpp"
#include "symm/copy.hpp"

namespace crossdock::testing {

inline Deadline moe_soon() {
  return Deadline::in(std::chrono::seconds(120));
}

class MoeLayerRig {
 public:
  // How far results may be from the reference. Two ways of adding up differ in the last bits, and
  // where that turns the rounding of a gate, of a code or of an output, by a step of that format.
  struct Bounds {
    double share_equal;  // of all values, to the bit
    double error;        // root of the mean squares, relative to that of the values
    double magnitude;    // of one value: this times the magnitudes it was made of, and a bf16 step
  };

  static Result<MoeLayerRig> create(const MoeCase& c, symm::Backend backend) {
    CROSSDOCK_TRY(layer, moe::Layer::create(c.options(backend)));
    return MoeLayerRig(c, std::move(layer));
  }
  MoeLayerRig(const MoeCase& c, moe::Layer of) : layer(std::move(of)), case_(c) {}

  [[nodiscard]] symm::Rank& rank(u32 r) { return layer.core().rank(r); }

  // Weights of the case into a layer of the rig's shape.
  void load_weights(const MoeData& data, moe::Layer& into) {
    for (const u32 r : layer.local_ranks()) {
      const auto weights = moe::Weights::prepare(data.plain(r), case_.format, case_.scales);
      ASSERT_TRUE(weights.ok()) << weights.error().describe();
      const auto loaded = into.load(r, weights->view(), moe_soon());
      ASSERT_TRUE(loaded.ok()) << loaded.error().describe();
      if (case_.bias) {
        const auto biased = into.load_bias(r, data.bias(r), moe_soon());
        ASSERT_TRUE(biased.ok()) << biased.error().describe();
      }
      if (case_.shared_inter == 0) continue;
      const auto shared =
          moe::Weights::prepare(data.plain_shared(), case_.format, case_.scales).value();
      const auto there = into.load_shared(r, shared.view(), moe_soon());
      ASSERT_TRUE(there.ok()) << there.error().describe();
    }
  }
  void load_tokens(const MoeData& data) {
    memory_.clear();
    for (const u32 r : layer.local_ranks()) {
      const MoeTokens& t = data.of(r);
      const EpTokensIn& routes = data.routes(r);
      const std::vector<i32> narrow(routes.ids.begin(), routes.ids.end());
      Memory m;
      m.rows = case_.quantises(r) ? put(r, t.codes) : put(r, t.rows);
      m.scales = put(r, t.scales);
      m.ids = case_.wide_ids ? put(r, routes.ids) : put(r, narrow);
      m.weights = put(r, routes.weights);
      m.shared_weights = put(r, t.shared_weights);
      m.residual = put(r, t.residual);
      m.output = rank(r).allocate(u64{case_.max_tokens} * case_.hidden * 2 + 16).value();
      m.input = {.count = data.count(r),
                 .rows = m.rows.address(),
                 .format = case_.quantises(r) ? moe::Format::kE4m3 : moe::Format::kBf16,
                 .scales = case_.quantises(r) ? m.scales.address() : nullptr,
                 .ids = m.ids.address(),
                 .weights = case_.weighs(r) ? m.weights.as<float>() : nullptr,
                 .shared_weights = case_.shared_weights ? m.shared_weights.as<float>() : nullptr};
      memory_.push_back(std::move(m));
    }
  }
  // Other tokens of the same number, in the same memory.
  void replace_tokens(const MoeData& data) {
    for (const u32 r : layer.local_ranks()) {
      const MoeTokens& t = data.of(r);
      const EpTokensIn& routes = data.routes(r);
      ASSERT_EQ(of(r).input.count, data.count(r));
      ASSERT_FALSE(case_.quantised_input || case_.wide_ids || case_.residual);
      const std::vector<i32> ids(routes.ids.begin(), routes.ids.end());
      const Memory& m = of(r);
      ASSERT_TRUE(symm::upload(rank(r), m.rows.as<u16>(), t.rows, moe_soon()).ok());
      ASSERT_TRUE(symm::upload(rank(r), m.ids.as<i32>(), ids, moe_soon()).ok());
      ASSERT_TRUE(symm::upload(rank(r), m.weights.as<float>(), routes.weights, moe_soon()).ok());
    }
  }
  void load(const MoeData& data) {
    ASSERT_NO_FATAL_FAILURE(load_weights(data, layer));
    ASSERT_NO_FATAL_FAILURE(load_tokens(data));
  }
  [[nodiscard]] moe::LayerInput& input(u32 r) { return of(r).input; }
  [[nodiscard]] moe::LayerOutput output(u32 r) {
    const Memory& m = of(r);
    return {.rows = m.output.address(),
            .residual = case_.residual ? m.residual.address() : nullptr};
  }
  // Launches; nothing is waited for.
  void forward(moe::Layer& through) {
    for (const u32 r : layer.local_ranks()) {
      const auto called = through.forward(r, input(r), output(r));
      ASSERT_TRUE(called.ok()) << called.error().describe();
    }
  }
  // The halves of a forward, by local rank.
  std::vector<moe::BegunForward> begin(moe::Layer& through) {
    std::vector<moe::BegunForward> begun;
    for (const u32 r : layer.local_ranks()) {
      auto one = through.forward_begin(r, input(r));
      if (!one.ok()) ADD_FAILURE() << one.error().describe();
      if (one.ok()) begun.push_back(std::move(one).value());
    }
    return begun;
  }
  void end(moe::Layer& through, std::vector<moe::BegunForward>& begun) {
    ASSERT_EQ(begun.size(), layer.local_ranks().size());
    for (u32 i = 0; i < begun.size(); ++i) {
      const auto ended = through.forward_end(begun[i], output(layer.local_ranks()[i]));
      ASSERT_TRUE(ended.ok()) << ended.error().describe();
      ASSERT_TRUE(begun[i].ended());
    }
  }
  void synchronize() {
    const auto done = layer.synchronize(moe_soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  // All ones, which no result is.
  void poison() {
    for (const u32 r : layer.local_ranks()) {
      const std::vector<u8> ones(of(r).output.bytes(), 0xff);
      ASSERT_TRUE(symm::upload(rank(r), of(r).output.as<u8>(), ones, moe_soon()).ok());
    }
  }
  void run() {
    ASSERT_NO_FATAL_FAILURE(poison());
    ASSERT_NO_FATAL_FAILURE(forward(layer));
    ASSERT_NO_FATAL_FAILURE(synchronize());
  }
  // The output of all local ranks, what was not written included.
  std::vector<u16> outputs() {
    std::vector<u16> all;
    for (const u32 r : layer.local_ranks()) {
      const auto& memory = of(r).output;
      const auto one =
          symm::download(rank(r), memory.as<u16>(), memory.bytes() / 2, moe_soon()).value();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  void check(const MoeData& data, const Bounds& bounds) {
    const MoeReference reference(data);
    u64 values = 0, equal = 0;
    double worst = 0, wrong = 0, all = 0;
    for (const u32 r : layer.local_ranks()) {
      const auto& memory = of(r).output;
      const auto got =
          symm::download(rank(r), memory.as<u16>(), memory.bytes() / 2, moe_soon()).value();
      const u32 count = data.count(r);
      for (u64 i = u64{count} * case_.hidden; i < got.size(); ++i)
        ASSERT_EQ(got[i], 0xffff) << "rank " << r << " wrote behind its " << count << " tokens";
      const u32 samples = case_.samples == 0 ? count : std::min(count, case_.samples);
      for (u32 s = 0; s < samples; ++s) {
        const u32 t = static_cast<u32>(u64{s} * count / samples);
        const auto want = reference.token(r, t);
        for (u32 h = 0; h < case_.hidden; ++h) {
          const float value = from_bf16(got[u64{t} * case_.hidden + h]);
          const double away = std::abs(double{value} - want[h].value);
          const double room =
              std::ldexp(std::abs(want[h].value), -7) + bounds.magnitude * want[h].magnitude;
          ASSERT_LE(away, room) << "rank " << r << " token " << t << " value " << h << ": " << value
                                << " for " << want[h].value;
          if (want[h].magnitude > 0) worst = std::max(worst, away / want[h].magnitude);
          ++values;
          equal += away == 0;
          wrong += away * away;
          all += double{want[h].value} * want[h].value;
        }
      }
    }
    const double share = values == 0 ? 1 : static_cast<double>(equal) / static_cast<double>(values);
    ::testing::Test::RecordProperty("share_equal", std::to_string(share));
    ::testing::Test::RecordProperty("worst", std::to_string(worst));
    const double error = all == 0 ? 0 : std::sqrt(wrong / all);
    ::testing::Test::RecordProperty("error", std::to_string(error));
    EXPECT_GE(share, bounds.share_equal) << "worst " << worst << ", relative error " << error;
    EXPECT_LE(error, bounds.error) << "equal " << share;
  }
  void round(const MoeData& data, const Bounds& bounds) {
    ASSERT_NO_FATAL_FAILURE(load(data));
    ASSERT_NO_FATAL_FAILURE(run());
    ASSERT_NO_FATAL_FAILURE(check(data, bounds));
  }

  moe::Layer layer;

 private:
  struct Memory {
    symm::LocalMemory rows, scales, ids, weights, shared_weights, residual, output;
    moe::LayerInput input;
  };
  Memory& of(u32 r) {
    const auto ranks = layer.local_ranks();
    return memory_[static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), r) -
                                            ranks.begin())];
  }
  template <class T>
  symm::LocalMemory put(u32 r, const std::vector<T>& values) {
    auto memory = rank(r).allocate(values.size() * sizeof(T) + 16).value();
    EXPECT_TRUE(symm::upload(rank(r), memory.template as<T>(), values, moe_soon()).ok());
    return memory;
  }
  MoeCase case_;
  std::vector<Memory> memory_;
};

}  // namespace crossdock::testing
