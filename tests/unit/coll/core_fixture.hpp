// A group of collectives with two ranks on GPUs of the fake driver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "coll/core.hpp"
#include "support/coll_cases.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::testing {

class CollCoreTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    const coll::Window window = coll::make_window(coll_options(), 2).value();
    auto group = symm::Group::create({.world = 2}, window.layout, driver_).value();
    auto jit = std::make_unique<jit::Jit>(
        jit::JitOptions{}, std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
    core_ = coll::Core::create(std::move(group), std::move(jit), coll_options(), soon()).value();
  }
  void TearDown() override {
    core_.reset();
    EXPECT_EQ(coll::Core::sweep(), 0u);
    FakeCudaTest::TearDown();
  }

  jit::TemporaryFolder folder_;
  std::shared_ptr<coll::Core> core_;
};

}  // namespace crossdock::testing
