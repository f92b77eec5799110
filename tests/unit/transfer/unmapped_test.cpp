// Memory that its owner unmapped without releasing its region, over tcp: the transfer that names it
// fails and says so; no process dies, no rail is lost, nobody else notices.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <sys/mman.h>
#include <thread>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

// Registered memory of which the end can be taken away. The address stays reserved, or a later
// allocation would come to lie there.
class Fragile {
 public:
  static constexpr std::size_t kBytes = 1 << 20;
  Fragile()
      : data_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memset(data_, 1, kBytes);
  }
  ~Fragile() { ::munmap(data_, kBytes); }
  Fragile(const Fragile&) = delete;
  Fragile& operator=(const Fragile&) = delete;
  void lose_from(std::size_t offset) const {
    ASSERT_EQ(::mprotect(static_cast<std::byte*>(data_) + offset, kBytes - offset, PROT_NONE), 0);
  }
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* const data_;
};

std::uint64_t redials(const Engine& engine) {
  const std::string text = engine.metrics();
  const std::string line = "\ncrossdock_redials_total ";
  return std::stoull(text.substr(text.find(line) + line.size()));
}

struct Case {
  const char* name;
  bool local;  // whose memory is gone
  Op op;
  std::size_t from;       // gone from here on
  std::size_t length;     // of each request
  std::uint64_t redials;  // at most
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class Unmapped : public ::testing::TestWithParam<Case> {};

// A READ whose answer has begun cannot be refused any more: that lane is lost once, then its region
// is looked at before it is read.
INSTANTIATE_TEST_SUITE_P(
    All, Unmapped,
    ::testing::Values(Case{"LocalWrite", true, Op::kWrite, 0, Fragile::kBytes, 0},
                      Case{"LocalWriteSmall", true, Op::kWrite, 0, 64, 0},
                      Case{"LocalWriteHalf", true, Op::kWrite, 1 << 19, Fragile::kBytes, 0},
                      Case{"LocalRead", true, Op::kRead, 0, Fragile::kBytes, 0},
                      Case{"LocalReadSmall", true, Op::kRead, 0, 64, 0},
                      Case{"LocalReadHalf", true, Op::kRead, 1 << 19, Fragile::kBytes, 0},
                      Case{"RemoteWrite", false, Op::kWrite, 0, Fragile::kBytes, 0},
                      Case{"RemoteWriteSmall", false, Op::kWrite, 0, 64, 0},
                      Case{"RemoteWriteHalf", false, Op::kWrite, 1 << 19, Fragile::kBytes, 0},
                      Case{"RemoteRead", false, Op::kRead, 0, Fragile::kBytes, 0},
                      Case{"RemoteReadSmall", false, Op::kRead, 0, 64, 0},
                      Case{"RemoteReadHalf", false, Op::kRead, 1 << 19, Fragile::kBytes, 2}),
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
      Result<> result;
      do
        result = pair.run({pair.write(0, kBytes)});
      while (c.redials != 0 && !result.ok() && result.error().retry == Retry::kLater);
      EXPECT_TRUE(result.ok()) << result.error().describe();
      EXPECT_TRUE(has_pattern(pair.target_memory.data(), kBytes, round));
    }
  });
  for (int i = 0; i < 5; ++i) {
    const Request request{c.op, local.address(), address_of(remote), c.length};
    const auto until = soon();
    Result<> result;
    do
      result = pair.source.transfer(pair.peer, std::span(&request, 1), {.deadline = until});
    while (c.redials != 0 && !result.ok() && result.error().retry == Retry::kLater &&
           !until.passed());
    ASSERT_EQ(result.code(), Code::kInvalidArgument) << result.error().describe();
    EXPECT_NE(result.error().message.find("not mapped"), std::string::npos);
    EXPECT_EQ(result.error().native.value, c.local ? EFAULT : 0);
  }
  stop.store(true);
  innocent.join();
  EXPECT_LE(redials(pair.source), c.redials);
}

}  // namespace
}  // namespace crossdock::testing
