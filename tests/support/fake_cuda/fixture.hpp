// A test with the fake driver: fresh configuration before, no object left after. The test's target
// needs crossdock_use_fake_cuda().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "support/fake_cuda/fake_cuda.hpp"

namespace crossdock::testing {

class FakeCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_ = open_fake_cuda(CROSSDOCK_FAKE_CUDA);
    ASSERT_NE(fake_, nullptr) << "cannot open " << CROSSDOCK_FAKE_CUDA;
    fake_->reset();
    before_ = fake_->live();
    auto driver = cuda::Driver::load({.library = CROSSDOCK_FAKE_CUDA});
    ASSERT_TRUE(driver.ok()) << driver.error().describe();
    driver_ = *driver;
  }
  void TearDown() override {
    if (!fake_) return;
    EXPECT_TRUE(fake_->live() == before_) << "the test left objects of the driver behind";
  }
  [[nodiscard]] cuda::Context context(int ordinal = 0) const {
    return cuda::Context::primary(*driver_, ordinal).value();
  }

  FakeCuda* fake_ = nullptr;
  const cuda::Driver* driver_ = nullptr;
  FakeLive before_;
};

}  // namespace crossdock::testing
