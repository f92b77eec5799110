// A test on real GPUs: skipped, with the reason, where there is no driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
    const auto driver = load_gpu_driver();
    if (!driver.ok()) GTEST_SKIP() << "no GPU: " << driver.error().message;
    driver_ = *driver;
    num_gpus_ = cuda::device_count(*driver_).value();
  }
  [[nodiscard]] cuda::Context context(int ordinal = 0) const {
    return cuda::Context::primary(*driver_, ordinal).value();
  }
  const cuda::Driver* driver_ = nullptr;
  int num_gpus_ = 0;
};

}  // namespace crossdock::testing
