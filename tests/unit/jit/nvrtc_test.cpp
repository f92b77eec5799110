// The real compilers, where this machine has them: times, error texts, agreement. Skipped, with the
// reason, where it has none.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <link.h>

#include "jit/jit.hpp"
#include "jit_fixture.hpp"

namespace crossdock::jit {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

Deadline minute() {
  return Deadline::in(60s);
}

class RealCompilers : public ::testing::Test {
 protected:
  [[nodiscard]] JitOptions options(const std::string& nvrtc = "",
                                   const std::string& nvcc = "") const {
    JitOptions made;
    made.compiler = {.nvrtc = nvrtc, .nvcc = nvcc};
    made.cache.folder = folder_.path.string();
    return made;
  }
  [[nodiscard]] Result<Compiled> compile_text(const Compiler& compiler, const char* kernel,
                                              const KernelSpec& spec) const {
    const std::vector<SourceFile> files = {{"crossdock/kernel/fill.cuh", kernel}};
    return compiler.compile({.spec = spec, .files = files, .deadline = minute()});
  }
  TemporaryFolder folder_;
};

#define OPEN_OR_SKIP(variable, open)                                              \
  const auto variable##_result = open;                                            \
  if (!variable##_result.ok()) GTEST_SKIP() << variable##_result.error().message; \
  [[maybe_unused]] const Compiler& variable = **variable##_result

constexpr const char* kBroken =
    "namespace crossdock::device {\nstruct FillConfig { unsigned threads; };\n"
    "template <FillConfig c> __global__ void fill(int p) { undeclared = c.threads; }\n}\n";

TEST_F(RealCompilers, NvrtcColdAndWarm) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  std::printf("%s at %s\n", nvrtc.id().c_str(), nvrtc.location().c_str());
  BuildInfo cold;
  Jit first(options());
  ASSERT_TRUE(first.compiler(minute()).ok());
  const auto binary = first.build(fill_spec(), minute(), &cold);
  ASSERT_TRUE(binary.ok()) << binary.error().describe();
  EXPECT_TRUE(cold.compiled);
  BuildInfo warm;
  Jit second(options());
  ASSERT_TRUE(second.compiler(minute()).ok());
  ASSERT_TRUE(second.build(fill_spec(), minute(), &warm).ok());
  EXPECT_FALSE(warm.compiled);
  std::printf(
      "fill: cold compile %.0f ms (aim 2000), warm load %.2f ms (aim 5), %d registers, %zu bytes\n",
      cold.milliseconds, warm.milliseconds, binary->use.registers, binary->image.size());
  EXPECT_GT(binary->use.registers, 0);
  EXPECT_EQ(binary->use.spill_bytes, 0);
  // Far above the aims, which a shared machine cannot promise; far below a hang.
  EXPECT_LT(cold.milliseconds, 30'000);
  EXPECT_LT(warm.milliseconds, 1'000);
}

// Kernels with lines have keys of their own, and tell the lines in the section that checkers read.
TEST_F(RealCompilers, LinesOfTheSourceOnRequest) {
  const auto has_lines = [](const Compiled& compiled) {
    const std::string_view image{reinterpret_cast<const char*>(compiled.image.data()),
                                 compiled.image.size()};
    return image.find(".debug_line") != std::string_view::npos;
  };
  for (const bool real_nvcc : {false, true}) {
    const auto open = [&](bool line_info) {
      const CompilerOptions options{.line_info = line_info};
      return real_nvcc ? open_nvcc(options, minute()) : open_nvrtc(options);
    };
    OPEN_OR_SKIP(plain, open(false));
    OPEN_OR_SKIP(lined, open(true));
    EXPECT_EQ(lined.id(), plain.id() + " -lineinfo");
    constexpr const char* kText =
        "namespace crossdock::device {\nstruct FillConfig { unsigned threads; };\n"
        "template <FillConfig c> __global__ void fill(unsigned* p) { *p = c.threads; }\n}\n";
    const auto without = compile_text(plain, kText, fill_spec());
    const auto with = compile_text(lined, kText, fill_spec());
    ASSERT_TRUE(without.ok() && with.ok());
    EXPECT_FALSE(has_lines(*without)) << plain.id();
    EXPECT_TRUE(has_lines(*with)) << lined.id();
  }
}

// NVRTC keeps code in the driver's cache where there is a driver, and what comes from there has no
// log.
TEST_F(RealCompilers, NvrtcTellsTheRegistersEveryTime) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  constexpr const char* kText =
      "namespace crossdock::device {\nstruct FillConfig { unsigned threads; };\n"
      "template <FillConfig c> __global__ void fill(unsigned* p) { *p = c.threads; }\n}\n";
  for (int time = 0; time < 3; ++time) {
    const auto compiled = compile_text(nvrtc, kText, fill_spec());
    ASSERT_TRUE(compiled.ok()) << compiled.error().describe();
    EXPECT_GT(compiled->use.registers, 0) << "time " << time;
  }
}

TEST_F(RealCompilers, NvrtcSaysWhereTheSourceIsWrong) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  const auto broken = compile_text(nvrtc, kBroken, fill_spec());
  EXPECT_EQ(broken.code(), Code::kInvalidArgument);
  EXPECT_EQ(broken.error().native.domain, Native::Domain::kNvrtc);
  EXPECT_THAT(broken.error().message, HasSubstr("fill{.threads = 256} for sm_90a"));
  EXPECT_THAT(broken.error().message, HasSubstr("crossdock/kernel/fill.cuh(3): error"));
  EXPECT_THAT(broken.error().message, HasSubstr("undeclared"));
}

TEST_F(RealCompilers, NvrtcRefusesUnknownMembersAndMissingFiles) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  KernelSpec wrong = fill_spec();
  wrong.config = "{.treads = 256}";
  Jit jit(options());
  const auto result = jit.build(wrong, minute());
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("treads"));
  // Only what the key covers can be included, whatever lies on this machine.
  const auto outside =
      compile_text(nvrtc, "#include <cuda.h>\n#include <crossdock/core.cuh>\n", fill_spec());
  EXPECT_EQ(outside.code(), Code::kInvalidArgument);
  EXPECT_THAT(outside.error().message, HasSubstr("open source file \"cuda.h\""));
}

