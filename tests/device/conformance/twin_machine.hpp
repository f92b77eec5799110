// The probes on the twin. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "machine.hpp"
#include "twin/launch.hpp"
#include "twin/tensor_map.hpp"

namespace crossdock::testing::conformance {

// What a TensorCase describes, for either encoder.
inline twin::TensorMapOptions tensor_map_options(void* base, const TensorCase& c) {
  twin::TensorMapOptions options;
  options.base = base;
  options.element = twin::TensorElement::kU16;
  options.dims = {kTensorWidth, kTensorHeight};
  options.strides = {kTensorWidth * 2};
  options.box = {c.box_width, kBoxHeight};
  options.swizzle_bytes = c.swizzle;
  return options;
}

class TwinMachine final : public Machine {
 public:
  TwinMachine() : world_(checked(twin::World::create({.ranks = 1, .heap_bytes = 1 << 20}))) {}

  void reset() override { world_->reset(); }
  void* memory(std::size_t bytes, const void* content) override {
    void* p = checked(world_->allocate(0, bytes, 1024));
    if (content != nullptr) std::memcpy(p, content, bytes);
    return p;
  }
  std::vector<u8> read(const void* memory, std::size_t bytes) override {
    const auto* p = static_cast<const u8*>(memory);
    return {p, p + bytes};
  }
  TensorMap encode(void* base, const TensorCase& c) override {
    return checked(twin::encode_tensor_map(tensor_map_options(base, c)));
  }
  void run(const WgmmaParams& p) override { launch(wgmma_probe<kWarpgroup>, p, 128); }
  void run(const WarpParams& p) override { launch(warp_probe<kWarp>, p, 32); }
  void run(const TensorParams& p) override { launch(tensor_probe<kWarp>, p, 32); }

 private:
  template <class T>
  static T checked(Result<T> result) {
    if (result.ok()) return std::move(result).value();
    std::fprintf(stderr, "%s\n", result.error().describe().c_str());
    std::abort();
  }
  template <class Params>
  void launch(void (*kernel)(const Params&), const Params& params, u32 threads) {
    const auto launched =
        world_->launch({.block = threads, .shared_bytes = kShared}, kernel, params);
    if (!launched.ok()) std::abort();
    const twin::Report report = checked(world_->run({.seed = ++seed_}));
    if (report.ok()) return;
    std::fprintf(stderr, "%s: %s\n", report.kind.c_str(), report.message.c_str());
    std::abort();
  }

  std::unique_ptr<twin::World> world_;
  u64 seed_ = 0;
};

}  // namespace crossdock::testing::conformance
