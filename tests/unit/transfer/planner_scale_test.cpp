// Planning many requests over many regions: the time grows with the batch, not with its square.
// SPDX-License-Identifier: Apache-2.0
#include <ctime>
#include <random>
#include <set>

#include "support/engines.hpp"
#include "transfer/pointer_set.hpp"

namespace crossdock::testing {
namespace {

double cpu_seconds(clockid_t whose) {
  timespec now{};
  ::clock_gettime(whose, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU time of one submission of `n` requests, each from and to regions of its own; the least of
// three.
double submit_seconds(std::size_t n) {
  std::vector<std::byte> memory(2 * n * 64);
  auto engine = make_engine("loopback");
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
    const double begin = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    auto transfer = engine.submit(self, batch, {.deadline = soon()});
    least = std::min(least, cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - begin);
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

// A batch of many descriptors over many regions of both ends, with a notification: CPU time of the
// whole process from submission to the end. The notification is there when the transfer is over.
double deliver_seconds(std::size_t num_regions, std::size_t descriptors) {
  constexpr std::size_t kRegion = 2048, kPiece = 64;
  const std::size_t bytes = num_regions * kRegion;
  std::vector<std::byte> from(bytes), to(bytes);
  std::vector<transfer::MemoryRange> sources, targets;
  for (std::size_t at = 0; at < bytes; at += kRegion) {
    sources.push_back({from.data() + at, kRegion});
    targets.push_back({to.data() + at, kRegion});
  }
  auto target = make_engine("tcp");
  auto source = make_engine("tcp");
  const auto local = source.register_memory(sources).value();
  const auto remote = target.register_memory(targets).value();
  auto mailbox = target.mailbox("done").value();
  auto peer = source.open(target.name(), soon()).value();
  // Every other piece of a region, so that none of them can be merged with its neighbour.
  std::vector<Request> batch;
  for (std::size_t i = 0; i < descriptors; ++i) {
    const std::size_t offset = i / num_regions * 2 * kPiece % kRegion;
    const std::size_t region = i % num_regions;
    batch.push_back({Op::kWrite, bytes_of(local[region], offset),
                     address_of(remote[num_regions - 1 - region], offset), kPiece});
  }
  fill_pattern(from.data(), bytes, 3);
  const double begin = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  const auto sent =
      source.transfer(peer, batch,
                      {.deadline = Deadline::in(1min),
                       .notification = transfer::Notification{.mailbox = "done", .payload = "x"}});
  const double used = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
  EXPECT_TRUE(sent.ok()) << sent.error().describe();
  EXPECT_TRUE(mailbox.receive(Deadline::in(1ms)).ok()) << "it comes with the end, not later";
  for (std::size_t i = 0; i < descriptors; i += 101) {
    const auto* there = reinterpret_cast<const std::byte*>(batch[i].remote);
    EXPECT_EQ(std::memcmp(batch[i].local, there, kPiece), 0);
  }
  EXPECT_TRUE(source.close(soon()).ok());  // quicker than letting go of each region
  EXPECT_TRUE(target.close(soon()).ok());
  return used;
}

TEST(PlannerScale, ManyDescriptorsOverManyRegionsCostTheirNumber) {
  const double few = deliver_seconds(1'500, 20'000);
  const double many = deliver_seconds(15'000, 200'000);
  RecordProperty("ms_200000", std::to_string(1e3 * many));
  EXPECT_LT(many, 30 * few) << "ten times both; a hundred times the time if each meets each";
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
