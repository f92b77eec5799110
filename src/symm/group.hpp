// Group: the ranks of one world that live in this process, with symmetric memory across all of
// them. Every rank has a window of one layout; rank(r) has what a launch on rank r needs. Creating
// and resetting a group is collective among its processes, with a deadline; destroying it is not:
// it is local, bounded, and works when peers are gone. No kernel of the group may run then.
// Single-owner. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <set>
#include <span>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/layout/symmetric.cuh>
#include <crossdock/symm/group_options.hpp>

#include "cuda/driver.hpp"
#include "symm/heap.hpp"
#include "symm/meeting.hpp"
#include "symm/rank.hpp"
#include "symm/steps.hpp"
#include "twin/launch.hpp"

namespace crossdock::symm {

inline constexpr u64 kMaxWindowBytes = u64{1} << 40;
inline constexpr u64 kMaxHeapBytes = u64{1} << 45;  // of all windows

class Group {
 public:
  // `layout` cuts the window (its `bytes` are the window's size) and is the same on all ranks, as
  // are world and backend; ranks that disagree all get kIncompatible naming both. A rank that
  // fails makes all of them fail, naming it. `driver` null: that of the setting cuda.driver, when
  // the backend is the GPU. On failure nothing is left behind.
  static Result<std::unique_ptr<Group>> create(const GroupOptions& options,
                                               const device::SymmetricLayout& layout,
                                               const cuda::Driver* driver = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] Backend backend() const { return options_.backend; }
  [[nodiscard]] u32 world() const { return options_.world; }
  [[nodiscard]] const device::SymmetricLayout& layout() const { return layout_; }
  // Ranks of this process, ascending.
  [[nodiscard]] std::span<const u32> local_ranks() const { return local_; }
  [[nodiscard]] bool all_local() const { return local_.size() == options_.world; }
  // Elastic groups: how many times its processes have met, failed attempts included; and the ranks
  // whose seats are vacant, ascending. Kernels have to leave those alone; what reaches their
  // windows nevertheless is lost.
  [[nodiscard]] u64 generation() const { return generation_; }
  [[nodiscard]] std::span<const u32> vacant_ranks() const { return vacant_; }
  // Processes of the group, and which one this is.
  [[nodiscard]] u32 members() const { return steps_->members(); }
  [[nodiscard]] u32 member() const { return steps_->member(); }
  // Precondition: `r` is one of local_ranks().
  [[nodiscard]] Rank& rank(u32 r) const;

  // CPU backend with all ranks in this process: runs their kernels. Else null.
  [[nodiscard]] twin::World* twin() const { return twin_.get(); }
  // GPU backend. Else null.
  [[nodiscard]] const cuda::Driver* driver() const { return driver_; }

  // The first fault among the local ranks (see fault.hpp). Never waits.
  [[nodiscard]] Result<> check() const;
  // Members of one process: kClosed when the others have gone on without a local rank. Elsewhere a
  // process learns it from the waits that expire, and from its next reform().
  [[nodiscard]] Result<> check_seats() const;
  // Makes the group usable again after a fault: windows, control blocks, state memory and fault
  // records of all ranks become zero. Collective among the processes. No kernel of the group may
  // run on the local ranks. After an error here the group is of no more use (kClosed).
  Result<> reset(Deadline deadline);
  // Elastic groups: goes on with those who come: the processes that are left, which all call this,
  // and new ones, which call create() for seats of those that are gone. Waits for them as
  // MeetingPlace says. Then all is as after a reset, and the addresses of all windows are what they
  // were. Behind them is other memory: of ranks that have changed, and of all others too where
  // somebody was left out, who may be alive and writes into what they had before. That memory goes
  // when whoever was left out lets go of it or ends. No kernel of the group may run on the local
  // ranks, and nothing else may touch a window meanwhile. After an error (all get one: a newcomer
  // with other sizes, a process that died meanwhile, too few) the group is of no use until a
  // reform() succeeds.
  Result<> reform(Deadline deadline);
  // Tells the other processes how something went here that each has done for itself, and learns how
  // it went there: the error of this process if it has one, else that of another, naming its rank.
  // `rank` is the one of this process that failed, or any; `what` says what all do: "prepare their
  // kernels". Collective among the processes. After an error the group is of no more use, as after
  // one of reset().
  Result<> conclude(const Result<>& mine, u32 rank, const char* what, Deadline deadline);
  // Ranks of processes that wait to join: it takes a reform() of all to let them in.
  Result<std::vector<u32>> waiting_ranks(Deadline deadline) const;

 private:
  friend class GroupBuilder;
  Group(const GroupOptions& options, const device::SymmetricLayout& layout)
      : options_(options), layout_(layout) {}
  // `current` is the rank that is being cleared.
  Result<> clear(u32& current, Deadline deadline);
  Result<> reset_together(Deadline deadline);
  Result<> keep_or_break(Result<> done, const char* why, const char* why_elastic);

  GroupOptions options_;
  device::SymmetricLayout layout_;
  const cuda::Driver* driver_ = nullptr;
  const char* broken_ = nullptr;  // what to do about it
  // Elastic groups.
  std::unique_ptr<Meeting> meeting_;
  u64 generation_ = 0;
  std::vector<u64> tokens_;  // [world] names of the windows that are mapped; 0: nothing
  u64 token_ = 0;            // names the windows of this process
  std::set<u64> sharers_;    // names of the processes that these have been given to
  std::vector<u32> vacant_;
  u64 stride_ = 0;  // the most a window may take
  Sharing sharing_ = Sharing::kNone;
  std::unique_ptr<Steps> steps_;
  // Destroyed from the last to the first: ranks before the heap, the heap before the World.
  std::shared_ptr<twin::World> twin_;
  std::unique_ptr<Heap> heap_;
  std::vector<u32> local_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace crossdock::symm
