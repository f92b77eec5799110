// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gtest/gtest.h>

#include "base/config.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport {
namespace {

Result<std::vector<std::unique_ptr<Transport>>> make(const std::string& enabled) {
  static const char* const kNoEnvironment[] = {nullptr};
  const base::Config config =
      base::Config::load({{"transport.enabled", enabled}}, {.environment = kNoEnvironment}).value();
  TransportContext context;
  context.config = &config;
  return make_transports(context);
}

TEST(Registry, AutoGivesTheBestFirst) {
  const auto all = make("auto");
  ASSERT_TRUE(all.ok()) << all.error().describe();
  ASSERT_EQ(all->size(), 3u);
  EXPECT_LE(all->size(), kMaxTransports);
  EXPECT_EQ((*all)[0]->name(), "loopback");
  EXPECT_EQ((*all)[1]->name(), "shm");
  EXPECT_EQ((*all)[2]->name(), "tcp");
}

TEST(Registry, ObeysTheOrderAsked) {
  const auto some = make("shm, loopback");
  ASSERT_TRUE(some.ok()) << some.error().describe();
  ASSERT_EQ(some->size(), 2u);
  EXPECT_EQ((*some)[0]->name(), "shm");
  EXPECT_EQ((*some)[1]->name(), "loopback");
}

TEST(Registry, WrapsInTheFaultInjector) {
  const auto wrapped = make("faulty+shm");
  ASSERT_TRUE(wrapped.ok()) << wrapped.error().describe();
  EXPECT_EQ((*wrapped)[0]->name(), "faulty+shm");
}

TEST(Registry, RefusesWhatDoesNotExist) {
  for (const std::string name : {"rdmaa", "faulty+", "faulty+faulty+shm", "shm,auto"}) {
    const auto made = make(name);
    ASSERT_FALSE(made.ok()) << name;
    EXPECT_EQ(made.code(), Code::kInvalidArgument);
    EXPECT_NE(made.error().message.find("loopback, shm, tcp"), std::string::npos)
        << made.error().message;
  }
  EXPECT_EQ(make("shm,shm").code(), Code::kInvalidArgument);
  EXPECT_EQ(make(" , ").code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace crossdock::transport
