// A test on real GPUs: skipped, with the reason, where there is no driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

#include "base/config.hpp"
#include "cuda/device.hpp"
#include "cuda/driver.hpp"

namespace crossdock::testing {

inline Result<const cuda::Driver*> load_gpu_driver() {
  CROSSDOCK_TRY(config, base::Config::load());
  return cuda::Driver::load({.library = config.string("cuda.driver")});
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("GPU_TEST_RANKS") != nullptr) ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    const auto driver = load_gpu_driver();
    if (!driver.ok()) GTEST_SKIP() << "no GPU: " << driver.error().message;
    driver_ = *driver;
    num_gpus_ = cuda::device_count(*driver_).value();
  }
  [[nodiscard]] cuda::Context context(int ordinal = 0) const {
    return cuda::Context::primary(*driver_, ordinal).value();
  }
  // Of groups in this process: one a GPU, or GPU_TEST_RANKS, which may share GPUs then. Their
  // kernels wait for each other, so each has a queue of the device to itself.
  [[nodiscard]] int num_ranks() const {
    const char* const wanted = std::getenv("GPU_TEST_RANKS");
    if (wanted == nullptr) return num_gpus_;
    ::setenv("CROSSDOCK_SYMM_SHARE_GPUS", "true", 1);
    return std::atoi(wanted);
  }
  [[nodiscard]] int ranks_of_a_gpu() const { return (num_ranks() + num_gpus_ - 1) / num_gpus_; }
  // Of groups whose ranks are processes: one a GPU, or GPU_TEST_RANKS, at least `fewest`. Where
  // there are fewer GPUs they share them by turns of a few milliseconds, so waits last some
  // seconds.
  [[nodiscard]] std::uint32_t num_processes(std::uint32_t fewest = 2) const {
    const char* const wanted = std::getenv("GPU_TEST_RANKS");
    const int ranks = wanted == nullptr ? num_gpus_ : std::atoi(wanted);
    return std::max(fewest, static_cast<std::uint32_t>(std::max(ranks, 0)));
  }
  [[nodiscard]] bool share(std::uint32_t processes) const {
    return processes > static_cast<std::uint32_t>(num_gpus_);
  }
  [[nodiscard]] int device_of(std::uint32_t rank) const {
    return static_cast<int>(rank) % num_gpus_;
  }
  const cuda::Driver* driver_ = nullptr;
  int num_gpus_ = 0;
};

}  // namespace crossdock::testing
