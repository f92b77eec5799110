// Expert layers through their API: what is refused and how, faults that end a forward, sharing of a
// group, memory, statistics.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>

#include "jit/kernel_list.hpp"
#include "support/moe_layer_rig.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using ::testing::HasSubstr;

constexpr MoeLayerRig::Bounds kBounds{.share_equal = 0.995, .error = 1e-3, .magnitude = 1.0 / 256};
const MoeCase kSmall{.world = 1, .experts = 2, .top_k = 2, .max_tokens = 4};

MoeLayerRig twin_rig(const MoeCase& c) {
  return MoeLayerRig::create(c, symm::Backend::kCpu).value();
}

TEST(MoeLayerApi, OptionsAreChecked) {
  const auto refuse = [](const auto& change, const char* text) {
    moe::LayerOptions options = kSmall.options(symm::Backend::kCpu);
    change(options);
    const auto got = moe::Layer::create(options);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
    EXPECT_EQ(moe::layer_sizes(options).code(), Code::kInvalidArgument);
  };
  refuse([](auto& o) { o.hidden = 200; }, "hidden = 200 must be a positive multiple of 128");
  refuse([](auto& o) { o.inter = 192; },
         "inter = 192 must be a positive multiple of 128: pad to 256");
  refuse([](auto& o) { o.ranks.world = 3; }, "2 experts are fewer than the 3 ranks");
  refuse([](auto& o) { o.shared_inter = 200; },
         "shared_inter = 200 must be a multiple of 128: pad to 256");
  refuse([](auto& o) { o.clamp = std::nanf(""); }, "clamp = nan must be 0 or more");
  refuse([](auto& o) { o.top_k = 0; }, "top_k = 0");
  refuse([](auto& o) { o.experts = 1024; }, "experts = 1024 must be 1 to 512 on one rank");
}

TEST(MoeLayerApi, WeightsOfAnotherLayoutAreIncompatible) {
  MoeLayerRig rig = twin_rig(kSmall);
  const MoeData data(kSmall);
  const auto weights = moe::Weights::prepare(data.plain(0), Format::kE4m3).value();
  const auto refuse = [&](const auto& change, Code code, const char* text) {
    auto view = weights.view();
    change(view);
    for (const auto& got : {rig.layer.use(0, view), rig.layer.load(0, view, moe_soon())}) {
      ASSERT_EQ(got.code(), code) << text;
      EXPECT_THAT(got.error().message, HasSubstr(text));
    }
  };
  refuse(
      [](auto& v) { v.layout.version = 7; }, Code::kIncompatible,
      "the weights are of version 7, e4m3, 2 experts, hidden 256, inter 128; rank 0 takes version "
      "1, e4m3, 2 experts, hidden 256, inter 128");
  refuse([](auto& v) { v.layout.inter = 256; }, Code::kIncompatible, "inter 256; rank 0 takes");
  refuse([](auto& v) { v.layout.format = Format::kBf16; }, Code::kIncompatible, "version 1, bf16");
  refuse([](auto& v) { v.layout.experts = 1; }, Code::kIncompatible, "1 experts");
  refuse([](auto& v) { v.down = static_cast<const u8*>(v.down) + 1; }, Code::kInvalidArgument,
         "must lie on multiples of 16");
  refuse([](auto& v) { v.down_scales = nullptr; }, Code::kInvalidArgument,
         "e4m3 weights need scales");
  EXPECT_THAT(rig.layer.use(5, weights.view()).error().message, HasSubstr("rank 5 is not one of"));
  EXPECT_EQ(rig.layer.weight_layout(0), weights.layout());
}

