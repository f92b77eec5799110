// The end of a group: its waits are let go, what its calls have put on streams is waited for, and
// what still uses its memory after that keeps it alive:
//
//   last Group or Session goes
//     lanes of the CPU end
//     watch: every wait of a stream ends as soon as it is seen, peers are told
//     streams that calls were given have passed the last call, and nothing waits ── all freed
//     not so in time ── one line of the log; the Core stays, with its watch, until a later group
//                       is made or goes and finds that its work is over
//
// Neither the streams of the caller's other work nor its threads are waited for. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <mutex>
#include <utility>

#include "coll/core.hpp"

namespace crossdock::coll {
namespace {

using namespace std::chrono_literals;

// For the work before and in the calls, once nothing in them waits for a peer any more.
constexpr std::chrono::nanoseconds kMostPatience = 10s;
constexpr std::chrono::nanoseconds kMargin = 2s;

}  // namespace

// Those that something still uses. Never destroyed: work of the GPU outlives statics as well.
class Core::Abandoned {
 public:
  static Abandoned& all() {
    static auto* const abandoned = new Abandoned;
    return *abandoned;
  }
  void hold(std::unique_ptr<Core> core) {
    const std::scoped_lock lock(mutex_);
    cores_.push_back(std::move(core));
  }
  // Frees those whose work is over; returns how many are left.
  std::size_t sweep() {
    std::vector<std::unique_ptr<Core>> over;
    const std::scoped_lock lock(mutex_);
    const auto first = std::partition(cores_.begin(), cores_.end(), [](const auto& core) {
      return !core->is_over(Deadline::now());
    });
    std::move(first, cores_.end(), std::back_inserter(over));
    cores_.erase(first, cores_.end());
    return cores_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Core>> cores_;
};

std::size_t Core::sweep() {
  return Abandoned::all().sweep();
}

// A mark of a wait that no call accounts for is that of a graph which is being replayed.
bool Core::is_over(Deadline deadline) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankState& state) {
    if (rank_of(state).device().context() == nullptr) return true;
    return state.given.are_over(deadline) && num_waits(state) == 0;
  });
}

u32 Core::num_waits(const RankState& state) const {
  const Mark* const marks = state.marks.host<Mark>();
  return static_cast<u32>(std::count_if(marks, marks + num_sites(window_.world), [](const Mark& m) {
    return __atomic_load_n(&m.state, __ATOMIC_ACQUIRE) != Mark::kNone;
  }));
}

void Core::let_go(Core* gone) noexcept {
  std::unique_ptr<Core> core(gone);
  sweep();
  for (RankState& state : core->ranks_)
    state.lane.reset();
  if (core->watch_ == nullptr) return;
  core->watch_->end_waits();
  if (core->is_over(Deadline::in(core->patience_))) return;
  for (const RankState& state : core->ranks_) {
    const u32 streams = state.given.in_use(), waits = core->num_waits(state);
    if (streams + waits == 0) continue;
    CROSSDOCK_LOG(core->log_, kWarn,
                  "rank {}: {} streams and {} waits of replayed graphs still use a group that has "
                  "gone, {:.1f} s later: its {} bytes stay until they do not",
                  state.rank, streams, waits,
                  std::chrono::duration<double>(core->patience_).count(),
                  core->memory_.window_bytes + core->memory_.local_bytes);
  }
  Abandoned::all().hold(std::move(core));
}

std::chrono::nanoseconds Core::patience_of(const Options& options) {
  return std::min(std::chrono::nanoseconds(options.wait), kMostPatience) + kMargin;
}

}  // namespace crossdock::coll