TEST_F(RealCompilers, NvrtcNamesArchitecturesItDoesNotKnow) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  const auto result = Jit(options()).build(fill_spec(256, 999), minute());
  EXPECT_EQ(result.code(), Code::kUnsupported);
  EXPECT_THAT(result.error().message, HasSubstr("cannot compile for sm_999"));
}

TEST_F(RealCompilers, NvrtcCompilesInManyThreads) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  JitOptions four = options();
  four.threads = 4;
  Jit jit(std::move(four));
  const std::vector<KernelSpec> specs = {fill_spec(64), fill_spec(128), fill_spec(256),
                                         fill_spec(512)};
  for (const auto& result : jit.build_all(specs, minute()))
    EXPECT_TRUE(result.ok()) << result.error().describe();
  EXPECT_EQ(jit.counters().compiled, 4u);
}

TEST_F(RealCompilers, NvccFallsInAndAgrees) {
  OPEN_OR_SKIP(nvcc, open_nvcc({}, minute()));
  std::printf("%s at %s\n", nvcc.id().c_str(), nvcc.location().c_str());
  Jit jit(options("none"));
  const auto binary = jit.build(fill_spec(), minute());
  ASSERT_TRUE(binary.ok()) << binary.error().describe();
  EXPECT_GT(binary->use.registers, 0);
  EXPECT_THAT(compile_text(nvcc, kBroken, fill_spec()).error().message,
              HasSubstr("crossdock/kernel/fill.cuh(3): error"));
  if (const auto nvrtc = Jit(options("", "none")).build(fill_spec(), minute()); nvrtc.ok()) {
    EXPECT_EQ(nvrtc->symbol, binary->symbol);
  }
}

TEST_F(RealCompilers, NvccRefusesAtItsDeadlineAndUnknownArchitectures) {
  OPEN_OR_SKIP(nvcc, open_nvcc({}, minute()));
  Jit jit(options("none"));
  ASSERT_TRUE(jit.compiler(minute()).ok());
  EXPECT_EQ(jit.build(fill_spec(), Deadline::in(5ms)).code(), Code::kDeadline);
  EXPECT_EQ(jit.build(fill_spec(256, 999), minute()).code(), Code::kUnsupported);
}