TEST(MoeLayerApi, WrongForwardsLaunchNothing) {
  MoeLayerRig rig = twin_rig(kSmall);
  const MoeData data(kSmall);
  ASSERT_NO_FATAL_FAILURE(rig.load_tokens(data));
  const auto without = rig.layer.forward(0, rig.input(0), rig.output(0));
  ASSERT_EQ(without.code(), Code::kInvalidArgument);
  EXPECT_THAT(without.error().message, HasSubstr("rank 0 has no weights yet: load() or use()"));
  ASSERT_NO_FATAL_FAILURE(rig.load_weights(data, rig.layer));
  const auto refuse = [&](const auto& change, const char* text) {
    moe::LayerInput in = rig.input(0);
    moe::LayerOutput out = rig.output(0);
    change(in, out);
    const auto got = rig.layer.forward(0, in, out);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](auto& in, auto&) { in.count = 5; }, "5 tokens are more than the max_tokens = 4");
  refuse([](auto& in, auto&) { in.rows = nullptr; }, "input rows at 0x0");
  refuse([](auto& in, auto&) { in.rows = static_cast<const u8*>(in.rows) + 8; },
         "must be rows of 512 bytes on multiples of 16");
  refuse([](auto& in, auto&) { in.row_stride = 256; }, "with a stride of 256 bytes");
  refuse([](auto& in, auto&) { in.ids = nullptr; }, "ids at 0x0 must be [count][2] of 32 bits");
  refuse([](auto& in, auto&) { in.format = Format::kE4m3; }, "rows of e4m3 need scales");
  refuse([](auto& in, auto&) { in.scales = in.weights; }, "rows of bf16 have no scales");
  refuse([](auto& in,
            auto&) { in.format = Format::kE4m3, in.scales = in.weights, in.scale_stride = 4; },
         "with a stride of 4 bytes");
  refuse([](auto& in, auto&) { in.format = static_cast<Format>(9); }, "the unknown format 9");
  refuse([](auto&, auto& out) { out.rows = nullptr; }, "output rows at 0x0");
  refuse([](auto&, auto& out) { out.row_stride = 520; }, "output at");
  refuse([](auto&, auto& out) { out.residual = static_cast<const u8*>(out.rows) + 2; },
         "residual at");
  EXPECT_THAT(rig.layer.forward(2, rig.input(0), rig.output(0)).error().message,
              HasSubstr("rank 2 is not one of the 1 ranks"));
  // Nothing was launched, and no slot was taken.
  for (u32 i = 0; i < 3; ++i)
    ASSERT_NO_FATAL_FAILURE(rig.run());
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  MoeCase bf16 = kSmall;
  bf16.format = Format::kBf16;
  MoeLayerRig other = twin_rig(bf16);
  ASSERT_NO_FATAL_FAILURE(other.load(MoeData(bf16)));
  moe::LayerInput in = other.input(0);
  in.format = Format::kE4m3;
  EXPECT_THAT(other.layer.forward(0, in, other.output(0)).error().message,
              HasSubstr("rows of e4m3 into a layer of bf16"));
}

TEST(MoeLayerApi, AnIdOutOfRangeIsAFaultAndResetHeals) {
  MoeLayerRig rig = twin_rig(kSmall);
  const MoeData data(kSmall);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  auto* ids = static_cast<i32*>(const_cast<void*>(rig.input(0).ids));
  const i32 right = std::exchange(ids[3], 77);
  ASSERT_NO_FATAL_FAILURE(rig.forward(rig.layer));
  const auto done = rig.layer.synchronize(moe_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("expert 77"));
  EXPECT_EQ(rig.layer.check().code(), Code::kInvalidArgument);
  ASSERT_TRUE(rig.layer.reset(moe_soon()).ok());
  ids[3] = right;
  ASSERT_NO_FATAL_FAILURE(rig.run());
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
}

TEST(MoeLayerApi, MoreChoicesThanPlacesAreAFault) {
  MoeCase c = kSmall;
  c.routing = EpRoutingKind::kOneExpert;
  c.max_tokens = 40;
  c.tokens = {40};  // 80 choices of the last expert
  c.max_places = 64;
  MoeLayerRig rig = twin_rig(c);
  ASSERT_NO_FATAL_FAILURE(rig.load(MoeData(c)));
  ASSERT_NO_FATAL_FAILURE(rig.forward(rig.layer));
  const auto done = rig.layer.synchronize(moe_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("the rows of expert 1 end at 80"));
}

TEST(MoeLayerApi, RowsAreCopiedApartWhereExpertsHaveMany) {
  EXPECT_EQ(moe::choose_row_order(1), moe::RowOrder::kGather);
  EXPECT_EQ(moe::choose_row_order(64), moe::RowOrder::kGather);
  EXPECT_EQ(moe::choose_row_order(65), moe::RowOrder::kCopy);
  MoeCase c = kSmall;
  c.routing = EpRoutingKind::kOneExpert;
  c.max_tokens = 40;
  c.tokens = {40};
  c.max_places = 64;
  c.row_order = moe::RowOrder::kCopy;
  MoeLayerRig rig = twin_rig(c);
  ASSERT_NO_FATAL_FAILURE(rig.load(MoeData(c)));
  ASSERT_NO_FATAL_FAILURE(rig.forward(rig.layer));
  const auto done = rig.layer.synchronize(moe_soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("80"));
}

// Only where experts may have so many rows that they are copied apart.
TEST(MoeLayerApi, RowsAreCopiedBesideADispatchWhereTheyAreCopied) {
  moe::LayerOptions o{.experts = 64, .top_k = 4, .max_tokens = 128};
  o.ranks.world = 8;
  o.expand_sms = 24;
  EXPECT_EQ(moe::group_options(o).expand_sms, 0u);  // 64 rows an expert
  o.max_tokens = 144;
  EXPECT_EQ(moe::group_options(o).expand_sms, 24u);
  o.row_order = moe::RowOrder::kGather;
  EXPECT_EQ(moe::group_options(o).expand_sms, 0u);
  o.max_tokens = 1;
  o.row_order = moe::RowOrder::kCopy;
  EXPECT_EQ(moe::group_options(o).expand_sms, 24u);
  o.shared_inter = 128;  // every forward is one in halves
  EXPECT_EQ(moe::group_options(o).expand_sms, 0u);
}

