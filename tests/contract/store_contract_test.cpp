// What every metadata store promises, against all four. What only servers can do wrong is in
// tests/unit/rendezvous/store_server_test.cpp.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <gtest/gtest.h>
#include <latch>
#include <mutex>
#include <thread>

#include "rendezvous/store.hpp"
#include "rendezvous/store_server.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;

// One store that several handles can be opened to.
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string url() const = 0;
  [[nodiscard]] std::shared_ptr<Store> open() const {
    return open_store(url(), Deadline::in(10s)).value();
  }
};

class InprocBackend : public Backend {
 public:
  std::string url() const override { return "inproc://contract"; }

 private:
  // The store lives as long as some handle.
  std::shared_ptr<Store> keep_ = open_store("inproc://contract", Deadline::in(1s)).value();
};

class FileBackend : public Backend {
 public:
  std::string url() const override { return "file://" + dir_.path() + "/store"; }

 private:
  support::TempDir dir_;
};

template <class Server>
class ServerBackend : public Backend {
 public:
  std::string url() const override { return server_->url(); }

 private:
  std::unique_ptr<Server> server_ = Server::create({}, Deadline::in(5s)).value();
};

struct Kind {
  const char* name;
  std::unique_ptr<Backend> (*make)();
};

class StoreContract : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Backend> backend_ = GetParam().make();
  std::shared_ptr<Store> store_ = backend_->open();
  static Deadline soon() { return Deadline::in(10s); }
};

TEST_P(StoreContract, WhatWasPutIsRead) {
  EXPECT_FALSE(store_->get("k", soon()).value().has_value());
  ASSERT_TRUE(store_->put("k", "v1", {}, soon()).ok());
  const auto first = store_->get("k", soon()).value();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->value, "v1");
  EXPECT_NE(first->revision, 0u);
  ASSERT_TRUE(store_->put("k", "v2", {}, soon()).ok());
  const auto second = store_->get("k", soon()).value();
  EXPECT_EQ(second->value, "v2");
  EXPECT_GT(second->revision, first->revision);
}

TEST_P(StoreContract, HandlesShareOneStore) {
  const auto other = backend_->open();
  ASSERT_TRUE(store_->put("k", "v", {}, soon()).ok());
  EXPECT_EQ(other->get("k", soon()).value()->value, "v");
  ASSERT_TRUE(other->remove("k", soon()).ok());
  EXPECT_FALSE(store_->get("k", soon()).value().has_value());
}

TEST_P(StoreContract, RemovingWhatIsNotThereSucceeds) {
  EXPECT_TRUE(store_->remove("never", soon()).ok());
}

TEST_P(StoreContract, ValuesMayBeEmptyBinaryAndLarge) {
  std::string all_bytes;
  for (int i = 0; i < 256; ++i)
    all_bytes += static_cast<char>(i);
  std::string large;
  while (large.size() < (1u << 20))
    large += all_bytes;
  for (const std::string& value : {std::string(), all_bytes, large}) {
    ASSERT_TRUE(store_->put("k", value, {}, soon()).ok());
    const auto entry = store_->get("k", soon()).value();
    ASSERT_TRUE(entry.has_value());
    EXPECT_TRUE(entry->value == value) << value.size() << " bytes";
  }
}

TEST_P(StoreContract, KeysMayBeAnyBytes) {
  const std::vector<std::string> keys = {"a/b/c",
                                         "..",
                                         ".",
                                         "/",
                                         " ",
                                         "key with blanks",
                                         "%41",
                                         "ä€😀",
                                         "a\nb",
                                         "a?b=c&d",
                                         "#",
                                         std::string("nul\0in", 6),
                                         "\xff\xfe",
                                         ".lock",
                                         ".new",
                                         "k-a",
                                         "+",
                                         "\"quoted\"",
                                         std::string(kMaxKeyBytes, '\xff'),
                                         std::string(kMaxKeyBytes - 1, 'x')};
  for (const std::string& key : keys)
    ASSERT_TRUE(store_->put(key, "value of " + key, {}, soon()).ok()) << key;
  for (const std::string& key : keys) {
    const auto entry = store_->get(key, soon()).value();
    ASSERT_TRUE(entry.has_value()) << key;
    EXPECT_EQ(entry->value, "value of " + key);
  }
  auto sorted = keys;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(store_->list("", soon()).value(), sorted);
  for (const std::string& key : keys)
    ASSERT_TRUE(store_->remove(key, soon()).ok());
  EXPECT_TRUE(store_->list("", soon()).value().empty());
}

