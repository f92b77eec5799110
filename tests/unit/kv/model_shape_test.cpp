// Names, sizes and the parser of model shapes.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <crossdock/kv/model_shape.hpp>

namespace crossdock::kv {
namespace {

TEST(ModelShape, KnownModelsHaveTheirPublishedSizes) {
  EXPECT_EQ(parse_model_shape("qwen3-30b-a3b")->token_bytes(), 98'304u);
  EXPECT_EQ(parse_model_shape("Llama-3.1-8B")->token_bytes(), 131'072u);
  EXPECT_EQ(parse_model_shape("deepseek-v3")->token_bytes(), 61u * 576 * 2);
}

TEST(ModelShape, UnknownNameListsTheKnownOnes) {
  const auto shape = parse_model_shape("gpt-9");
  ASSERT_EQ(shape.code(), Code::kNotFound);
  EXPECT_THAT(shape.error().message, testing::HasSubstr("qwen3-30b-a3b, llama-3.1-8b"));
}

TEST(ModelShape, CustomShapes) {
  const auto shape = parse_model_shape("layers=2,heads=8,dim=64,dtype=1");
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape->token_bytes(), 2u * 2 * 8 * 64);
  const auto latent = parse_model_shape("layers=3,dim=576,latent");
  ASSERT_TRUE(latent.ok());
  EXPECT_EQ(latent->token_layer_bytes(), 576u * 2);
}

TEST(ModelShape, BadCustomShapesNameThePart) {
  EXPECT_NE(parse_model_shape("layers=4,heads=8").error().message.find("dim is missing"),
            std::string::npos);
  EXPECT_NE(parse_model_shape("heads=8,dim=8").error().message.find("layers is missing"),
            std::string::npos);
  const char* const bad[] = {"layers=2,heads=8",
                             "layers=0,heads=8,dim=64",
                             "layers=x,heads=8,dim=64",
                             "layers=2,heads=8,dim=64,colour=3",
                             "layers=2,heads=8,dim=64,dtype=9",
                             "layers=1,heads=2,dim=8,latent",
                             "layers=99999999999,heads=1,dim=8",
                             "layers="};
  for (const char* text : bad) {
    const auto shape = parse_model_shape(text);
    ASSERT_EQ(shape.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(shape.error().message, testing::HasSubstr("model shape")) << text;
  }
}

}  // namespace
}  // namespace crossdock::kv