TEST(MoeLayerApi, LayersShareAGroupThatFits) {
  moe::LayerOptions options = kSmall.options(symm::Backend::kCpu);
  ep::GroupOptions made{.ranks = options.ranks, .ep = moe::group_options(options)};
  made.ep.max_tokens = 9;
  std::optional<ep::Group> group(ep::Group::create(made).value());
  const auto refuse = [&](const auto& change, const char* text) {
    moe::LayerOptions other = options;
    change(other);
    const auto got = moe::Layer::create(*group, other, moe_soon());
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](auto& o) { o.max_tokens = 10; }, "max_tokens = 10 are more than the 9");
  refuse([](auto& o) { o.experts = 4; }, "made with experts = 2 and the layer wants 4");
  refuse([](auto& o) { o.format = Format::kBf16; }, "rows of 256 bytes: make it with");
  {
    ep::GroupOptions odd = made;
    odd.ep.expert_alignment = 2;
    const ep::Group unaligned = ep::Group::create(odd).value();
    const auto got = moe::Layer::create(unaligned, options, moe_soon());
    ASSERT_EQ(got.code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message, HasSubstr("rows with scales need a multiple of 4"));
  }
  MoeLayerRig rig(kSmall, moe::Layer::create(*group, options, moe_soon()).value());
  group.reset();
  const MoeData data(kSmall);
  ASSERT_NO_FATAL_FAILURE(rig.round(data, kBounds));
}

TEST(MoeLayerApi, HalvesAreChecked) {
  MoeLayerRig rig = twin_rig(kSmall), stranger = twin_rig(kSmall);
  const MoeData data(kSmall);
  ASSERT_NO_FATAL_FAILURE(rig.load_tokens(data));
  EXPECT_THAT(rig.layer.forward_begin(0, rig.input(0)).error().message,
              HasSubstr("rank 0 has no weights yet"));
  ASSERT_NO_FATAL_FAILURE(rig.load_weights(data, rig.layer));
  moe::LayerInput wrong = rig.input(0);
  wrong.count = 5;
  EXPECT_THAT(rig.layer.forward_begin(0, wrong).error().message,
              HasSubstr("5 tokens are more than the max_tokens = 4"));
  EXPECT_THAT(rig.layer.forward_begin(1, wrong).error().message, HasSubstr("rank 1 is not one of"));

  auto first = rig.begin(rig.layer), second = rig.begin(rig.layer);
  const auto third = rig.layer.forward_begin(0, rig.input(0));
  ASSERT_EQ(third.code(), Code::kBusy);
  EXPECT_THAT(third.error().message, HasSubstr("2 forwards of rank 0 have begun, as many as"));
  moe::LayerOutput out = rig.output(0);
  out.row_stride = 520;
  EXPECT_EQ(rig.layer.forward_end(first[0], out).code(), Code::kInvalidArgument);
  EXPECT_THAT(stranger.layer.forward_end(first[0], rig.output(0)).error().message,
              HasSubstr("was begun by a layer over other buffers"));
  moe::Layer bare = rig.layer.sibling();
  EXPECT_THAT(bare.forward_end(first[0], rig.output(0)).error().message,
              HasSubstr("has no weights yet"));
  ASSERT_FALSE(first[0].ended());
  ASSERT_NO_FATAL_FAILURE(rig.poison());
  ASSERT_NO_FATAL_FAILURE(rig.end(rig.layer, first));
  EXPECT_THAT(rig.layer.forward_end(first[0], rig.output(0)).error().message,
              HasSubstr("has ended"));
  second.clear();  // dropped: its slot is free again
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  for (u32 i = 0; i < 3; ++i)
    ASSERT_NO_FATAL_FAILURE(rig.run());
}