TEST_P(StoreContract, ListSelectsByPrefixAndSorts) {
  for (const char* key : {"b/2", "a/1", "b/1", "b", "c"})
    ASSERT_TRUE(store_->put(key, "x", {}, soon()).ok());
  EXPECT_EQ(store_->list("b/", soon()).value(), (std::vector<std::string>{"b/1", "b/2"}));
  EXPECT_EQ(store_->list("b", soon()).value(), (std::vector<std::string>{"b", "b/1", "b/2"}));
  EXPECT_TRUE(store_->list("z", soon()).value().empty());
}

TEST_P(StoreContract, BadArgumentsAreTheCallersMistake) {
  EXPECT_EQ(store_->put("", "v", {}, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->get(std::string(kMaxKeyBytes + 1, 'k'), soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->put("k", std::string(kMaxValueBytes + 1, 'v'), {}, soon()).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(store_->put("k", "v", 0ms, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->put("k", "v", -5ms, soon()).code(), Code::kInvalidArgument);
}

TEST_P(StoreContract, CompareAndPutIsExact) {
  EXPECT_FALSE(store_->compare_and_put("k", 7, "v", soon()).value()) << "there is no revision 7";
  EXPECT_TRUE(store_->compare_and_put("k", 0, "v1", soon()).value());
  EXPECT_FALSE(store_->compare_and_put("k", 0, "v2", soon()).value());
  const auto entry = store_->get("k", soon()).value();
  EXPECT_EQ(entry->value, "v1");
  EXPECT_TRUE(store_->compare_and_put("k", entry->revision, "v3", soon()).value());
  EXPECT_FALSE(store_->compare_and_put("k", entry->revision, "v4", soon()).value());
  EXPECT_EQ(store_->get("k", soon()).value()->value, "v3");
}

TEST_P(StoreContract, ARecreatedKeyHasANewRevision) {
  ASSERT_TRUE(store_->put("k", "v", {}, soon()).ok());
  const auto before = store_->get("k", soon()).value()->revision;
  ASSERT_TRUE(store_->remove("k", soon()).ok());
  ASSERT_TRUE(store_->put("k", "v", {}, soon()).ok());
  EXPECT_FALSE(store_->compare_and_put("k", before, "late", soon()).value());
}

TEST_P(StoreContract, CompareAndRemoveTakesOnlyWhatItHasSeen) {
  EXPECT_EQ(store_->compare_and_remove("k", 0, soon()).code(), Code::kInvalidArgument);
  EXPECT_FALSE(store_->compare_and_remove("k", 7, soon()).value()) << "there is no such key";
  ASSERT_TRUE(store_->put("k", "ours", {}, soon()).ok());
  const auto seen = store_->get("k", soon()).value()->revision;
  ASSERT_TRUE(store_->put("k", "a successor's", {}, soon()).ok());
  EXPECT_FALSE(store_->compare_and_remove("k", seen, soon()).value());
  const auto entry = store_->get("k", soon()).value();
  ASSERT_TRUE(entry.has_value());
  EXPECT_EQ(entry->value, "a successor's");
  EXPECT_TRUE(store_->compare_and_remove("k", entry->revision, soon()).value());
  EXPECT_FALSE(store_->get("k", soon()).value().has_value());
  EXPECT_FALSE(store_->compare_and_remove("k", entry->revision, soon()).value());
}

TEST_P(StoreContract, OfManyCompareAndRemovesOneWins) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 10; ++round) {
    ASSERT_TRUE(store_->put("k", "v", {}, soon()).ok());
    const auto seen = store_->get("k", soon()).value()->revision;
    std::atomic<int> won{0};
    {
      std::vector<std::jthread> threads;
      for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&] {
          if (backend_->open()->compare_and_remove("k", seen, soon()).value()) ++won;
        });
    }
    EXPECT_EQ(won.load(), 1);
  }
}