TEST_F(RealCompilers, EightProcessesOneCompilation) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  const auto codes = in_processes(8, [&](int) {
    Jit jit(options());
    const auto binary = jit.build(fill_spec(), minute());
    if (!binary.ok()) return 100;
    return static_cast<int>(jit.counters().compiled);
  });
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 1), 1);
  EXPECT_EQ(std::count(codes.begin(), codes.end(), 0), 7);
}

// A toolkit that is newer than the driver; NVRTC is any library, for it is never called.
class NewerToolkit : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(folder_.path / "lib64");
    std::filesystem::create_directories(folder_.path / "bin");
    void* const any = ::dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL);
    link_map* at = nullptr;
    ASSERT_TRUE(any != nullptr && ::dlinfo(any, RTLD_DI_LINKMAP, &at) == 0);
    std::filesystem::create_symlink(std::filesystem::canonical(at->l_name),
                                    folder_.path / "lib64" / "libnvrtc.so.13");
    nvcc_ = (folder_.path / "bin" / "nvcc").string();
    write_text(nvcc_, "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n");
    std::filesystem::permissions(nvcc_, std::filesystem::perms::owner_all);
  }
  TemporaryFolder folder_;
  std::string nvcc_;
};

TEST_F(NewerToolkit, IsNamedWithBothVersions) {
  const std::string home = folder_.path.string();
  const auto library = open_nvrtc({.cuda_home = home, .newest_cuda = 11080});
  EXPECT_EQ(library.code(), Code::kIncompatible);
  EXPECT_THAT(library.error().message, HasSubstr("NVRTC 13 at " + home +
                                                 "/lib64/libnvrtc.so.13 is newer than the driver, "
                                                 "which takes CUDA 11.8"));
  const auto tool = open_nvcc({.nvcc = nvcc_, .newest_cuda = 12040}, minute());
  EXPECT_EQ(tool.code(), Code::kIncompatible);
  EXPECT_THAT(tool.error().message, HasSubstr("nvcc 13.0.88 at " + nvcc_));
  EXPECT_TRUE(open_nvcc({.nvcc = nvcc_, .newest_cuda = 13000}, minute()).ok());
}

TEST_F(NewerToolkit, RemediesAreThoseThatHelpThisDriver) {
  const auto told = [&](int newest_cuda) {
    const auto opened =
        open_compiler({.nvrtc = "none", .nvcc = nvcc_, .newest_cuda = newest_cuda}, minute());
    EXPECT_EQ(opened.code(), Code::kUnsupported);
    return opened.error().message;
  };
  const std::string twelve = told(12040);
  for (const char* text : {"takes CUDA 12.4", "pip install nvidia-cuda-nvrtc-cu12;",
                           "CUDA 12 toolkit", "compiler of CUDA 12", "update the driver"})
    EXPECT_THAT(twelve, HasSubstr(text));
  EXPECT_THAT(told(11070), HasSubstr("Update the driver: it takes CUDA 11.7"));
  EXPECT_THAT(told(11070), ::testing::Not(HasSubstr("pip install")));
}

TEST_F(RealCompilers, TheLibraryThatASettingNamesIsComparedToo) {
  OPEN_OR_SKIP(nvrtc, open_nvrtc({}));
  const auto refused = open_nvrtc({.nvrtc = nvrtc.location(), .newest_cuda = 11080});
  EXPECT_EQ(refused.code(), Code::kIncompatible);
  EXPECT_THAT(refused.error().message, HasSubstr("which takes CUDA 11.8"));
}

TEST(OpenCompiler, WrongPathsAreNamed) {
  const auto nvrtc = open_nvrtc({.nvrtc = "/nonexistent/libnvrtc.so"});
  EXPECT_EQ(nvrtc.code(), Code::kUnsupported);
  EXPECT_THAT(nvrtc.error().message, HasSubstr("/nonexistent/libnvrtc.so"));
  const auto not_nvrtc = open_nvrtc({.nvrtc = "libm.so.6"});
  EXPECT_THAT(not_nvrtc.error().message, HasSubstr("libm.so.6 has no nvrtcVersion"));
  EXPECT_EQ(open_nvcc({.nvcc = "/nonexistent/nvcc"}, minute()).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace crossdock::jit
