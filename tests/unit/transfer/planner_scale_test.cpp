// Planning many requests over many regions: the time grows with the batch, not with its square.
// SPDX-License-Identifier: Apache-2.0
#include <ctime>
#include <random>
#include <set>

#include "support/engines.hpp"
#include "transfer/pointer_set.hpp"

namespace crossdock::testing {
namespace {

double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU time of one submission of `n` requests, each from and to regions of its own; the least of
// three.
double submit_seconds(std::size_t n) {
  auto engine = make_engine("loopback");
  std::vector<std::byte> memory(2 * n * 64);
  std::vector<transfer::MemoryRange> ranges;
  for (std::size_t i = 0; i < 2 * n; ++i)
    ranges.push_back({memory.data() + i * 64, 64});
  const auto regions = engine.register_memory(ranges).value();
  auto self = engine.open(engine.name(), soon()).value();
  std::vector<Request> batch;
  for (std::size_t i = 0; i < n; ++i)
    batch.push_back({Op::kWrite, regions[i].address(), address_of(regions[n + i]), 32});
  double least = 1e9;
  for (int round = 0; round < 3; ++round) {
    fill_pattern(memory.data(), n * 64, static_cast<std::uint64_t>(round));
    const double begin = thread_seconds();
    auto transfer = engine.submit(self, batch, {.deadline = soon()});
    least = std::min(least, thread_seconds() - begin);
    EXPECT_TRUE(transfer.ok() && transfer->wait(soon()).ok());
    for (std::size_t i = 0; i < n; i += 97)
      EXPECT_EQ(std::memcmp(regions[i].address(), regions[n + i].address(), 32), 0);
  }
  EXPECT_TRUE(engine.close(soon()).ok());  // quicker than letting go of each region
  return least;
}

TEST(PlannerScale, ManyRegionsCostTheirNumberNotItsSquare) {
  const double few = submit_seconds(3'000);
  const double many = submit_seconds(12'000);
  RecordProperty("ms_12000", std::to_string(1e3 * many));
  EXPECT_LT(many, 9 * few) << "four times the regions; 16 times the time if each is compared";
}

TEST(PointerSet, KnowsWhatItHolds) {
  transfer::detail::PointerSet set;
  std::mt19937 random(1);
  std::vector<char> objects(5000);
  for (int round = 0; round < 3; ++round) {
    std::set<const void*> expected;
    for (int i = 0; i < 20'000; ++i) {
      const void* object = &objects[random() % (round == 1 ? 16 : objects.size())];
      ASSERT_EQ(set.insert(object), expected.insert(object).second) << round << " " << i;
      ASSERT_EQ(set.size(), expected.size());
    }
    set.clear();
  }
}

}  // namespace
}  // namespace crossdock::testing
