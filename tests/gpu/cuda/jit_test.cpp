// Kernels through the JIT on real GPUs: compile, load, launch, capture, refuse.
// SPDX-License-Identifier: Apache-2.0
#include "jit/jit.hpp"

#include <chrono>
#include <filesystem>
#include <gmock/gmock.h>

#include <crossdock/kernel/fill.cuh>

#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "gpu/gpu_fixture.hpp"

namespace crossdock::jit {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr unsigned kThreads = 256;

KernelSpec fill_spec(unsigned threads = kThreads) {
  return {.name = "fill",
          .entry = "crossdock::device::fill",
          .config_type = "crossdock::device::FillConfig",
          .config = ConfigText().field("threads", threads).text()};
}

class JitGpu : public crossdock::testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    folder_ = std::filesystem::temp_directory_path() /
              ("crossdock-gpu-jit-" + std::to_string(::getpid()));
    jit_ = make();
    const auto compiler = jit_->compiler(Deadline::in(30s));
    if (!compiler.ok()) GTEST_SKIP() << compiler.error().message;
    std::printf("%s (%s)\n", (*compiler)->id().c_str(), (*compiler)->location().c_str());
  }
  void TearDown() override {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  [[nodiscard]] std::unique_ptr<Jit> make() const {
    auto options = JitOptions::from_config(base::Config::load().value());
    options.cache.folder = folder_.string();
    options.compiler.newest_cuda = driver_->version;
    return std::make_unique<Jit>(std::move(options));
  }
  [[nodiscard]] static PrepareOptions soon() { return {.deadline = Deadline::in(60s)}; }
  std::filesystem::path folder_;
  std::unique_ptr<Jit> jit_;
};

struct Filled {
  cuda::Context context;
  cuda::Stream stream;
  cuda::DeviceMemory memory;
  cuda::LaunchOptions launch;
  device::FillParams params;
};

Filled make_fill(const cuda::Context& context, std::size_t bytes, std::uint32_t seed) {
  auto memory = cuda::DeviceMemory::allocate(context, bytes).value();
  const device::FillParams params{
      .target = memory.as<device::U32x4>(), .quads = bytes / sizeof(device::U32x4), .seed = seed};
  const cuda::LaunchOptions launch{.grid = {unsigned(context.device().num_sms)},
                                   .block = {kThreads}};
  return {context, cuda::Stream::create(context).value(), std::move(memory), launch, params};
}

// The number of words that are not the pattern's.
std::size_t wrong_words(const Filled& filled) {
  const std::size_t bytes = filled.memory.bytes();
  const auto host = cuda::PinnedMemory::allocate(filled.context, bytes).value();
  EXPECT_TRUE(cuda::copy_async(host.device(), filled.memory.address(), bytes, filled.stream).ok());
  EXPECT_TRUE(filled.stream.synchronize(Deadline::in(30s)).ok());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < bytes / 4; ++i)
    wrong += host.as<std::uint32_t>()[i] != device::fill_word(filled.params.seed, i);
  return wrong;
}

TEST_F(JitGpu, FillKernelRunsOnEveryGpu) {
  for (int ordinal = 0; ordinal < num_gpus_; ++ordinal) {
    const auto start = std::chrono::steady_clock::now();
    const auto ctx = context(ordinal);
    const auto kernel = jit_->prepare(ctx, fill_spec(), soon());
    ASSERT_TRUE(kernel.ok()) << kernel.error().describe();
    const auto ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const auto info = kernel->function().info().value();
    std::printf("GPU %d: %s ready in %.0f ms, %d registers, %d local bytes, code for sm_%d\n",
                ordinal, kernel->spec().title().c_str(), ms, info.num_registers, info.local_bytes,
                info.binary_version);
    const Filled filled = make_fill(ctx, std::size_t{64} << 20, 1000u + unsigned(ordinal));
    ASSERT_TRUE(kernel->launch(filled.stream, filled.launch, filled.params).ok());
    EXPECT_EQ(wrong_words(filled), 0u);
    EXPECT_EQ(info.local_bytes, 0);
  }
}

TEST_F(JitGpu, WarmLoadIsFast) {
  const auto ctx = context();
  ASSERT_TRUE(jit_->prepare(ctx, fill_spec(), soon()).ok());
  const auto warm = make();
  ASSERT_TRUE(warm->compiler(Deadline::in(30s)).ok());
  BuildInfo info;
  ASSERT_TRUE(warm->build(
                      [&] {
                        auto spec = fill_spec();
                        spec.sm = ctx.device().sm();
                        return spec;
                      }(),
                      Deadline::in(30s), &info)
                  .ok());
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(warm->prepare(ctx, fill_spec(), soon()).ok());
  const auto ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  std::printf("warm: cache %.2f ms (aim 5), with the driver's load %.2f ms\n", info.milliseconds,
              ms);
  EXPECT_FALSE(info.compiled);
  EXPECT_EQ(warm->counters().compiled, 0u);
}

TEST_F(JitGpu, CaptureRefusesPreparingAndRecordsLaunching) {
  const auto ctx = context();
  const auto kernel = jit_->prepare(ctx, fill_spec(), soon()).value();
  const Filled filled = make_fill(ctx, std::size_t{1} << 20, 77);
  auto capture = cuda::Capture::begin(filled.stream).value();
  const auto refused =
      jit_->prepare(ctx, fill_spec(512), {.deadline = Deadline::in(60s), .stream = &filled.stream});
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("before the capture begins"));
  ASSERT_TRUE(kernel.launch(filled.stream, filled.launch, filled.params).ok());
  const auto graph = capture.finish().value();
  ASSERT_TRUE(graph.launch(filled.stream).ok());
  EXPECT_EQ(wrong_words(filled), 0u);
}

TEST_F(JitGpu, BadLaunchIsAnErrorAndTheContextLives) {
  const auto ctx = context();
  const auto kernel = jit_->prepare(ctx, fill_spec(), soon()).value();
  const Filled filled = make_fill(ctx, std::size_t{1} << 20, 5);
  auto wrong = filled.launch;
  wrong.block = {4096};
  const auto refused = kernel.launch(filled.stream, wrong, filled.params);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("block 4096x1x1"));
  std::printf("%s\n", refused.error().describe().c_str());
  wrong = filled.launch;
  wrong.dynamic_shared_bytes = 300000;
  EXPECT_FALSE(kernel.launch(filled.stream, wrong, filled.params).ok());
  auto cooperative = filled.launch;
  cooperative.cooperative = true;
  ASSERT_TRUE(kernel.launch(filled.stream, cooperative, filled.params).ok());
  EXPECT_EQ(wrong_words(filled), 0u);
}

TEST_F(JitGpu, WrongArchitectureIsRefusedBeforeTheDriver) {
  const auto ctx = context();
  auto spec = fill_spec();
  spec.sm = ctx.device().sm() == 90 ? 100 : 90;
  EXPECT_EQ(jit_->prepare(ctx, spec, soon()).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace crossdock::jit
