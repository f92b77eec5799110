// The embedded sources, specifications, keys, the kernel list and budgets.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gmock/gmock.h>

#include "jit/bundle.hpp"
#include "jit/kernel_list.hpp"
#include "jit/key.hpp"
#include "jit/spec.hpp"
#include "jit_fixture.hpp"

namespace crossdock::jit {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> paths_of(std::span<const SourceFile> files) {
  std::vector<std::string> paths;
  for (const auto& file : files)
    paths.emplace_back(file.path);
  return paths;
}

TEST(Bundle, HoldsTheDeviceSourcesAndNothingOfTheHost) {
  const auto paths = paths_of(embedded_files());
  EXPECT_THAT(paths, ::testing::Contains("crossdock/core.cuh"));
  EXPECT_THAT(paths, ::testing::Contains("crossdock/kernel/fill.cuh"));
  for (const auto& path : paths)
    EXPECT_THAT(path, ::testing::Not(HasSubstr("twin/")));
  for (const auto& file : embedded_files())
    EXPECT_FALSE(file.content.empty()) << file.path;
}

TEST(Bundle, FollowsIncludesOfEveryForm) {
  const std::vector<SourceFile> files = {
      {"k.cuh", "#pragma once\n#include <a.cuh>\n  #  include \"b.cuh\"\n#include <cstdint>\n"},
      {"a.cuh", "#if 0\n#include <c.cuh>\n#endif\n// #include <no.cuh>\n"},
      {"b.cuh", "#include <k.cuh>\n#include <"},
      {"c.cuh", ""},
      {"no.cuh", ""},
  };
  EXPECT_THAT(paths_of(reachable_files(files, "k.cuh").value()),
              ::testing::ElementsAre("a.cuh", "b.cuh", "c.cuh", "k.cuh"));
  const auto missing = reachable_files(files, "x.cuh");
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("x.cuh"));
}

TEST(Bundle, EmbeddedTextIsTheFileOnDisk) {
  const auto* const begin = embedded_files().data();
  const auto* const end = begin + embedded_files().size();
  const auto* const file = std::find_if(
      begin, end, [](const SourceFile& f) { return f.path == "crossdock/kernel/fill.cuh"; });
  ASSERT_NE(file, end);
  EXPECT_THAT(std::string(file->content), HasSubstr("CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)"));
  EXPECT_TRUE(file->content.ends_with("}  // namespace crossdock::device\n"));
}

TEST(Spec, ConfigurationTextIsValidAndStable) {
  EXPECT_EQ(ConfigText().field("threads", 256u).field("on", true).field("shift", -3).text(),
            "{.threads = 256, .on = true, .shift = -3}");
  EXPECT_EQ(ConfigText().field("mask", ~std::uint64_t{0}).text(),
            "{.mask = 18446744073709551615ull}");
  const KernelSpec spec = fill_spec();
  EXPECT_EQ(spec.expression(),
            "crossdock::device::fill<crossdock::device::FillConfig{.threads = 256}>");
  EXPECT_EQ(spec.title(), "fill{.threads = 256} for sm_90a");
  EXPECT_EQ(fill_spec(256, 89).arch(), "sm_89");
  EXPECT_TRUE(validate(spec).ok());
}

TEST(Spec, WhatCouldSmuggleCodeIsRefused) {
  const auto refused = [](auto change) {
    KernelSpec spec = fill_spec();
    change(spec);
    return validate(spec).code();
  };
  EXPECT_EQ(refused([](auto& s) { s.name = "../fill"; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.name = ""; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.entry = "f<1>"; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.entry = "a::"; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.config = "{}>; #include </etc/passwd>"; }),
            Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.config = "{.a = b()}"; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.config_type = ""; }), Code::kInvalidArgument);
  EXPECT_EQ(refused([](auto& s) { s.sm = 75; }), Code::kUnsupported);
  KernelSpec old = fill_spec(256, 70);
  EXPECT_THAT(validate(old).error().message, HasSubstr("sm_80 or newer"));
}

TEST(KeyTest, IsTheSameInEveryBuild) {
  // The value is a promise: a cache shipped in an image stays valid. It changes only with kScheme.
  const std::vector<SourceFile> files = {{"crossdock/kernel/fill.cuh", "text"}};
  EXPECT_EQ(source_key(fill_spec(), files).hex(), "9fb25a7ca87433364d3ef21207228686");
  EXPECT_EQ(binary_key(source_key(fill_spec(), files), "nvrtc 13.0").hex(),
            "eaa664ffddcf52e1cdb4603f89d2722e");
}

