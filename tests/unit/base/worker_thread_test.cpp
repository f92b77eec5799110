// Threads of the library: no signal of the host runs on them, and a system that gives no more of
// them is an error, not the end of the process.
// SPDX-License-Identifier: Apache-2.0
#include "base/worker_thread.hpp"

#include <atomic>
#include <csignal>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/event_loop.hpp"
#include "base/job_thread.hpp"

namespace crossdock::base {
namespace {

bool blocks_signals() {
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return ::sigismember(&mask, SIGINT) == 1 && ::sigismember(&mask, SIGTERM) == 1 &&
         ::sigismember(&mask, SIGUSR1) == 1;
}

TEST(WorkerThread, EveryKindBlocksSignals) {
  ASSERT_FALSE(blocks_signals()) << "the test's own thread does not";
  std::atomic<int> blocked{0};
  auto thread = start_worker("test", [&] { blocked += blocks_signals() ? 1 : 0; });
  ASSERT_TRUE(thread.ok());
  thread->join();
  auto loop = std::move(EventLoop::create("test-loop")).value();
  loop->run([&] { blocked += blocks_signals() ? 1 : 0; });
  {
    JobThread jobs("test-jobs");
    std::atomic<bool> ran{false};
    ASSERT_TRUE(jobs.post([&] {
      blocked += blocks_signals() ? 1 : 0;
      ran = true;
      ran.notify_one();
    }));
    ran.wait(false);
  }
  EXPECT_EQ(blocked, 3);
}

TEST(WorkerThread, NoMoreThreadsIsAnError) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer needs more address space than the test leaves";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    // No stack can be mapped any more.
    const rlimit none{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_AS, &none) != 0) ::_exit(9);
    // Stacks of threads that have ended are used again first.
    for (int i = 0; i < 100; ++i) {
      auto sleeper = start_worker("sleeper", [] { ::pause(); });
      if (!sleeper.ok()) break;
      sleeper->detach();
    }
    JobThread jobs("test-jobs");
    const bool posted = jobs.post([] {});
    const auto loop = EventLoop::create("test-loop");
    const auto thread = start_worker("test", [] {});
    if (posted) ::_exit(1);
    if (loop.code() != Code::kNoMemory) ::_exit(2);
    ::_exit(thread.code() == Code::kNoMemory ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace crossdock::base
