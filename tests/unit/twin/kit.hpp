// Shorthands for the twin's own tests: they call the hooks directly, so that the twin is tested
// without the device vocabulary. Kernels are lambdas run by launch_body.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <crossdock/core.cuh>
#include <crossdock/twin/hooks.hpp>

#include "twin/launch.hpp"

namespace crossdock::twin::kit {

using namespace crossdock::device;
namespace hk = crossdock::twin::hooks;
using hk::Order;
using hk::Scope;

inline constexpr hk::Access kWeak{Order::kWeak, Scope::kSys};

inline u32 ld(const u32* p, hk::Access access = kWeak, Site site = Site::here()) {
  return hk::load_as(p, access, site);
}
inline void st(u32* p, u32 v, hk::Access access = kWeak, Site site = Site::here()) {
  hk::store_as(p, v, access, site);
}
inline u32 add(u32* p, u32 v, hk::Access access, Site site = Site::here()) {
  return static_cast<u32>(hk::atomic(p, hk::Rmw::kAdd, v, 4, access, site));
}
inline void syncthreads(Site site = Site::here()) {
  hk::sync_threads(site);
}
inline void spin(Site site = Site::here()) {
  hk::spin("poll", site);
}
inline void wait_until(const u32* p, u32 value, hk::Access access, Site site = Site::here()) {
  while (ld(p, access, site) != value)
    hk::spin("poll", site);
}

inline std::unique_ptr<World> make_world(int ranks, std::size_t heap = std::size_t{1} << 20) {
  auto world = World::create({.ranks = ranks, .heap_bytes = heap});
  EXPECT_TRUE(world.ok()) << world.error().describe();
  return std::move(world).value();
}
template <class T = u32>
T* make(World& world, int rank, std::size_t count) {
  auto p = world.allocate(rank, count * sizeof(T));
  EXPECT_TRUE(p.ok()) << p.error().describe();
  return static_cast<T*>(p.value());
}
inline void start(World& world, const LaunchConfig& config, std::function<void()> body) {
  auto launched = world.launch_body(config, std::move(body));
  ASSERT_TRUE(launched.ok()) << launched.error().describe();
}
inline Report run(World& world, const Schedule& schedule) {
  auto report = world.run(schedule);
  EXPECT_TRUE(report.ok()) << report.error().describe();
  return std::move(report).value();
}

// Schedules that a correct program must survive: all policies and modes, strong and weak memory.
inline Schedule schedule_of(std::uint64_t seed) {
  Schedule schedule;
  schedule.seed = seed;
  schedule.weak = seed % 2 == 1;
  schedule.stale = seed % 4 == 1;
  return schedule;
}

}  // namespace crossdock::twin::kit
