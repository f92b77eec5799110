// What a receiver that is gone leaves behind: pages in doubt until there is proof, and no longer.
// SPDX-License-Identifier: Apache-2.0
#include "kv/keeper.hpp"

#include <gtest/gtest.h>
#include <optional>

#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using detail::Keeper;
using support::comes_true;
using transfer::Engine;

Deadline soon() {
  return Deadline::in(std::chrono::seconds(60));
}

class KeeperTest : public testing::Test {
 protected:
  KeeperTest() {
    auto keeper = Keeper::create(decode_, pool_).value();
    EXPECT_TRUE(pool_.admit({.request = 1, .num_pages = 8}).ok());
    kept_ = keeper->keep(pool_.lease(1).value());
    EXPECT_TRUE(pool_.release(1).ok());
    keeper_ = std::move(keeper);
  }
  void abandon() {
    keeper_->abandon(decode_);
    kept_.reset();
    keeper_.reset();
  }
  // A prefill that has opened this engine.
  void connect() {
    prefill_.emplace(Engine::create({}).value());
    peer_.emplace(prefill_->open(decode_.name(), soon()).value());
    ASSERT_TRUE(comes_true([&] { return decode_.opened_by(prefill_->instance()); }));
  }
  void lose() {
    const auto instance = prefill_->instance();
    peer_.reset();
    ASSERT_TRUE(prefill_->close(soon()).ok());
    prefill_.reset();
    ASSERT_TRUE(comes_true([&] { return !decode_.opened_by(instance); }));
  }
  [[nodiscard]] bool free() const { return pool_.stats().free == 8; }

  Engine decode_ = Engine::create({}).value();
  PagePool pool_ =
      PagePool::create(decode_,
                       PageLayout::create({"t", 1, 1, 16, 2, false}, {.num_pages = 8}).value())
          .value();
  std::optional<Engine> prefill_;
  std::optional<transfer::Peer> peer_;
  std::shared_ptr<Keeper> keeper_;
  Keeper::KeptPtr kept_;
};

TEST_F(KeeperTest, PagesInDoubtStayUntilTheirEngineIsLost) {
  connect();
  keeper_->doubt(kept_, prefill_->instance());
  abandon();
  EXPECT_FALSE(free());
  EXPECT_EQ(pool_.stats().quarantined, 8u);
  lose();
  EXPECT_TRUE(comes_true([&] { return free(); }));
}

// A message is handled after the loss of its engine was told: nobody will tell again.
TEST_F(KeeperTest, AnEngineThatWasLostBeforeIsInNoDoubt) {
  connect();
  const auto instance = prefill_->instance();
  lose();
  keeper_->doubt(kept_, instance);
  abandon();
  EXPECT_TRUE(free());
}

TEST_F(KeeperTest, TheEndOfTheEngineEndsAllDoubt) {
  connect();
  keeper_->doubt(kept_, prefill_->instance());
  abandon();
  ASSERT_TRUE(decode_.close(soon()).ok());
  EXPECT_TRUE(comes_true([&] { return free(); }));
}

TEST_F(KeeperTest, AClosedEngineLeavesNoDoubt) {
  connect();
  keeper_->doubt(kept_, prefill_->instance());
  ASSERT_TRUE(decode_.close(soon()).ok());
  abandon();
  EXPECT_TRUE(free());
}

}  // namespace
}  // namespace crossdock::kv
