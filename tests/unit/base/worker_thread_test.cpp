// Threads of the library: no signal of the host runs on them, their own faults do, and a system
// that gives no more of them is an error, not the end of the process.
// SPDX-License-Identifier: Apache-2.0
#include "base/worker_thread.hpp"

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <optional>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/address.hpp"
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

// The mask that threads of this name have in /proc, once there is one. Of a thread that is just
// over the kernel tells zeros, and none for the number of threads.
std::optional<std::uint64_t> mask_of_thread(const std::string& name) {
  std::error_code gone;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    std::ifstream status(task.path() / "status");
    bool named = false;
    for (std::string line; std::getline(status, line);) {
      if (line == "Name:\t" + name) named = true;
      if (line == "Threads:\t0") named = false;
      if (named && line.starts_with("SigBlk:")) return std::stoull(line.substr(8), nullptr, 16);
    }
  }
  return std::nullopt;
}

TEST(WorkerThread, TheResolversThreadBlocksSignalsToo) {
  std::jthread asking([](const std::stop_token& stop) {
    while (!stop.stop_requested())
      (void)resolve({"localhost", 1}, Deadline::in(std::chrono::seconds(1)));
  });
  const auto until = Deadline::in(std::chrono::seconds(10));
  // The C library blocks every signal at a thread's begin and end: its own mask leaves faults.
  const auto blocks = [](std::uint64_t mask, int signal) {
    return (mask >> (signal - 1) & 1) != 0;
  };
  std::optional<std::uint64_t> mask;
  while ((!mask || blocks(*mask, SIGSEGV)) && !until.passed())
    mask = mask_of_thread("cd-resolve");
  ASSERT_TRUE(mask) << "no thread of that name was seen";
  EXPECT_FALSE(blocks(*mask, SIGSEGV));
  EXPECT_TRUE(blocks(*mask, SIGTERM));
}

// As a crash reporter of the host, or Python's faulthandler.
TEST(WorkerThread, AFaultOnOneRunsTheHostsHandler) {
  const pid_t child = ::fork();
  if (child == 0) {
    struct sigaction action{};
    action.sa_handler = [](int) { ::_exit(7); };
    ::sigaction(SIGSEGV, &action, nullptr);
    void* const page = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto thread = start_worker("test", [page] { *static_cast<volatile char*>(page) = 1; });
    if (thread.ok()) thread->join();
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 7);
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
