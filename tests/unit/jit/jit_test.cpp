// prepare() end to end on the fake driver with a compiler that needs no toolkit: what is compiled,
// what is loaded, what is refused; and eight processes at one cache.
// SPDX-License-Identifier: Apache-2.0
#include "jit/jit.hpp"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>

#include "cuda/graph.hpp"
#include "jit_fixture.hpp"
#include "support/fake_cuda/fixture.hpp"

namespace crossdock::jit {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

PrepareOptions soon() {
  return {.deadline = Deadline::in(20s)};
}

class JitOnFake : public crossdock::testing::FakeCudaTest {
 protected:
  [[nodiscard]] std::unique_ptr<Jit> make(const std::string& id = "fake 1.0 -std=c++20") const {
    JitOptions options;
    options.cache.folder = (folder_.path / "cache").string();
    return std::make_unique<Jit>(std::move(options),
                                 std::make_unique<FakeCompiler>(folder_.path / "tally", id));
  }
  [[nodiscard]] std::size_t compilations() const {
    return read_text(folder_.path / "tally").size();
  }
  TemporaryFolder folder_;
};

TEST_F(JitOnFake, CompilesOnceThenMemoryThenCache) {
  const auto ctx = context();
  {
    const auto jit = make();
    const auto first = jit->prepare(ctx, fill_spec(), soon());
    ASSERT_TRUE(first.ok()) << first.error().describe();
    EXPECT_EQ(first->use().registers, 40);
    EXPECT_EQ(first->function().name(), "fill{.threads = 256} for sm_90a");
    EXPECT_TRUE(jit->prepare(ctx, fill_spec(), soon()).ok());
    EXPECT_EQ(fake_->calls("cuModuleLoadData"), 1);
    EXPECT_EQ(jit->counters().compiled, 1u);
  }
  const auto jit = make();
  EXPECT_TRUE(jit->prepare(ctx, fill_spec(), soon()).ok());
  EXPECT_EQ(jit->counters().loaded, 1u);
  EXPECT_EQ(compilations(), 1u);
}

TEST_F(JitOnFake, KernelOutlivesTheJitAndLaunches) {
  std::optional<Kernel> kernel;
  const auto ctx = context();
  kernel.emplace(make()->prepare(ctx, fill_spec(), soon()).value());
  int launched = 0;
  fake_->set_kernel("fill_code", [&](const cuda::LaunchConfig&, void** p) {
    launched = *static_cast<int*>(p[0]);
  });
  const auto stream = cuda::Stream::create(ctx).value();
  ASSERT_TRUE(kernel->launch(stream, {.grid = {1}, .block = {256}}, 7).ok());
  EXPECT_EQ(launched, 7);
}

TEST_F(JitOnFake, LaunchInACaptureIsFineAndPreparingInOneIsRefused) {
  const auto ctx = context();
  const auto jit = make();
  const auto stream = cuda::Stream::create(ctx).value();
  const auto kernel = jit->prepare(ctx, fill_spec(), soon()).value();
  auto capture = cuda::Capture::begin(stream).value();
  EXPECT_TRUE(kernel.launch(stream, {.grid = {1}, .block = {256}}, 0).ok());
  const auto refused =
      jit->prepare(ctx, fill_spec(512), {.deadline = Deadline::in(20s), .stream = &stream});
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message,
              HasSubstr("preparing kernel fill{.threads = 512} for sm_90a is not possible while"));
  EXPECT_EQ(compilations(), 1u);
  EXPECT_TRUE(capture.finish().ok());
}

TEST_F(JitOnFake, ArchitectureFollowsTheGpuOrIsRefused) {
  const auto jit = make();
  const auto ctx = context();
  EXPECT_EQ(jit->prepare(ctx, fill_spec(256, 0), soon())->spec().sm, 90);
  const auto other = jit->prepare(ctx, fill_spec(256, 100), soon());
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  EXPECT_THAT(other.error().message, HasSubstr("cannot run on GPU 0 (Fake GPU, sm_90)"));
  fake_->set_attribute(cuda::DeviceAttribute::kComputeCapabilityMajor, 7);
  EXPECT_EQ(jit->prepare(context(1), fill_spec(256, 0), soon()).code(), Code::kUnsupported);
}