TEST(KeyTest, EverythingThatDecidesTheCodeChangesIt) {
  const std::vector<SourceFile> files = {{"a", "one"}, {"b", "two"}};
  const Key key = source_key(fill_spec(), files);
  EXPECT_NE(source_key(fill_spec(512), files), key);
  EXPECT_NE(source_key(fill_spec(256, 100), files), key);
  EXPECT_NE(source_key(fill_spec(), std::vector<SourceFile>{{"a", "one"}}), key);
  EXPECT_NE(source_key(fill_spec(), std::vector<SourceFile>{{"a", "one"}, {"b", "twO"}}), key);
  // Moving a byte over a boundary of fields is another key.
  EXPECT_NE(source_key(fill_spec(), std::vector<SourceFile>{{"a", "oneb"}, {"", "two"}}), key);
  KernelSpec other = fill_spec();
  other.entry = "crossdock::device::fill2";
  EXPECT_NE(source_key(other, files), key);
  EXPECT_NE(binary_key(key, "nvrtc 13.0"), binary_key(key, "nvrtc 13.1"));
}

TEST(KernelList, OfThisBuildIsValid) {
  const auto specs = known_kernels();
  ASSERT_TRUE(specs.ok()) << specs.error().describe();
  EXPECT_THAT(*specs, ::testing::Contains(fill_spec()));
  for (const auto& spec : *specs)
    EXPECT_TRUE(reachable_files(embedded_files(), spec.header()).ok()) << spec.title();
}

TEST(KernelList, MistakesAreNamed) {
  for (const char* text : {"", "[]", "{\"kernels\": 1}", "{\"kernels\": [{}]}",
                           "{\"kernels\": [{\"name\": \"f\", \"entry\": \"f\", \"config_type\": "
                           "\"C\", \"sm\": [90], \"variants\": [{\"a\": 1.5}]}]}"}) {
    const auto specs = parse_kernel_list(text);
    EXPECT_EQ(specs.code(), Code::kInvalidArgument) << text;
  }
}

TEST(BudgetTest, SpillsExcessAndAbsenceAreBreaches) {
  const KernelSpec spec = fill_spec();
  const auto budgets =
      parse_budgets(R"({"fill{.threads = 256} for sm_90a": {"registers": 32, "shared_bytes": 0}})");
  ASSERT_TRUE(budgets.ok()) << budgets.error().describe();
  EXPECT_EQ(budget_breach(spec, {.registers = 32}, *budgets), "");
  EXPECT_THAT(budget_breach(spec, {.registers = 33}, *budgets), HasSubstr("33 registers"));
  EXPECT_THAT(budget_breach(spec, {.registers = 32, .spill_bytes = 4}, *budgets),
              HasSubstr("spills 4 bytes"));
  EXPECT_THAT(budget_breach(spec, {.registers = 32, .shared_bytes = 8}, *budgets),
              HasSubstr("shared memory"));
  EXPECT_THAT(budget_breach(spec, {}, *budgets), HasSubstr("did not say"));
  EXPECT_THAT(budget_breach(fill_spec(512), {.registers = 1}, *budgets), HasSubstr("no budget"));
  EXPECT_EQ(parse_budgets(budgets_json(*budgets))->begin()->second.registers, 32);
  EXPECT_EQ(parse_budgets("{\"x\": {\"registers\": \"many\"}}").code(), Code::kInvalidArgument);
}

TEST(BudgetTest, MoreCodeThanTheBudgetIsABreach) {
  const KernelSpec spec = fill_spec();
  const auto budgets = parse_budgets(
      R"({"fill{.threads = 256} for sm_90a": {"registers": 32, "shared_bytes": 0, "code_bytes": 4096},
          "fill{.threads = 512} for sm_90a": {"registers": 32, "shared_bytes": 0}})");
  ASSERT_TRUE(budgets.ok()) << budgets.error().describe();
  EXPECT_EQ(code_breach(spec, 4096, *budgets), "");
  EXPECT_THAT(code_breach(spec, 4097, *budgets),
              HasSubstr("4097 bytes of code, its budget is 4096"));
  EXPECT_EQ(code_breach(fill_spec(512), 1 << 30, *budgets), "") << "none is given";
  const auto again = parse_budgets(budgets_json(*budgets));
  ASSERT_TRUE(again.ok()) << again.error().describe();
  EXPECT_EQ(again->at(spec.title()).code_bytes, 4096u);
  EXPECT_EQ(again->at(fill_spec(512).title()).code_bytes, 0u);
  EXPECT_EQ(code_budget(100'000), 106'496u) << "a twentieth more, in whole steps";
  EXPECT_EQ(parse_budgets(R"({"x": {"registers": 1, "shared_bytes": 0, "code_bytes": -1}})").code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace crossdock::jit