TEST_P(StoreContract, ConcurrentCompareAndPutLosesNoUpdate) {
  constexpr int kThreads = 4;
  constexpr int kEach = 25;
  ASSERT_TRUE(store_->put("count", "0", {}, soon()).ok());
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      const auto handle = backend_->open();
      for (int done = 0; done < kEach;) {
        const auto entry = handle->get("count", soon()).value().value();
        const std::string next = std::to_string(std::stoi(entry.value) + 1);
        if (handle->compare_and_put("count", entry.revision, next, soon()).value()) ++done;
      }
    });
  threads.clear();
  EXPECT_EQ(store_->get("count", soon()).value()->value, std::to_string(kThreads * kEach));
}

TEST_P(StoreContract, ReadersNeverSeeHalfAValue) {
  const std::string a(200'000, 'a');
  const std::string b(300'000, 'b');
  ASSERT_TRUE(store_->put("k", a, {}, soon()).ok());
  std::atomic<bool> stop{false};
  std::jthread writer([&] {
    const auto handle = backend_->open();
    for (int i = 0; i < 60; ++i)
      EXPECT_TRUE(handle->put("k", i % 2 == 0 ? b : a, {}, Deadline::in(20s)).ok());
    stop = true;
  });
  while (!stop) {
    const auto entry = store_->get("k", Deadline::in(20s));
    ASSERT_TRUE(entry.ok()) << entry.error().describe();
    ASSERT_TRUE(entry->has_value());
    ASSERT_TRUE((*entry)->value == a || (*entry)->value == b);
  }
}

TEST_P(StoreContract, WaitReturnsAtOnceWhenTheKeyExists) {
  ASSERT_TRUE(store_->put("k", "v", {}, soon()).ok());
  EXPECT_EQ(store_->wait("k", Deadline::in(5s)).value().value, "v");
}

TEST_P(StoreContract, WaitIsWokenByAPut) {
  std::latch waiting(3);
  std::vector<std::jthread> waiters;
  for (int i = 0; i < 3; ++i)
    waiters.emplace_back([&] {
      const auto handle = backend_->open();
      waiting.count_down();
      const auto entry = handle->wait("late", Deadline::in(20s));
      ASSERT_TRUE(entry.ok()) << entry.error().describe();
      EXPECT_EQ(entry->value, "here");
    });
  waiting.wait();
  ASSERT_TRUE(store_->put("other", "x", {}, soon()).ok());
  ASSERT_TRUE(store_->put("late", "here", {}, soon()).ok());
}

TEST_P(StoreContract, WaitIsWokenByACompareAndPut) {
  std::jthread waiter([&] { EXPECT_TRUE(backend_->open()->wait("k", Deadline::in(20s)).ok()); });
  EXPECT_TRUE(store_->compare_and_put("k", 0, "v", soon()).value());
}

TEST_P(StoreContract, WaitKeepsItsDeadlineAndNamesTheKey) {
  const auto start = Deadline::Clock::now();
  const auto entry = store_->wait("nobody-puts-this", Deadline::in(120ms));
  ASSERT_FALSE(entry.ok());
  EXPECT_EQ(entry.code(), Code::kDeadline);
  EXPECT_NE(entry.error().message.find("nobody-puts-this"), std::string::npos);
  EXPECT_GE(Deadline::Clock::now() - start, 120ms);
  EXPECT_LT(Deadline::Clock::now() - start, 5s);
  // The handle is as good as before.
  EXPECT_TRUE(store_->put("nobody-puts-this", "v", {}, soon()).ok());
  EXPECT_TRUE(store_->wait("nobody-puts-this", soon()).ok());
}

// True when the key is gone before `deadline`.
// Each look has time of its own: a slow store is not an answer.
bool vanishes(Store& store, const std::string& key, Deadline deadline) {
  while (!deadline.passed())
    if (!store.get(key, Deadline::in(10s)).value().has_value()) return true;
  return false;
}

TEST_P(StoreContract, LeasesEndUnlessRenewed) {
  ASSERT_TRUE(store_->put("short", "v", 150ms, soon()).ok());
  ASSERT_TRUE(store_->put("long", "v", 1h, soon()).ok());
  ASSERT_TRUE(store_->put("renewed", "v", 150ms, soon()).ok());
  ASSERT_TRUE(store_->put("renewed", "v", {}, soon()).ok());
  EXPECT_TRUE(vanishes(*store_, "short", soon()));
  EXPECT_EQ(store_->list("", soon()).value(), (std::vector<std::string>{"long", "renewed"}));
  EXPECT_TRUE(store_->compare_and_put("short", 0, "again", soon()).value());
  EXPECT_FALSE(vanishes(*store_, "short", Deadline::in(300ms))) << "the old lease must be gone";
}

TEST_P(StoreContract, AllGatherGivesEveryRankEverything) {
  constexpr std::uint32_t kWorld = 6;
  std::vector<std::jthread> ranks;
  std::atomic<int> good{0};
  for (std::uint32_t rank = 0; rank < kWorld; ++rank)
    ranks.emplace_back([&, rank] {
      const auto handle = backend_->open();
      const auto all = all_gather(*handle, {.name = "g", .rank = rank, .world = kWorld},
                                  "from " + std::to_string(rank), Deadline::in(20s));
      ASSERT_TRUE(all.ok()) << all.error().describe();
      ASSERT_EQ(all->size(), kWorld);
      for (std::uint32_t r = 0; r < kWorld; ++r)
        EXPECT_EQ((*all)[r], "from " + std::to_string(r));
      EXPECT_TRUE(
          barrier(*handle, {.name = "b", .rank = rank, .world = kWorld}, Deadline::in(20s)).ok());
      ++good;
    });
  ranks.clear();
  EXPECT_EQ(good, 6);
}

TEST_P(StoreContract, ABarrierHoldsUntilTheLastRankComes) {
  std::atomic<bool> came{false};
  std::jthread early([&] {
    const auto handle = backend_->open();
    EXPECT_TRUE(barrier(*handle, {.name = "b", .rank = 0, .world = 2}, Deadline::in(20s)).ok());
    EXPECT_TRUE(came.load());
  });
  ASSERT_TRUE(store_->wait("b/0", soon()).ok());
  came = true;
  EXPECT_TRUE(barrier(*store_, {.name = "b", .rank = 1, .world = 2}, Deadline::in(20s)).ok());
}

TEST_P(StoreContract, AnIncompleteGatherNamesTheMissingRanks) {
  std::jthread rank2([&] {
    EXPECT_EQ(barrier(*backend_->open(), {.name = "g", .rank = 2, .world = 5}, Deadline::in(700ms))
                  .code(),
              Code::kDeadline);
  });
  ASSERT_TRUE(store_->wait("g/2", soon()).ok());
  const auto result = barrier(*store_, {.name = "g", .rank = 0, .world = 5}, Deadline::in(300ms));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.code(), Code::kDeadline);
  EXPECT_NE(result.error().message.find("did not come in time: 1, 3, 4"), std::string::npos)
      << result.error().message;
}

TEST_P(StoreContract, ATakenRankAndAnotherWorldAreToldApart) {
  const Gathering only{.name = "g", .rank = 0, .world = 1};
  ASSERT_TRUE(barrier(*store_, only, soon()).ok());
  const auto again = barrier(*store_, only, soon());
  EXPECT_EQ(again.code(), Code::kInvalidArgument);
  EXPECT_NE(again.error().message.find("taken already"), std::string::npos);
  const auto other = barrier(*store_, {.name = "g", .rank = 1, .world = 2}, soon());
  EXPECT_EQ(other.code(), Code::kIncompatible) << "rank 0 believed in a world of 1";
  EXPECT_EQ(barrier(*store_, {.name = "h", .rank = 2, .world = 2}, soon()).code(),
            Code::kInvalidArgument);
}

TEST_P(StoreContract, ManyThreadsOnOneHandle) {
  constexpr int kThreads = 8;
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string key = "t" + std::to_string(t) + "/" + std::to_string(i);
        ASSERT_TRUE(store_->put(key, key, {}, Deadline::in(20s)).ok());
        ASSERT_EQ(store_->get(key, Deadline::in(20s)).value()->value, key);
      }
    });
  threads.clear();
  EXPECT_EQ(store_->list("t", soon()).value().size(), 160u);
}

template <class B>
std::unique_ptr<Backend> make() {
  return std::make_unique<B>();
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract,
                         testing::Values(Kind{"inproc", make<InprocBackend>},
                                         Kind{"file", make<FileBackend>},
                                         Kind{"tcp", make<ServerBackend<StoreServer>>},
                                         Kind{"http", make<ServerBackend<HttpStoreServer>>}),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace crossdock::rendezvous