TEST_F(JitOnFake, NewCompilerMeansNewCode) {
  EXPECT_TRUE(make("fake 1.0 x")->build(fill_spec(), Deadline::in(20s)).ok());
  EXPECT_TRUE(make("fake 1.1 x")->build(fill_spec(), Deadline::in(20s)).ok());
  EXPECT_TRUE(make("fake 1.0 x")->build(fill_spec(), Deadline::in(20s)).ok());
  EXPECT_EQ(compilations(), 2u);
}

TEST_F(JitOnFake, ManyAtOnceComeInTheirOrder) {
  const auto ctx = context();
  const auto jit = make();
  std::vector<KernelSpec> specs;
  for (unsigned threads = 32; threads <= 1024; threads += 32)
    specs.push_back(fill_spec(threads));
  const auto kernels = jit->prepare_all(ctx, specs, soon());
  ASSERT_TRUE(kernels.ok()) << kernels.error().describe();
  ASSERT_EQ(kernels->size(), specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i)
    EXPECT_EQ((*kernels)[i].spec(), specs[i]);
  EXPECT_EQ(compilations(), specs.size());
  specs[5].name = "nosuch";
  const auto failed = jit->prepare_all(ctx, specs, soon());
  EXPECT_EQ(failed.code(), Code::kNotFound);
  EXPECT_THAT(failed.error().message, HasSubstr("crossdock/kernel/nosuch.cuh"));
}

TEST_F(JitOnFake, ThreadsAskingForTheSameCompileItOnce) {
  const auto ctx = context();
  const auto jit = make();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&] { good += jit->prepare(ctx, fill_spec(), soon()).ok(); });
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(good, 8);
  EXPECT_EQ(compilations(), 1u);
}

