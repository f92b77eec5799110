// What the tests of the symmetric layer on GPUs share: a Jit with the user's cache, a group with a
// suite over its window, and the worlds that this machine can have.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdio>
#include <gtest/gtest.h>
#include <memory>
#include <set>

#include "gpu/gpu_fixture.hpp"
#include "jit/jit.hpp"
#include "symm/kernels/suite.hpp"

namespace crossdock::testing {

using namespace std::chrono_literals;
using symm::u32;
using symm::u64;
using symm::u8;

// For one step; long, since sanitizers slow kernels down by an order of magnitude.
inline Deadline soon() {
  return Deadline::in(120s);
}

// A world of GPUs 0 .. world - 1 in this process.
struct SymmWorld {
  symm::SuiteShape shape;
  device::SymmetricLayout layout;
  symm::SuiteAreas areas;
  std::unique_ptr<symm::Group> group;
  std::unique_ptr<symm::Launcher> launcher;
  std::unique_ptr<symm::Suite> suite;

  SymmWorld(const cuda::Driver& driver, jit::Jit& jit, u32 world,
            symm::Addressing addressing = symm::Addressing::kStride) {
    shape =
        symm::SuiteShape::for_gpu(static_cast<u32>(cuda::query_device(driver, 0).value().num_sms));
    shape.wait = 20s;  // nothing waits that long unless it is broken
    areas = symm::add_suite(layout, world, shape);
    auto made = symm::Group::create({.world = world, .addressing = addressing}, layout, &driver);
    group = std::move(made).value();
    launcher = std::make_unique<symm::Launcher>(symm::Launcher::create(*group, &jit).value());
    suite = std::make_unique<symm::Suite>(
        symm::Suite::create(*launcher, areas, shape, Deadline::in(300s)).value());
  }
};

class SymmGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto options = jit::JitOptions::from_config(base::Config::load().value());
    options.compiler.newest_cuda = driver_->version;
    jit_ = std::make_unique<jit::Jit>(std::move(options));
    const auto compiler = jit_->compiler(Deadline::in(60s));
    if (!compiler.ok()) GTEST_SKIP() << compiler.error().message;
  }
  [[nodiscard]] SymmWorld make(u32 world,
                               symm::Addressing addressing = symm::Addressing::kStride) const {
    return {*driver_, *jit_, world, addressing};
  }
  // One rank, two, and all GPUs.
  [[nodiscard]] std::set<u32> worlds() const {
    std::set<u32> all{1};
    if (num_ranks() >= 2) all.insert({2, static_cast<u32>(num_ranks())});
    return all;
  }
  std::unique_ptr<jit::Jit> jit_;
};

}  // namespace crossdock::testing
