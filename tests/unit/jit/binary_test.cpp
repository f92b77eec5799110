// The file form of compiled kernels against damage of every kind; reading cubins and logs.
// SPDX-License-Identifier: Apache-2.0
#include "jit/binary.hpp"

#include <gmock/gmock.h>

#include "jit_fixture.hpp"

namespace crossdock::jit {
namespace {

Binary sample() {
  return {.spec = fill_spec(),
          .key = hash_bytes({}),
          .compiler = "nvrtc 13.0 -std=c++20",
          .symbol = "fill_code",
          .use = {.registers = 40, .stack_bytes = 8, .spill_bytes = 0, .shared_bytes = 16},
          .image = make_cubin({"fill_code"})};
}

TEST(BinaryFile, RoundTrips) {
  const Binary in = sample();
  const auto out = decode(encode(in));
  ASSERT_TRUE(out.ok()) << out.error().describe();
  EXPECT_EQ(out->spec, in.spec);
  EXPECT_EQ(out->key, in.key);
  EXPECT_EQ(out->compiler, in.compiler);
  EXPECT_EQ(out->symbol, in.symbol);
  EXPECT_EQ(out->use, in.use);
  EXPECT_EQ(out->image, in.image);
}

TEST(BinaryFile, EveryTruncationIsCorrupt) {
  const auto file = encode(sample());
  for (std::size_t size = 0; size < file.size(); ++size)
    ASSERT_EQ(decode(std::span(file).first(size)).code(), Code::kCorrupt) << size;
  auto longer = file;
  longer.push_back(std::byte{0});
  EXPECT_EQ(decode(longer).code(), Code::kCorrupt);
}

TEST(BinaryFile, EveryFlippedBitIsNoticed) {
  auto file = encode(sample());
  for (std::size_t bit = 0; bit < file.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1u << (bit % 8));
    file[bit / 8] ^= mask;
    ASSERT_FALSE(decode(file).ok()) << "bit " << bit;
    file[bit / 8] ^= mask;
  }
  EXPECT_TRUE(decode(file).ok());
}

TEST(BinaryFile, OtherFormatIsIncompatible) {
  auto file = encode(sample());
  file[8] = std::byte{kBinaryFormat + 1};
  EXPECT_EQ(decode(file).code(), Code::kIncompatible);
}

TEST(Cubin, NamesItsKernels) {
  EXPECT_THAT(kernel_symbols(make_cubin({"a", "b"})).value(), ::testing::ElementsAre("a", "b"));
  EXPECT_EQ(only_kernel(fill_spec(), make_cubin({"a", "b"})).code(), Code::kInternal);
  EXPECT_EQ(only_kernel(fill_spec(), make_cubin({})).code(), Code::kInternal);
}

TEST(Cubin, TellsHowMuchCodeThereIs) {
  EXPECT_EQ(code_bytes(make_cubin({"a", "b"})).value(), 2 * kCodeBytes);
  EXPECT_EQ(code_bytes(make_cubin({})).value(), 0u);
  EXPECT_EQ(code_bytes(std::vector<std::byte>(8)).code(), Code::kCorrupt);
}

TEST(Cubin, DamageNeverReadsOutside) {
  const auto cubin = make_cubin({"kernel"});
  for (std::size_t size = 0; size < cubin.size(); ++size) {
    // A copy of its own, so that a sanitizer sees any read beyond it.
    const std::vector<std::byte> cut(cubin.begin(), cubin.begin() + static_cast<long>(size));
    EXPECT_FALSE(kernel_symbols(cut).ok()) << size;
  }
  for (std::size_t at = 0; at < cubin.size(); ++at) {
    auto changed = cubin;
    changed[at] ^= std::byte{0xff};
    static_cast<void>(kernel_symbols(changed));
  }
  EXPECT_EQ(kernel_symbols(cubin).value().size(), 1u);
}

TEST(PtxasLog, FiguresAreRead) {
  const auto use = parse_ptxas_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function '_Z1f' for 'sm_90a'\n"
      "    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, "
      "1024 bytes smem\n");
  EXPECT_EQ(use, (ResourceUse{168, 24, 36, 1024}));
  EXPECT_EQ(parse_ptxas_log("nothing of use"), ResourceUse{});
}

}  // namespace
}  // namespace crossdock::jit
