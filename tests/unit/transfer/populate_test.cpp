// Memory of a peer is prepared for copies when it is opened, but only for so long.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <vector>

#include "support/engines.hpp"
#include "support/process_use.hpp"

namespace crossdock::testing {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kBytes = 256 * kMiB;

// What opening a peer makes resident of its kBytes, which nobody has touched.
std::size_t populated_mib(const std::string& limit) {
  auto target = make_engine("shm");
  const auto region = target.allocate(kBytes, {}).value();
  auto source = Engine::create({.config = {{"log.level", "error"},
                                           {"transport.enabled", "shm"},
                                           {"transport.shm.populate", limit}}})
                    .value();
  const std::size_t before = resident_kib();
  const auto peer = source.open(target.name(), soon()).value();
  const std::size_t after = resident_kib();
  std::vector<std::byte> bytes(kMiB, std::byte{7});
  const auto local = source.register_memory(bytes.data(), bytes.size()).value();
  const auto end = address_of(region, kBytes - kMiB);
  const Request write{Op::kWrite, bytes.data(), end, kMiB};
  EXPECT_TRUE(source.transfer(peer, std::span(&write, 1), {.deadline = soon()}).ok());
  EXPECT_EQ(std::memcmp(bytes_of(region, kBytes - kMiB), bytes.data(), kMiB), 0)
      << "copies reach what was not prepared";
  return after > before ? (after - before) / 1024 : 0;
}

TEST(Populate, EndsWithTheTimeItMayTake) {
  EXPECT_LT(populated_mib("0"), 16u);
  EXPECT_LT(populated_mib("1us"), 64u);
  const std::size_t all = populated_mib("10min");
  if (all < 16) GTEST_SKIP() << "this kernel has no MADV_POPULATE_WRITE, or shm does not map here";
  EXPECT_GE(all, 240u);
}

}  // namespace
}  // namespace crossdock::testing
