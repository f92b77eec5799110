// Expert layers with weights in e2m1 and scales of one byte, through their API: what is refused and
// how, and what they take.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <vector>

#include "support/moe_layer_rig.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::ScaleType;
using ::testing::HasSubstr;

const MoeCase kFp4{.world = 1,
                   .experts = 2,
                   .top_k = 2,
                   .max_tokens = 4,
                   .format = Format::kE2m1,
                   .scales = ScaleType::kUe8m0};

MoeLayerRig twin_rig(const MoeCase& c) {
  return MoeLayerRig::create(c, symm::Backend::kCpu).value();
}

TEST(MoeLayerFormatsApi, OptionsAreChecked) {
  const auto refuse = [](const auto& change, const char* text) {
    moe::LayerOptions options = kFp4.options(symm::Backend::kCpu);
    change(options);
    const auto got = moe::Layer::create(options);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
    EXPECT_EQ(moe::layer_sizes(options).code(), Code::kInvalidArgument);
  };
  refuse([](auto& o) { o.format = static_cast<Format>(3); }, "the unknown format 3");
  refuse([](auto& o) { o.scales = static_cast<ScaleType>(2); }, "scales of the unknown type 2");
  refuse([](auto& o) { o.format = Format::kBf16; },
         "scales = ue8m0 with format = bf16, which has no scales: leave them f32");
  refuse([](auto& o) { o.hidden = 192; }, "hidden = 192 must be a positive multiple of 128");
}

TEST(MoeLayerFormatsApi, WeightsOfAnotherLayoutAreIncompatible) {
  MoeLayerRig rig = twin_rig(kFp4);
  const MoeData data(kFp4);
  const auto weights =
      moe::Weights::prepare(data.plain(0), Format::kE2m1, ScaleType::kUe8m0).value();
  const auto refuse = [&](const auto& change, Code code, const char* text) {
    auto view = weights.view();
    change(view);
    for (const auto& got : {rig.layer.use(0, view), rig.layer.load(0, view, moe_soon())}) {
      ASSERT_EQ(got.code(), code) << text;
      EXPECT_THAT(got.error().message, HasSubstr(text));
    }
  };
  refuse([](auto& v) { v.layout.version = 7; }, Code::kIncompatible,
         "the weights are of version 7, e2m1, 2 experts, hidden 256, inter 128, ue8m0 scales; rank "
         "0 takes version 1, e2m1, 2 experts, hidden 256, inter 128, ue8m0 scales");
  refuse([](auto& v) { v.layout.scales = ScaleType::kF32; }, Code::kIncompatible,
         "version 1, e2m1, 2 experts, hidden 256, inter 128; rank 0 takes");
  refuse([](auto& v) { v.layout.format = Format::kE4m3; }, Code::kIncompatible, "version 1, e4m3");
  refuse([](auto& v) { v.layout.hidden = 128; }, Code::kIncompatible, "hidden 128");
  refuse([](auto& v) { v.gate_up_scales = nullptr; }, Code::kInvalidArgument,
         "e2m1 weights need scales");
  refuse([](auto& v) { v.gate_up = static_cast<const u8*>(v.gate_up) + 8; }, Code::kInvalidArgument,
         "must lie on multiples of 16");
  EXPECT_EQ(rig.layer.weight_layout(0), weights.layout());
  // Bytes need no alignment.
  auto view = weights.view();
  const auto sizes = moe::weight_sizes(view.layout).value();
  std::vector<u8> moved(sizes.down_scales + 1);
  std::memcpy(&moved[1], view.down_scales, sizes.down_scales);
  view.down_scales = &moved[1];
  EXPECT_TRUE(rig.layer.load(0, view, moe_soon()).ok());
  EXPECT_EQ(rig.layer.memory().weights.gate_up_bytes, 2u * 2 * 2 * 8704);
  EXPECT_EQ(rig.layer.memory().weights.scale_bytes, 1u);
}

