// A test on real GPUs: skipped, with the reason, where there is no driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  const cuda::Driver* driver_ = nullptr;
  int num_gpus_ = 0;
};

}  // namespace crossdock::testing
