// One process of an expert-parallel group, for tests that kill or stop it: the test's own
// executable, started anew with its options as arguments, obeying lines on stdin. Commands and
// answers:
//
//   create            make the group                                    ok | error <text>
//   round <seed>      dispatch, experts and combine, everything compared
//   dispatch <seed>   dispatch alone, waited for
//   loop <n>          n dispatches in a row, then wait
//   device            copies to the GPU and back: whether the context is whole
//   reset <ms>        Group::reset()
//   destroy           forget the group
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/child_process.hpp"

namespace crossdock::testing {

struct EpWorkerOptions {
  std::string store = {};  // URL
  std::string name = "group";
  std::uint32_t rank = 0;  // and member, and GPU
  std::uint32_t world = 1;
  std::uint32_t wait_ms = 1000;
};

// In the child: obeys until stdin ends.
bool is_ep_worker(int argc, char** argv);
int ep_worker_main(int argc, char** argv);

// In the test: owns a child; kills and reaps it at the end.
class EpWorker {
 public:
  explicit EpWorker(const EpWorkerOptions& options);
  void say(const std::string& command) const { child_.say(command); }
  // The next answer; "silent" when none comes in two minutes or the child is gone.
  std::string hear();
  std::string ask(const std::string& command) {
    say(command);
    return hear();
  }
  base::ChildProcess& child() { return child_; }

 private:
  base::ChildProcess child_;
};

std::vector<std::string> ask_all(std::vector<std::unique_ptr<EpWorker>>& workers,
                                 const std::string& command);

}  // namespace crossdock::testing