TEST(MoeLayerFormatsApi, WrongScalesLaunchNothing) {
  MoeCase c = kFp4;
  c.hidden = 640;
  c.quantised_input = true;
  MoeLayerRig rig = twin_rig(c);
  const MoeData data(c);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  const auto refuse = [&](const auto& change, const char* text) {
    moe::LayerInput in = rig.input(0);
    change(in);
    const auto got = rig.layer.forward(0, in, rig.output(0));
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
    EXPECT_EQ(rig.layer.forward_begin(0, in).code(), Code::kInvalidArgument);
  };
  refuse([](auto& in) { in.scale_stride = 4; },
         "with a stride of 4 bytes must be [count][2] of 4 ue8m0 bytes on multiples of 4, one row "
         "of 8 bytes apart or more");
  refuse([](auto& in) { in.scale_stride = 10; }, "with a stride of 10 bytes");
  refuse([](auto& in) { in.scales = static_cast<const u8*>(in.scales) + 2; },
         "must be [count][2] of 4 ue8m0 bytes");
  refuse([](auto& in) { in.scales = nullptr; }, "rows of e4m3 need scales");
  refuse([](auto& in) { in.format = Format::kBf16; }, "rows of bf16 have no scales");
  refuse([](auto& in) { in.format = Format::kE2m1; },
         "rows of the unknown format 2: they are bf16");
  ASSERT_NO_FATAL_FAILURE(rig.run());
  // Rows of scales farther apart than they have to be: the same bits.
  const auto dense = rig.outputs();
  std::vector<u32> wide;
  for (const u32 word : data.of(0).scales) {
    wide.push_back(word);
    if (wide.size() % 5 == 2) wide.insert(wide.end(), 3, 0xffffffffu);
  }
  auto memory = rig.rank(0).allocate(wide.size() * 4).value();
  ASSERT_TRUE(symm::upload(rig.rank(0), memory.as<u32>(), wide, moe_soon()).ok());
  rig.input(0).scales = memory.address();
  rig.input(0).scale_stride = 20;
  ASSERT_NO_FATAL_FAILURE(rig.run());
  EXPECT_EQ(rig.outputs(), dense);
}

// What a checkpoint cannot have, before a layer sees it; and what a layer's own preparation says.
TEST(MoeLayerFormatsApi, FlawedWeightsAreNamed) {
  MoeLayerRig rig = twin_rig(kFp4);
  MoeData data(kFp4);
  auto plain = data.plain(0);
  std::vector<float> values(plain.experts * u64{kFp4.hidden} * kFp4.inter, 0.5f);
  values[kFp4.hidden * kFp4.inter + 3 * kFp4.inter + 7] = std::nanf("");
  plain.down = values.data();
  const auto host = moe::Weights::prepare(plain, Format::kE2m1, ScaleType::kUe8m0);
  ASSERT_EQ(host.code(), Code::kInvalidArgument);
  EXPECT_THAT(host.error().message, HasSubstr("value nan of down at expert 1, row 3, column 7"));
  auto gate_up = rig.rank(0).allocate(2 * values.size() * 4).value();
  auto down = rig.rank(0).allocate(values.size() * 4).value();
  ASSERT_TRUE(
      rig.rank(0).write(gate_up.address(), plain.gate_up, 2 * values.size() * 4, moe_soon()).ok());
  ASSERT_TRUE(symm::upload(rig.rank(0), down.as<float>(), values, moe_soon()).ok());
  plain.gate_up = gate_up.address();
  plain.down = down.address();
  const auto there = rig.layer.prepare_weights(0, plain, moe_soon());
  ASSERT_EQ(there.code(), Code::kInvalidArgument);
  EXPECT_EQ(there.error().message, host.error().message);
  EXPECT_THAT(rig.layer.prepare_weights(3, plain, moe_soon()).error().message,
              HasSubstr("rank 3 is not one of"));
}

TEST(MoeLayerFormatsApi, SizesFollowTheFormat) {
  const auto sizes = [](Format format, ScaleType scales) {
    MoeCase c = kFp4;
    c.inter = 640;
    c.format = format;
    c.scales = scales;
    return moe::layer_sizes(c.options(symm::Backend::kCpu)).value();
  };
  const auto f32 = sizes(Format::kE4m3, ScaleType::kF32);
  const auto ue8m0 = sizes(Format::kE2m1, ScaleType::kUe8m0);
  EXPECT_EQ(f32.places, ue8m0.places);
  const u64 columns = device::round_up(u64{f32.places}, u64{4});
  EXPECT_EQ(f32.activation_bytes, f32.places * 640 + columns * 5 * 4);
  EXPECT_EQ(ue8m0.activation_bytes, ue8m0.places * 640 + columns * 2 * 4);
  EXPECT_EQ(ue8m0.weights.down_bytes, u64{2} * 2 * 5 * 8704);
  EXPECT_EQ(ue8m0.output_bytes, f32.output_bytes);
}

}  // namespace
}  // namespace crossdock::testing