TEST_F(JitOnFake, EightProcessesCompileOnce) {
  const auto codes = in_processes(8, [&](int) {
    const auto jit = make();
    for (unsigned threads = 32; threads <= 256; threads += 32) {
      const auto binary = jit->build(fill_spec(threads), Deadline::in(60s));
      if (!binary.ok() || binary->image != make_cubin({"fill_code"})) return 1;
    }
    return 0;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
  EXPECT_EQ(compilations(), 8u);  // one a kernel, not one a process
}

// Lock files have no bytes, so they can be made where nothing can be stored. Who waited for such a
// lock must not make the others wait for a second compilation, a third and so on.
TEST_F(JitOnFake, ProcessesCompileSideBySideWhereTheFolderIsFull) {
  void* const shared = ::mmap(nullptr, 2 * sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const compiling = new (shared) std::atomic<int>[2]{};
  std::atomic<int>& most = compiling[1];
  const auto codes = in_processes(4, [&](int) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{100, 100};
    if (::setrlimit(RLIMIT_FSIZE, &small) != 0) return 9;
    auto compiler = std::make_unique<FakeCompiler>(folder_.path / "tally");
    compiler->during_compile = [&] {
      const int now = ++compiling[0];
      if (now > most) most = now;
      // Long enough for the others to come; the first is alone, whatever it waits for.
      for (const auto end = Deadline::in(1s); most < 2 && !end.passed();)
        std::this_thread::yield();
      --compiling[0];
    };
    JitOptions options;
    options.cache.folder = (folder_.path / "cache").string();
    Jit jit(std::move(options), std::move(compiler));
    return jit.build(fill_spec(), Deadline::in(30s)).ok() ? 0 : 1;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
  EXPECT_EQ(compilations(), 4u);
  EXPECT_GE(most, 2) << "they compiled one after the other";
  ::munmap(shared, 2 * sizeof(std::atomic<int>));
}

TEST_F(JitOnFake, CorruptedCacheIsCompiledAnew) {
  EXPECT_TRUE(make()->build(fill_spec(), Deadline::in(20s)).ok());
  for (const auto& file : fs::directory_iterator(folder_.path / "cache"))
    write_text(file.path(), "garbage");
  const auto jit = make();
  EXPECT_TRUE(jit->build(fill_spec(), Deadline::in(20s)).ok());
  EXPECT_EQ(jit->counters().corrupt, 1u);
  EXPECT_EQ(jit->counters().compiled, 1u);
}

TEST_F(JitOnFake, WaitingForAnotherProcessEndsAtTheDeadline) {
  int started[2];
  ASSERT_EQ(::pipe(started), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto compiler = std::make_unique<FakeCompiler>(folder_.path / "tally");
    compiler->during_compile = [&] {
      static_cast<void>(!::write(started[1], "s", 1));
      for (;;)
        ::pause();
    };
    JitOptions options;
    options.cache.folder = (folder_.path / "cache").string();
    Jit stuck(std::move(options), std::move(compiler));
    static_cast<void>(stuck.build(fill_spec(), Deadline::in(60s)));
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(started[0], &byte, 1), 1);
  const auto jit = make();
  EXPECT_EQ(jit->build(fill_spec(), Deadline::in(30ms)).code(), Code::kDeadline);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(jit->build(fill_spec(), Deadline::in(20s)).ok());
  ::close(started[0]);
  ::close(started[1]);
}

TEST_F(JitOnFake, NoCompilerNamesThreeRemediesButAWarmCacheServes) {
  JitOptions options;
  options.compiler = {.nvrtc = "none", .nvcc = "none"};
  options.cache.folder = (folder_.path / "cache").string();
  Jit bare(options);
  const auto missing = bare.prepare(context(), fill_spec(), soon());
  EXPECT_EQ(missing.code(), Code::kUnsupported);
  for (const char* remedy : {"pip install nvidia-cuda-nvrtc", "CUDA_HOME", "crossdock jit warm"})
    EXPECT_THAT(missing.error().message, HasSubstr(remedy));
  EXPECT_TRUE(make()->build(fill_spec(), Deadline::in(20s)).ok());
  EXPECT_TRUE(bare.prepare(context(), fill_spec(), soon()).ok());
}

TEST_F(JitOnFake, LoadFailureIsTheDriversAndLeavesNothing) {
  fake_->fail({.function = "cuModuleLoadData", .status = cuda::Status::kOutOfMemory});
  const auto jit = make();
  const auto result = jit->prepare(context(), fill_spec(), soon());
  EXPECT_EQ(result.code(), Code::kNoMemory);
  EXPECT_THAT(result.error().message, HasSubstr("machine code of fill on GPU 0 (sm_90)"));
  EXPECT_TRUE(jit->prepare(context(), fill_spec(), soon()).ok());
}

TEST(JitOptionsTest, ComeFromSettings) {
  const auto config = base::Config::load({{"jit.cache_dir", "/x"}, {"jit.nvrtc", "/y/libnvrtc.so"}},
                                         {.environment = nullptr})
                          .value();
  const auto options = JitOptions::from_config(config);
  EXPECT_EQ(options.cache.folder, "/x");
  EXPECT_EQ(options.cache.max_bytes, std::uint64_t{1} << 30);
  EXPECT_EQ(options.compiler.nvrtc, "/y/libnvrtc.so");
  EXPECT_FALSE(options.compiler.line_info);
  const auto lines = base::Config::load({{"jit.line_info", "true"}}).value();
  EXPECT_TRUE(JitOptions::from_config(lines).compiler.line_info);
  const auto none = base::Config::load({{"jit.cache_dir", "none"}}).value();
  EXPECT_EQ(JitOptions::from_config(none).cache.folder, "");
}

}  // namespace
}  // namespace crossdock::jit