TEST(MoeLayerApi, SharedExpertsAreChecked) {
  MoeCase c = kSmall;
  c.shared_inter = 128;
  MoeLayerRig rig = twin_rig(c), without = twin_rig(kSmall);
  const MoeData data(c);
  ASSERT_NO_FATAL_FAILURE(rig.load_tokens(data));
  const auto chosen = moe::Weights::prepare(data.plain(0), Format::kE4m3).value();
  const auto shared = moe::Weights::prepare(data.plain_shared(), Format::kE4m3).value();
  ASSERT_TRUE(rig.layer.load(0, chosen.view(), moe_soon()).ok());
  EXPECT_THAT(rig.layer.forward(0, rig.input(0), rig.output(0)).error().message,
              HasSubstr("rank 0 has no weights of shared experts yet: load_shared()"));
  EXPECT_EQ(rig.layer.load_shared(0, chosen.view(), moe_soon()).code(), Code::kIncompatible);
  EXPECT_EQ(rig.layer.shared_layout(), shared.layout());
  EXPECT_THAT(without.layer.load_shared(0, shared.view(), moe_soon()).error().message,
              HasSubstr("shared_inter = 0"));
  ASSERT_TRUE(rig.layer.load_shared(0, shared.view(), moe_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.run());
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  const auto sizes = moe::layer_sizes(c.options(symm::Backend::kCpu)).value();
  EXPECT_EQ(sizes.shared_weights.gate_up_bytes, 2u * 128 * 256);
  EXPECT_GE(sizes.shared_bytes, 4u * (256 * 3 + 128));
  ASSERT_NO_FATAL_FAILURE(without.load(MoeData(kSmall)));
  moe::LayerInput in = without.input(0);
  in.shared_weights = in.weights;
  EXPECT_THAT(without.layer.forward(0, in, without.output(0)).error().message,
              HasSubstr("this one has shared_inter = 0"));
}

TEST(MoeLayerApi, TheCastIsInTheKernelList) {
  const auto known = jit::known_kernels().value();
  auto spec = moe::cast_rows_kernel().spec;
  spec.sm = 90;
  EXPECT_NE(std::find(known.begin(), known.end(), spec), known.end()) << spec.title();
}

TEST(MoeLayerApi, BiasesAreChecked) {
  MoeCase c = kSmall;
  c.bias = true;
  MoeLayerRig rig = twin_rig(c);
  const MoeData data(c), plain(kSmall);
  EXPECT_THAT(rig.layer.load_bias(0, data.bias(0), moe_soon()).error().message,
              HasSubstr("rank 0 has no weights yet"));
  EXPECT_THAT(rig.layer.load_bias(3, data.bias(0), moe_soon()).error().message,
              HasSubstr("rank 3 is not one of"));
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  moe::ExpertBias wrong = data.bias(0);
  wrong.number = moe::Number::kE4m3;
  EXPECT_THAT(rig.layer.load_bias(0, wrong, moe_soon()).error().message,
              HasSubstr("must be f32 (0) or bf16 (1)"));
  auto values = data.down_bias;
  values[c.hidden + 7] = std::nanf("");
  wrong = {.down = values.data()};
  EXPECT_THAT(rig.layer.load_bias(0, wrong, moe_soon()).error().message,
              HasSubstr("of down at expert 1, column 7 must be finite"));
  ASSERT_NO_FATAL_FAILURE(rig.run());  // with the biases from before
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  // bf16 as the same numbers in f32; and new weights drop them.
  const auto first = rig.outputs();
  std::vector<u16> gate_up, down;
  for (const float value : data.gate_up_bias)
    gate_up.push_back(bf16_of(value));
  for (const float value : data.down_bias)
    down.push_back(bf16_of(value));
  ASSERT_TRUE(
      rig.layer
          .load_bias(0,
                     {.number = moe::Number::kBf16, .gate_up = gate_up.data(), .down = down.data()},
                     moe_soon())
          .ok());
  ASSERT_NO_FATAL_FAILURE(rig.run());
  EXPECT_EQ(rig.outputs(), first);
  const auto weights = moe::Weights::prepare(data.plain(0), Format::kE4m3).value();
  ASSERT_TRUE(rig.layer.load(0, weights.view(), moe_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.run());
  EXPECT_NE(rig.outputs(), first);
  ASSERT_NO_FATAL_FAILURE(rig.check(plain, kBounds));
}

TEST(MoeLayerApi, SizesAndStatistics) {
  MoeLayerRig rig = twin_rig(kSmall);
  const MoeData data(kSmall);
  const auto sizes = moe::layer_sizes(kSmall.options(symm::Backend::kCpu)).value();
  EXPECT_EQ(sizes.places, 4u * 2 + 2 * 7);
  EXPECT_EQ(sizes.output_bytes, sizes.places * 512);
  EXPECT_EQ(rig.layer.memory().activation_bytes, sizes.activation_bytes);
  ASSERT_NO_FATAL_FAILURE(rig.round(data, kBounds));
  std::vector<std::uint64_t> chosen(2, 0);
  for (const i64 id : data.routes(0).ids)
    if (id >= 0) ++chosen[static_cast<u32>(id)];
  EXPECT_EQ(rig.layer.statistics(0, moe_soon()).value().expert_selections, chosen);
}

}  // namespace
}  // namespace crossdock::testing
