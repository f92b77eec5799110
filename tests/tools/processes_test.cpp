// One process a rank: what a launcher tells by environment, and which GPU a process takes.
// SPDX-License-Identifier: Apache-2.0
#include "bench/processes.hpp"

#include <cstdlib>
#include <gmock/gmock.h>

namespace crossdock::tools::bench {
namespace {

using ::testing::HasSubstr;

class Launcher : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames)
      ::unsetenv(name);
  }
  void TearDown() override { SetUp(); }
  static void tell(const char* rank, const char* local) {
    ::setenv("RANK", rank, 1);
    ::setenv("WORLD_SIZE", "16", 1);
    if (local != nullptr) ::setenv("LOCAL_RANK", local, 1);
  }
  static std::uint32_t device(const ProcessOptions& given, std::uint32_t gpus) {
    return device_of(with_launcher(given).value(), gpus);
  }
  static constexpr const char* kNames[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",
                                           "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"};
};

TEST_F(Launcher, TakesTheGpuOfItsNumberOnTheHost) {
  tell("11", "3");
  EXPECT_EQ(device({}, 8), 3u);
}
TEST_F(Launcher, TakesTheOnlyGpuThatItSees) {
  tell("11", "3");
  EXPECT_EQ(device({}, 1), 0u);
}
TEST_F(Launcher, WithoutANumberOnTheHostItsRankDecides) {
  tell("11", nullptr);
  EXPECT_EQ(device({}, 8), 3u);
  EXPECT_EQ(device({}, 1), 0u);
}
TEST_F(Launcher, AGpuThatIsGivenIsTakenAsItIs) {
  tell("11", "3");
  ProcessOptions given;
  given.device = 5;
  EXPECT_EQ(device(given, 1), 5u);
}
TEST_F(Launcher, AWrongNumberIsNamed) {
  tell("11", "three");
  EXPECT_THAT(with_launcher({}).error().message, HasSubstr("LOCAL_RANK=three"));
}
// Brackets, without which the port would be a part of the address.
TEST_F(Launcher, TheStoreOfAHostWithoutANameHasBrackets) {
  tell("11", "3");
  ::setenv("MASTER_PORT", "7000", 1);
  for (const auto& [host, store] :
       {std::pair{"fd00::1", "tcp://[fd00::1]:7000"}, std::pair{"10.0.0.1", "tcp://10.0.0.1:7000"},
        std::pair{"head", "tcp://head:7000"}}) {
    ::setenv("MASTER_ADDR", host, 1);
    EXPECT_EQ(with_launcher({}).value().store, store);
  }
}

}  // namespace
}  // namespace crossdock::tools::bench
