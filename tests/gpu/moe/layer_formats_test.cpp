// Expert layers with weights in e2m1 and scales of one byte on as many GPUs as there are: results
// against the reference with every tile, weights prepared there, graphs, halves.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/moe_layer_rig.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::GemmTile;
using moe::ScaleType;

struct Kind {
  Format format;
  ScaleType scales;
};
constexpr Kind kKinds[] = {{Format::kE4m3, ScaleType::kUe8m0},
                           {Format::kE2m1, ScaleType::kF32},
                           {Format::kE2m1, ScaleType::kUe8m0}};

// As in layer_test.cpp: a tensor core drops the last bits of products of e4m3, which turns scales
// of whole groups. One of a byte turns by a factor of two, where the largest value is at its edge.
constexpr MoeLayerRig::Bounds kBounds{.share_equal = 0, .error = 1.5e-2, .magnitude = 1.0 / 256};

class MoeLayerFormatsGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_ = static_cast<u32>(num_ranks());
  }
  [[nodiscard]] MoeCase moderate(u32 tokens, const Kind& kind) const {
    return {.world = world_,
            .experts = 16,
            .top_k = 4,
            .max_tokens = tokens,
            .hidden = 1024,
            .inter = 640,
            .format = kind.format,
            .scales = kind.scales,
            .samples = 12};
  }
  static MoeLayerRig rig(const MoeCase& c) {
    auto made = MoeLayerRig::create(c, symm::Backend::kGpu);
    if (!made.ok()) ADD_FAILURE() << made.error().describe();
    return std::move(made).value();
  }
  static void round(const MoeCase& c, const MoeLayerRig::Bounds& bounds = kBounds) {
    SCOPED_TRACE(::testing::Message() << "format " << int(c.format) << " scales " << int(c.scales)
                                      << " tile " << int(c.tile));
    MoeLayerRig made = rig(c);
    ASSERT_NO_FATAL_FAILURE(made.round(MoeData(c), bounds));
  }
  u32 world_ = 1;
};

// Tiles of 128 rows, and experts with more than one.
TEST_F(MoeLayerFormatsGpu, ManyTokensInEitherOrderOfTheRows) {
  for (const Kind& kind : kKinds) {
    MoeCase c = moderate(700, kind);
    c.residual = true;
    const MoeData data(c);
    std::vector<u16> gathered;
    for (const moe::RowOrder order : {moe::RowOrder::kGather, moe::RowOrder::kCopy}) {
      c.row_order = order;
      MoeLayerRig made = rig(c);
      ASSERT_NO_FATAL_FAILURE(made.round(data, kBounds));
      if (gathered.empty()) gathered = made.outputs();
      ASSERT_EQ(made.outputs(), gathered) << "format " << int(kind.format);
    }
  }
}
TEST_F(MoeLayerFormatsGpu, EveryTile) {
  for (const Kind& kind : kKinds)
    for (const GemmTile tile :
         {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8}) {
      MoeCase c = moderate(90, kind);
      c.tile = tile;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
}
TEST_F(MoeLayerFormatsGpu, FewTokensNoneAndOddRoutings) {
  for (const Kind& kind : kKinds) {
    for (const std::vector<u32>& tokens : {std::vector<u32>{1}, std::vector<u32>{0, 3}}) {
      MoeCase c = moderate(4, kind);
      c.tokens = tokens;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
    for (const EpRoutingKind routing : {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked}) {
      MoeCase c = moderate(150, kind);
      c.routing = routing;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
  }
}
// An activation that lies between two e4m3 values and rounds the other way than the reference's
// moves its product by an eighth, which is more of a sum of 128 than of one of 640.
TEST_F(MoeLayerFormatsGpu, OneGroupOfK) {
  MoeLayerRig::Bounds bounds = kBounds;
  bounds.magnitude = 1.0 / 128;
  for (const Kind& kind : kKinds) {
    MoeCase c = moderate(40, kind);
    c.hidden = c.inter = 128;
    ASSERT_NO_FATAL_FAILURE(round(c, bounds));
  }
}
TEST_F(MoeLayerFormatsGpu, QuantisedRowsSharedExpertsAndBias) {
  for (const Kind& kind : kKinds) {
    MoeCase c = moderate(150, kind);
    c.quantised_input = true;
    c.shared_inter = 768;
    ASSERT_NO_FATAL_FAILURE(round(c));
    c.quantised_input = false;
    c.bias = true;
    ASSERT_NO_FATAL_FAILURE(round(c));
  }
}
TEST_F(MoeLayerFormatsGpu, WeightsPreparedThereHaveTheBitsOfTheHost) {
  for (const Kind& kind : kKinds) {
    const MoeCase c = moderate(60, kind);
    const MoeData data(c);
    MoeLayerRig made = rig(c);
    ASSERT_NO_FATAL_FAILURE(made.load(data));
    ASSERT_NO_FATAL_FAILURE(made.run());
    const auto want = made.outputs();
    std::vector<symm::LocalMemory> plain;
    std::vector<moe::PreparedWeights> kept;
    for (const u32 r : made.layer.local_ranks()) {
      moe::PlainWeights from = data.plain(r);
      const auto put = [&](const void*& matrix, u64 values) {
        plain.push_back(made.rank(r).allocate(values * sizeof(float)).value());
        void* const to = plain.back().address();
        ASSERT_TRUE(made.rank(r).write(to, matrix, values * sizeof(float), moe_soon()).ok());
        matrix = to;
      };
      const u64 matrix = u64{from.experts} * c.hidden * c.inter;
      ASSERT_NO_FATAL_FAILURE(put(from.gate_up, 2 * matrix));
      ASSERT_NO_FATAL_FAILURE(put(from.down, matrix));
      auto there = made.layer.prepare_weights(r, from, moe_soon());
      ASSERT_TRUE(there.ok()) << there.error().describe();
      kept.push_back(std::move(there).value());
      ASSERT_TRUE(made.layer.use(r, kept.back().view()).ok());
    }
    ASSERT_NO_FATAL_FAILURE(made.run());
    ASSERT_EQ(made.outputs(), want) << "format " << int(kind.format);
  }
}
TEST_F(MoeLayerFormatsGpu, ReplaysGiveTheBitsOfLaunches) {
  for (const Kind& kind : kKinds) {
    const MoeCase c = moderate(100, kind);
    const MoeData data(c);
    MoeLayerRig made = rig(c);
    ASSERT_NO_FATAL_FAILURE(made.load(data));
    ASSERT_NO_FATAL_FAILURE(made.run());
    const auto want = made.outputs();
    std::vector<cuda::Graph> graphs;
    for (const u32 r : made.layer.local_ranks()) {
      auto capture = cuda::Capture::begin(*made.rank(r).device().stream()).value();
      ASSERT_TRUE(made.layer.forward(r, made.input(r), made.output(r)).ok());
      graphs.push_back(capture.finish().value());
    }
    for (u32 again = 0; again < 10; ++again) {
      ASSERT_NO_FATAL_FAILURE(made.poison());
      for (u32 i = 0; i < graphs.size(); ++i)
        ASSERT_TRUE(
            graphs[i].launch(*made.rank(made.layer.local_ranks()[i]).device().stream()).ok());
      ASSERT_NO_FATAL_FAILURE(made.synchronize());
      ASSERT_EQ(made.outputs(), want) << "replay " << again;
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
