// LinkSet: jobs of one peer in order, peers side by side, and what stays when they are done.
// SPDX-License-Identifier: Apache-2.0
#include "kv/link.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <optional>
#include <set>
#include <thread>

#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using detail::Link;
using detail::LinkSet;
using support::comes_true;

transfer::Engine make_engine() {
  return transfer::Engine::create({.config = {{"log.level", "error"}}}).value();
}

TEST(LinkSet, JobsOfOnePeerRunInOrder) {
  auto engine = make_engine();
  LinkSet links(engine, 1'000ms);
  ASSERT_TRUE(links.start().ok());
  std::vector<int> order;  // no lock: they never run side by side
  std::promise<void> done;
  for (int i = 0; i < 100; ++i)
    links.post("a", [&order, i](Link&) { order.push_back(i); });
  links.post("a", [&done](Link&) { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_for(60s), std::future_status::ready);
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(LinkSet, APeerThatHangsDelaysNobodyElse) {
  auto engine = make_engine();
  LinkSet links(engine, 1'000ms);
  ASSERT_TRUE(links.start().ok());
  std::promise<void> go_on, other;
  auto held = go_on.get_future().share();
  links.post("hangs", [held](Link&) { held.wait_for(60s); });
  links.post("lives", [&other](Link&) { other.set_value(); });
  EXPECT_EQ(other.get_future().wait_for(60s), std::future_status::ready);
  go_on.set_value();
}

TEST(LinkSet, ThreadsAreCappedAndEveryJobRuns) {
  constexpr std::size_t kPeers = 3 * LinkSet::kMostThreads;
  auto engine = make_engine();
  LinkSet links(engine, 1'000ms);
  ASSERT_TRUE(links.start().ok());
  std::promise<void> go_on;
  auto held = go_on.get_future().share();
  std::atomic<std::size_t> running{0}, done{0};
  for (std::size_t i = 0; i < kPeers; ++i)
    links.post("peer " + std::to_string(i), [&, held](Link&) {
      ++running;
      held.wait_for(60s);
      ++done;
    });
  EXPECT_TRUE(comes_true([&] { return running == LinkSet::kMostThreads; }));
  EXPECT_EQ(links.size().threads, LinkSet::kMostThreads);
  go_on.set_value();
  EXPECT_TRUE(comes_true([&] { return done == kPeers; }));
}

// Each name that was ever asked for used to keep a thread.
TEST(LinkSet, PeersThatAreGoneLeaveNothing) {
  auto engine = make_engine();
  LinkSet links(engine, 1'000ms);
  ASSERT_TRUE(links.start().ok());
  std::atomic<int> failed{0};
  for (int i = 0; i < 200; ++i)
    links.post("127.0.0.1:1?" + std::to_string(i),
               [&](Link& link) { failed += !link.peer().ok(); });
  EXPECT_TRUE(comes_true([&] { return failed == 200; }));
  EXPECT_TRUE(comes_true([&] { return links.size().links == 0 && links.size().threads == 1; }))
      << links.size().links << " links, " << links.size().threads << " threads";
}

TEST(LinkSet, ALinkToAPeerThatLivesStaysAndGoesWithIt) {
  auto engine = make_engine();
  std::optional<transfer::Engine> peer = make_engine();
  const std::string name = peer->name();
  LinkSet links(engine, 10'000ms);
  ASSERT_TRUE(links.start().ok());
  std::promise<std::uint64_t> first, second;
  links.post(name, [&](Link& link) { first.set_value(link.peer().ok() ? link.epoch() : 0); });
  ASSERT_EQ(first.get_future().get(), 1u);
  links.post(name, [&](Link& link) { second.set_value(link.peer().ok() ? link.epoch() : 0); });
  ASSERT_EQ(second.get_future().get(), 1u) << "the same connection";
  EXPECT_EQ(links.size().links, 1u);
  peer.reset();
  EXPECT_TRUE(comes_true([&] {
    std::promise<void> done;
    links.post("another", [&](Link&) { done.set_value(); });
    done.get_future().wait();
    return links.size().links == 0;
  }));
}

// What stood for the connection of a link that is gone must not stand for another's.
TEST(LinkSet, NoTwoConnectionsHaveOneNumber) {
  auto engine = make_engine();
  LinkSet links(engine, 10'000ms);
  ASSERT_TRUE(links.start().ok());
  std::set<std::uint64_t> numbers;
  for (int i = 0; i < 3; ++i) {
    auto peer = make_engine();
    std::promise<std::uint64_t> number;
    links.post(peer.name(),
               [&](Link& link) { number.set_value(link.peer().ok() ? link.epoch() : 0); });
    numbers.insert(number.get_future().get());
  }
  EXPECT_EQ(numbers.size(), 3u);
  EXPECT_FALSE(numbers.contains(0));
}

TEST(LinkSet, StopLeavesNoJobBehind) {
  auto engine = make_engine();
  LinkSet links(engine, 1'000ms);
  ASSERT_TRUE(links.start().ok());
  std::promise<void> started, go_on;
  auto held = go_on.get_future().share();
  auto witness = std::make_shared<int>(0);
  links.post("a", [&, held](Link&) {
    started.set_value();
    held.wait_for(60s);
  });
  links.post("a", [witness](Link&) { ++*witness; });
  ASSERT_EQ(started.get_future().wait_for(60s), std::future_status::ready);
  std::thread stopper([&] { links.stop(); });
  links.post("a", [witness](Link&) { ++*witness; });
  go_on.set_value();
  stopper.join();
  links.post("a", [witness](Link&) { ++*witness; });
  EXPECT_EQ(witness.use_count(), 1) << "dropped jobs are destroyed";
}

}  // namespace
}  // namespace crossdock::kv
