// One process of an expert-parallel group, for tests that kill or stop it: the test's own
// executable, started anew with its options as arguments, obeying lines on stdin. Commands and
// answers:
//
//   create            make the group                                    ok | error <text>
//   round <seed>      dispatch, experts and combine, everything compared
//   step <seed>       the same without the ranks that are masked or vacant
//   steps <ms>        says "whole" after the first step that is right with all ranks, then makes
//                     steps until one without a rank is right:
//                     "good <ns of the steady clock> masked <bits> whole <right ones before it>
//                     torn <wrong ones>"
//   dispatch <seed>   dispatch alone, waited for
//   loop <n>          n dispatches in a row, of few tokens each with its combine, then wait
//   device            copies to the GPU and back: whether the context is whole
//   reset <ms>        Group::reset()
//   reform <ms>       Group::reform()
//   vacant            "vacant <ranks>": seats that nobody has
//   waiting           "waiting <ranks>": those that want to join
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
  std::uint32_t rank = 0;  // and member
  std::uint32_t world = 1;
  int device = 0;
  bool share_gpus = false;
  std::uint32_t wait_ms = 1000;
  std::uint32_t tokens = 200;
  bool few = false;    // on the path for few tokens
  bool masks = false;  // a rank that is late is masked by the kernels
  bool elastic = false;
  std::uint32_t fewest = 0;  // of MeetingPlace
  std::uint32_t settle_ms = 1000;
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
