// One process of a symmetric group, for tests that kill it: the test's own executable, started anew
// with its options as arguments, obeying lines on stdin. Commands and answers:
//
//   create          make the group                     ok | error <text>
//   created         how long that took                 <milliseconds>
//   write, check    a word to every window; what every rank wrote into this one
//   word <rank>     "word <n>": what is in this window where that rank writes
//   prepare         compile the barrier's kernel
//   barrier <n>     n barriers on the GPU, then look for faults
//   faults          Group::check()
//   reset <ms>      Group::reset()
//   reform <ms>     Group::reform()
//   vacant          "vacant <ranks>": seats that nobody has
//   waiting         "waiting <ranks>": those that want to join
//   destroy         forget the group
//   use             "fds <n> threads <n>"; fake GPUs: and "live <objects>"
//
// With stop_before or stop_after a worker says "stopped" at that call of its exchange (counted from
// 0) and does nothing more.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/child_process.hpp"

namespace crossdock::testing {

struct SymmWorkerOptions {
  std::string store = {};  // URL
  std::string name = "group";
  std::uint32_t member = 0;
  std::uint32_t members = 1;
  std::uint32_t world = 1;
  std::uint32_t rank = 0;
  std::string backend = "cpu";
  int device = -1;
  std::uint64_t bytes = 4096;  // of the window, besides the words of a barrier
  std::uint32_t timeout_ms = 30'000;
  int stop_before = -1;
  int stop_after = -1;
  std::uint64_t address_space = 0;  // bytes, by setrlimit; 0: as it is
  std::string cuda = {};            // a driver library; empty: as configured
  std::uint64_t fake_bytes = 0;     // memory of the fake GPUs
  std::string visible = {};         // CUDA_VISIBLE_DEVICES
  std::string share_gpus = {};      // symm.share_gpus; empty: as configured
  std::string cache = {};           // folder for compiled kernels
  int elastic = 0;                  // 1: a group with a meeting place, `name` in `store`
  std::uint32_t fewest = 0;         // of MeetingPlace
  std::uint32_t settle_ms = 1000;
};

// In the child: obeys until stdin ends.
bool is_symm_worker(int argc, char** argv);
int symm_worker_main(int argc, char** argv);

// In the test: owns a child; kills and reaps it at the end.
class SymmWorker {
 public:
  explicit SymmWorker(const SymmWorkerOptions& options);
  void say(const std::string& command) const { child_.say(command); }
  // The next answer; "silent" when none comes in a long time or the child is gone.
  std::string hear();
  std::string ask(const std::string& command) {
    say(command);
    return hear();
  }
  // SIGKILL; its sockets and descriptors are gone when this returns.
  void kill();

 private:
  base::ChildProcess child_;
};

// Gives all workers a command at once, then collects their answers.
std::vector<std::string> ask_all(std::vector<std::unique_ptr<SymmWorker>>& workers,
                                 const std::string& command);

}  // namespace crossdock::testing
