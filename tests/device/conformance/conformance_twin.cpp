// Runs the probes on the twin and writes their outputs to a file: conformance_twin FILE.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "probe.cuh"
#include "twin/launch.hpp"
#include "twin/tensor_map.hpp"

namespace {

using namespace crossdock::testing::conformance;
using namespace crossdock;

template <class T>
T value_or_exit(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.error().describe().c_str());
  std::exit(1);
}

class Runner {
 public:
  explicit Runner(std::FILE* out)
      : out_(out),
        world_(value_or_exit(twin::World::create({.ranks = 1, .heap_bytes = 1 << 20}))) {}

  template <class T>
  T* memory(std::size_t count) {
    return static_cast<T*>(value_or_exit(world_->allocate(0, count * sizeof(T), 1024)));
  }
  template <class Params>
  void run(void (*kernel)(const Params&), const Params& params, u32 threads) {
    auto launched = world_->launch({.block = threads, .shared_bytes = kShared}, kernel, params);
    if (!launched.ok()) std::exit(1);
    const twin::Report report = value_or_exit(world_->run({.seed = ++seed_}));
    if (report.ok()) return;
    std::fprintf(stderr, "%s: %s\n", report.kind.c_str(), report.message.c_str());
    std::exit(1);
  }
  void dump(const void* data, std::size_t bytes) { std::fwrite(data, 1, bytes, out_); }
  void reset() { world_->reset(); }

 private:
  std::FILE* out_;
  std::unique_ptr<twin::World> world_;
  u64 seed_ = 0;
};

void tensor(Runner& runner, const TensorCase& c) {
  auto* in = runner.memory<u16>(kTensorWidth * kTensorHeight);
  auto* copy = runner.memory<u16>(kTensorWidth * kTensorHeight);
  for (u32 i = 0; i < kTensorWidth * kTensorHeight; ++i)
    in[i] = static_cast<u16>(i + 1);
  TensorParams p{};
  p.bytes = c.box_width * 2 * kBoxHeight;
  p.tile_bytes = tile_bytes(c);
  p.out = runner.memory<u32>(p.tile_bytes / 4);
  p.x = c.x;
  p.y = c.y;
  p.stores = stores(c);
  twin::TensorMapOptions options{in,
                                 twin::TensorElement::kU16,
                                 2,
                                 {kTensorWidth, kTensorHeight},
                                 {kTensorWidth * 2},
                                 {c.box_width, kBoxHeight},
                                 c.swizzle};
  p.load = value_or_exit(twin::encode_tensor_map(options));
  options.base = copy;
  p.store = value_or_exit(twin::encode_tensor_map(options));
  runner.run(tensor_probe, p, 32);
  runner.dump(p.out, p.tile_bytes);
  runner.dump(copy, kTensorWidth * kTensorHeight * 2);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: conformance_twin FILE\n"), 2;
  std::FILE* file = std::fopen(argv[1], "wb");
  if (file == nullptr) return std::perror(argv[1]), 1;
  Runner runner(file);
  for_each_wgmma([&](u32 kind, u64 a, u64 b, u32 a_offset, u32 b_offset) {
    runner.reset();
    auto* out = runner.memory<float>(128 * 32);
    runner.run(wgmma_probe, WgmmaParams{out, a, b, a_offset, b_offset, kind}, 128);
    runner.dump(out, 128 * 32 * 4);
  });
  runner.reset();
  auto* lanes = runner.memory<u32>(32 * 64);
  runner.run(warp_probe, WarpParams{lanes}, 32);
  runner.dump(lanes, 32 * 64 * 4);
  for (const TensorCase& c : kTensorCases) {
    runner.reset();
    tensor(runner, c);
  }
  return std::fclose(file) == 0 ? 0 : 1;
}
