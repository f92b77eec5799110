// Memory that its owner unmapped without releasing its region, over tcp: the transfer that names it
// fails and says so; no process dies, no rail is lost, nobody else notices.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "support/engines.hpp"
#include "support/fragile.hpp"

namespace crossdock::testing {
namespace {

std::uint64_t redials(const Engine& engine) {
  return metric(engine, "crossdock_redials_total");
}

struct Case {
  const char* name;
  bool local;  // whose memory is gone
  Op op;
  std::size_t from;    // gone from here on
  std::size_t length;  // of each request
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class Unmapped : public ::testing::TestWithParam<Case> {};

// RemoteReadHalf: an answer that has begun cannot be refused any more, so it is completed and its
// verdict says that it counts for nothing; then that region is looked at before it is read.
INSTANTIATE_TEST_SUITE_P(
    All, Unmapped,
    ::testing::Values(Case{"LocalWrite", true, Op::kWrite, 0, Fragile::kBytes},
                      Case{"LocalWriteSmall", true, Op::kWrite, 0, 64},
                      Case{"LocalWriteHalf", true, Op::kWrite, 1 << 19, Fragile::kBytes},
                      Case{"LocalRead", true, Op::kRead, 0, Fragile::kBytes},
                      Case{"LocalReadSmall", true, Op::kRead, 0, 64},
                      Case{"LocalReadHalf", true, Op::kRead, 1 << 19, Fragile::kBytes},
                      Case{"RemoteWrite", false, Op::kWrite, 0, Fragile::kBytes},
                      Case{"RemoteWriteSmall", false, Op::kWrite, 0, 64},
                      Case{"RemoteWriteHalf", false, Op::kWrite, 1 << 19, Fragile::kBytes},
                      Case{"RemoteRead", false, Op::kRead, 0, Fragile::kBytes},
                      Case{"RemoteReadSmall", false, Op::kRead, 0, 64},
                      Case{"RemoteReadHalf", false, Op::kRead, 1 << 19, Fragile::kBytes}),
    [](const auto& over) { return std::string(over.param.name); });

TEST_P(Unmapped, CostsTheTransferAndNothingElse) {
  const Case& c = GetParam();
  constexpr std::size_t kBytes = 4 << 20;
  const Fragile here, there;
  Pair pair("tcp", kBytes);
  auto local = pair.source.register_memory(here.data(), Fragile::kBytes).value();
  auto remote =
      pair.target.register_memory(there.data(), Fragile::kBytes, {.label = "fragile"}).value();
  ASSERT_TRUE(pair.peer.region("fragile", soon()).ok());
  (c.local ? here : there).lose_from(c.from);
  std::atomic<bool> stop{false};
  std::thread innocent([&] {
    for (std::uint64_t round = 0; !stop.load(); ++round) {
      fill_pattern(pair.source_memory.data(), kBytes, round);
      const Result<> result = pair.run({pair.write(0, kBytes)});
      EXPECT_TRUE(result.ok()) << result.error().describe();
      EXPECT_TRUE(has_pattern(pair.target_memory.data(), kBytes, round));
    }
  });
  for (int i = 0; i < 5; ++i) {
    const Request request{c.op, local.address(), address_of(remote), c.length};
    const Result<> result =
        pair.source.transfer(pair.peer, std::span(&request, 1), {.deadline = soon()});
    ASSERT_EQ(result.code(), Code::kInvalidArgument) << result.error().describe();
    EXPECT_NE(result.error().message.find("not mapped"), std::string::npos);
    EXPECT_EQ(result.error().native.value, c.local ? EFAULT : 0);
  }
  stop.store(true);
  innocent.join();
  EXPECT_EQ(redials(pair.source), 0u);
}

// The hashing thread is kept busy, so that the memory can go between its bytes' arrival and their
// hash. Over loopback, whose copies are plain: nothing but the checksum sees that it is gone.
TEST(UnmappedChecksum, EndsTheTransferAndNothingElse) {
  constexpr std::size_t kBytes = 64u << 20;
  for (const bool local : {true, false}) {
    const Fragile here, there;
    auto engine = make_engine("loopback");
    auto region = engine.allocate(2 * kBytes).value();
    auto source = engine.register_memory(here.data(), Fragile::kBytes).value();
    auto target = engine.register_memory(there.data(), Fragile::kBytes).value();
    auto self = engine.open(engine.name(), soon()).value();
    const std::vector<Request> many(
        16, Request{Op::kWrite, region.address(), address_of(region, kBytes), kBytes});
    auto slow =
        engine.submit(self, many, {.deadline = Deadline::in(1min), .checksum = true}).value();
    while (slow.status().bytes_done < slow.status().bytes_total)
      std::this_thread::yield();
    const Request doomed{Op::kWrite, here.data(), address_of(target), Fragile::kBytes};
    auto transfer =
        engine.submit(self, std::span(&doomed, 1), {.deadline = soon(), .checksum = true}).value();
    while (transfer.status().bytes_done < transfer.status().bytes_total)
      std::this_thread::yield();
    (local ? here : there).lose_from(Fragile::kBytes / 2);
    slow.cancel();
    const auto result = transfer.wait(soon());
    ASSERT_EQ(result.code(), Code::kInvalidArgument) << result.error().describe();
    EXPECT_NE(result.error().message.find("not mapped"), std::string::npos);
    const Request good{Op::kWrite, here.data(), address_of(target), Fragile::kBytes / 2};
    EXPECT_TRUE(
        engine.transfer(self, std::span(&good, 1), {.deadline = soon(), .checksum = true}).ok());
  }
}

}  // namespace
}  // namespace crossdock::testing
