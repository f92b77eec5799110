// What the GPU computes in the probes of tests/device/conformance, byte for byte against the twin:
// wgmma operand layouts and swizzles, warp collectives, matrix loads and stores, tensor maps. The
// probes are compiled by the JIT like any kernel; that they compile is tested without a GPU too.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>

#include "cuda/memory.hpp"
#include "device/conformance/twin_machine.hpp"
#include "gpu/gpu_fixture.hpp"
#include "jit/jit.hpp"
#include "symm/tensor_map.hpp"

namespace crossdock::testing::conformance {
namespace {

using namespace std::chrono_literals;

// The bundle of the library and the probes, as if they were one of its kernels.
struct Sources {
  std::string probe;
  std::vector<jit::SourceFile> files;

  Sources() {
    std::ifstream file(CROSSDOCK_PROBE_SOURCE);
    probe.assign(std::istreambuf_iterator<char>(file), {});
    EXPECT_FALSE(probe.empty()) << CROSSDOCK_PROBE_SOURCE;
    const auto embedded = jit::embedded_files();
    files.assign(embedded.begin(), embedded.end());
    files.push_back({"crossdock/kernel/conformance_probe.cuh", probe});
    std::sort(files.begin(), files.end(),
              [](const auto& a, const auto& b) { return a.path < b.path; });
  }
};

jit::KernelSpec probe_spec(const char* kernel, u32 threads, int sm) {
  const std::string space = "crossdock::testing::conformance::";
  return {.name = "conformance_probe",
          .entry = space + kernel,
          .config_type = space + "ProbeConfig",
          .config = jit::ConfigText().field("threads", threads).text(),
          .sm = sm};
}
constexpr std::pair<const char*, u32> kProbes[] = {{"wgmma_probe", kWarpgroup.threads},
                                                   {"warp_probe", kWarp.threads},
                                                   {"tensor_probe", kWarp.threads}};

std::unique_ptr<jit::Jit> make_jit(const Sources& sources) {
  auto options = jit::JitOptions::from_config(base::Config::load().value());
  options.cache.folder.clear();  // compiled anew: the probes are few
  options.files = sources.files;
  return std::make_unique<jit::Jit>(std::move(options));
}

TEST(ConformanceProbes, CompileForHopper) {
  const Sources sources;
  const auto jit = make_jit(sources);
  const auto compiler = jit->compiler(Deadline::in(60s));
  if (!compiler.ok()) GTEST_SKIP() << compiler.error().message;
  for (const auto& [probe, threads] : kProbes) {
    const auto built = jit->build(probe_spec(probe, threads, 90), Deadline::in(300s));
    EXPECT_TRUE(built.ok()) << built.error().describe();
  }
}

class GpuMachine final : public Machine {
 public:
  GpuMachine(const cuda::Context& context, jit::Jit& jit)
      : context_(context), jit_(jit), stream_(cuda::Stream::create(context).value()) {}

  void reset() override {
    wait();
    blocks_.clear();
  }
  void* memory(std::size_t bytes, const void* content) override {
    blocks_.push_back(cuda::DeviceMemory::allocate(context_, bytes).value());
    const auto address = blocks_.back().address();
    if (content != nullptr) {
      cuda::copy_async(address, cuda::device_ptr(content), bytes, stream_).value();
    } else {
      cuda::fill_bytes_async(address, 0, bytes, stream_).value();
    }
    wait();
    return blocks_.back().as<void>();
  }
  std::vector<u8> read(const void* memory, std::size_t bytes) override {
    std::vector<u8> out(bytes);
    cuda::copy_async(cuda::device_ptr(out.data()), cuda::device_ptr(memory), bytes, stream_)
        .value();
    wait();
    return out;
  }
  TensorMap encode(void* base, const TensorCase& c) override {
    return symm::encode_for_gpu(context_, tensor_map_options(base, c)).value();
  }
  void run(const WgmmaParams& p) override { launch("wgmma_probe", p, 128); }
  void run(const WarpParams& p) override { launch("warp_probe", p, 32); }
  void run(const TensorParams& p) override { launch("tensor_probe", p, 32); }

 private:
  void wait() { stream_.synchronize(Deadline::in(60s)).value(); }
  template <class Params>
  void launch(const char* probe, const Params& p, u32 threads) {
    const auto kernel = jit_.prepare(
        context_, probe_spec(probe, threads, 0),
        {.deadline = Deadline::in(120s), .stream = nullptr, .dynamic_shared_bytes = kShared});
    kernel.value()
        .launch(stream_, {.block = {threads}, .dynamic_shared_bytes = kShared}, p)
        .value();
    wait();
  }

  cuda::Context context_;
  jit::Jit& jit_;
  cuda::Stream stream_;
  std::vector<cuda::DeviceMemory> blocks_;
};

using ConformanceGpu = GpuTest;

TEST_F(ConformanceGpu, ComputesWhatTheTwinDoes) {
  if (IsSkipped()) return;
  const auto ctx = context();
  if (ctx.device().sm() != 90)
    GTEST_SKIP() << "wgmma exists on sm_90 only; this GPU is sm_" << ctx.device().sm();
  const Sources sources;
  const auto jit = make_jit(sources);
  GpuMachine gpu(ctx, *jit);
  TwinMachine twin;
  const auto got = run_probes(gpu);
  const auto want = run_probes(twin);
  ASSERT_EQ(got.size(), want.size());
  std::size_t different = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].bytes == want[i].bytes) continue;
    ++different;
    const auto at =
        std::mismatch(got[i].bytes.begin(), got[i].bytes.end(), want[i].bytes.begin()).first -
        got[i].bytes.begin();
    ADD_FAILURE() << got[i].name << " differs at byte " << at << " of " << got[i].bytes.size();
  }
  std::printf("%zu probes, %zu different\n", got.size(), different);
}

}  // namespace
}  // namespace crossdock::testing::conformance
