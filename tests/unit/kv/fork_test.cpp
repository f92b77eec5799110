// Handles in a child that was forked: their threads are not there.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <optional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::comes_true;
using support::KvCluster;

Deadline soon() {
  return Deadline::in(60s);
}

TEST(KvFork, AForkedChildMayDestroyEverything) {
  KvCluster cluster({});
  cluster.admit_and_expect(1, 4, soon());
  ASSERT_TRUE(cluster.prefill[0]->sender.push(1, 0).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    cluster.prefill.clear();
    cluster.decode.clear();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  for (std::uint32_t layer = 1; layer < 3; ++layer)
    ASSERT_TRUE(cluster.prefill[0]->sender.push(1, layer).ok());
  EXPECT_TRUE(cluster.decode[0]->receiver.wait(1, soon()).ok()) << "the parent goes on";
}

// How many of the checks did not hold in a forked child; -1 when a signal ended it.
int failures_in_child(const std::function<void(const std::function<void(bool)>&)>& checks) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    int failed = 0;
    checks([&](bool held) { failed += !held; });
    ::_exit(failed);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

template <class T>
bool refused(const Result<T>& result) {
  return result.code() == Code::kUnsupported &&
         result.error().message.find("before fork()") != std::string::npos;
}

TEST(KvFork, CallsInAForkedChildAreRefused) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 4, soon());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(decode.receiver.wait(1, 0, soon()).ok());
  EXPECT_EQ(failures_in_child([&](const auto& check) {
              check(refused(prefill.sender.push(1, 1)));
              check(refused(prefill.sender.finish(1)));
              check(refused(prefill.sender.wait(1, soon())));
              prefill.sender.abort(1, "not here");
              check(prefill.sender.stats().active_requests == 0);
              check(refused(prefill.sender.close(soon())));
              const Expectation expectation{
                  .request = 2, .senders = cluster.sender_names(), .deadline = soon()};
              check(refused(decode.receiver.expect(expectation)));
              check(refused(decode.receiver.wait(1, soon())));
              check(refused(decode.receiver.wait(1, 1, soon())));
              decode.receiver.abort(1, "not here");
              check(decode.receiver.stats().active_requests == 0);
              check(refused(decode.receiver.close(soon())));
            }),
            0);
  EXPECT_EQ(failures_in_child([&](const auto& check) {
              PagePool pool = prefill.pool;
              const Admission admission{.request = 2, .num_pages = 64};
              check(refused(pool.admit(admission)));
              check(refused(pool.admit(admission, soon())));
              check(refused(pool.table(1)));
              check(refused(pool.mark_ready(1)));
              check(refused(pool.release(1)));
              check(refused(pool.lease(1)));
              check(pool.stats().total == 0);
            }),
            0);
}

bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 4, ") S ") == 0;
}

// The parent's thread waits in the pool, and in the child nothing ever takes it out.
TEST(KvFork, AForkedChildMayDestroyAPoolThatIsWaitedFor) {
  const auto layout = PageLayout::create({"t", 1, 1, 16, 2, false}, {.num_pages = 4}).value();
  std::vector<std::byte> memory(layout.pool_bytes());
  std::optional<PagePool> pool(PagePool::adopt(layout, memory.data()).value());
  ASSERT_TRUE(pool->admit({.request = 1, .num_pages = 4}).ok());
  auto lease = pool->lease(1).value();
  std::atomic<pid_t> waiting{0};
  std::thread waiter([&] {
    waiting = ::gettid();
    EXPECT_TRUE(pool->admit({.request = 2, .num_pages = 4}, soon()).ok());
  });
  EXPECT_TRUE(comes_true([&] { return waiting != 0 && sleeps(waiting); }));
  EXPECT_EQ(failures_in_child([&](const auto&) {
              lease.reset();
              pool.reset();
            }),
            0);
  EXPECT_TRUE(pool->release(1).ok());
  lease.reset();
  waiter.join();
}

}  // namespace
}  // namespace crossdock::kv
