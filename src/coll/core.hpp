// Core: what coll::Group and its Sessions share: the symmetric group, kernels, lanes, the watch,
// and what each local rank keeps from call to call. Ends as leaving.cpp says. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <crossdock/coll/group.hpp>
#include <crossdock/layout/coll.cuh>

#include "base/log.hpp"
#include "coll/board.hpp"
#include "coll/given_streams.hpp"
#include "coll/site_order.hpp"
#include "coll/watch.hpp"
#include "jit/jit.hpp"
#include "symm/group.hpp"
#include "symm/launch.hpp"

namespace crossdock::coll {

struct RankState {
  u32 rank = 0;
  symm::HostMemory marks;
  symm::LocalMemory parts;  // of a reduce_scatter
  symm::LocalMemory zeros;  // a row
  std::unique_ptr<CpuLane> lane;
  GivenStreams given;
  std::vector<SiteOrder> orders;  // by site; none on the CPU, where a rank has one lane
  bool in_session = false;
  std::vector<u64> sent;  // [world]: tensors so far
  std::vector<u64> received;
};

// What fetches and sums launch on GPUs and in the twin.
struct Kernels {
  symm::Launcher launcher;
  std::optional<symm::Prepared<device::FetchRowsParams>> fetch = {};
  std::optional<symm::Prepared<device::AddPartsParams>> add_bf16 = {};
  std::optional<symm::Prepared<device::AddPartsParams>> add_f32 = {};
  device::u32 fetch_warps = 0;
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  static Result<std::shared_ptr<Core>> create(const GroupOptions& options);
  // Over a group that somebody else has made, for a window of make_window(). Collective: an error,
  // that of `jit` too, is told to the other processes.
  static Result<std::shared_ptr<Core>> create(std::unique_ptr<symm::Group> group,
                                              Result<std::unique_ptr<jit::Jit>> jit,
                                              const Options& options, Deadline deadline);
  // Frees groups that could not be freed when they went; returns how many still cannot. Whoever
  // makes or drops a group does so too. Thread-safe.
  static std::size_t sweep();
  // How long the end waits for work that calls have put on streams; for tests.
  void set_patience(std::chrono::nanoseconds patience, base::Logger log) {
    patience_ = patience;
    log_ = std::move(log);
  }

  Result<Session> begin(u32 rank, StreamPtr stream);
  Result<> send(u32 rank, u32 to, const void* tensor, u64 bytes, StreamPtr stream);
  Result<> receive(u32 rank, u32 from, void* tensor, u64 bytes, StreamPtr stream);
  Result<std::span<std::byte>> shard(u32 rank);
  struct Rows {
    u64 first = 0;
    const void* rows = nullptr;
    u64 count = 0;
  };
  Result<> write_rows(u32 rank, const Rows& rows, StreamPtr stream);
  struct Fetch {
    const void* numbers = nullptr;
    u32 count = 0;
    void* output = nullptr;
  };
  Result<> fetch_rows(u32 rank, const Fetch& fetch, StreamPtr stream);
  Result<> barrier(u32 rank, StreamPtr stream);
  Result<> synchronize(Deadline deadline);
  Result<> check() const;
  Result<> reset(Deadline deadline);

  // ---- for sessions
  Result<> all_gather(Session::State& session, const void* input, void* output, u64 bytes);
  struct Scatter {
    const void* input = nullptr;
    void* output = nullptr;
    u64 count = 0;
    DataType type = DataType::kBf16;
  };
  Result<> reduce_scatter(Session::State& session, const Scatter& scatter);
  Result<void*> input(Session::State& session, u64 bytes);
  Result<> end(Session::State& session);

  [[nodiscard]] symm::Group& group() const { return *group_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const Sizes& memory() const { return memory_; }
  [[nodiscard]] u32 generation() const { return generation_; }
  [[nodiscard]] Kernels* kernels() { return kernels_ ? &*kernels_ : nullptr; }

 private:
  class Abandoned;
  friend std::default_delete<Core>;
  Core() = default;
  ~Core() = default;
  // How the last owner ends it: local and bounded.
  static void let_go(Core* core) noexcept;
  static std::chrono::nanoseconds patience_of(const Options& options);
  // Whether nothing uses the memory of the group any more, by the deadline.
  [[nodiscard]] bool is_over(Deadline deadline) const;
  [[nodiscard]] u32 num_waits(const RankState& state) const;
  // `current` is the rank that is being prepared.
  Result<> prepare(Result<std::unique_ptr<jit::Jit>> jit, u32& current, Deadline deadline);
  Result<> prepare_rank(u32 rank);
  Result<> prepare_kernels(Deadline deadline);
  Result<> start_watch();
  Result<> grant(Deadline deadline);
  Result<> reset_paused(Deadline deadline);

  Result<RankState*> find(u32 rank, const char* call);
  Result<Lane> lane_of(RankState& state, StreamPtr stream) const;
  // Around what a call puts on its lane at a site.
  static Result<> follow(const RankState& state, u32 site, const Lane& lane);
  static Result<> note(RankState& state, u32 site, const Lane& lane);
  [[nodiscard]] Steps steps(const RankState& state) const;
  [[nodiscard]] const symm::Rank& rank_of(const RankState& state) const {
    return group_->rank(state.rank);
  }
  Result<> check_tensor(const RankState& state, u32 peer, const char* call, const void* tensor,
                        u64 bytes) const;
  Result<> refuse_session(const Session::State& session, const char* call) const;
  // The offset of an input in the window, copied there unless it is there already.
  Result<u64> place(Session::State& session, const void* input, u64 bytes);
  template <class Params>
  Result<> launch(RankState& state, const Lane& lane, const symm::Prepared<Params>& kernel,
                  const symm::LaunchShape& shape, const Params& params);

  Options options_;
  std::chrono::nanoseconds patience_{};
  base::Logger log_;
  Window window_;
  Sizes memory_;
  std::unique_ptr<jit::Jit> jit_;
  std::unique_ptr<symm::Group> group_;  // outlives the memory of the ranks
  std::optional<Kernels> kernels_;
  std::mutex twin_;     // lanes of the CPU take turns in it
  u32 generation_ = 0;  // resets so far
  std::vector<RankState> ranks_;
  std::unique_ptr<Watch> watch_;  // ends first: it looks at the ranks
};

inline namespace v1 {

struct Session::State {
  std::shared_ptr<Core> core;
  RankState* rank = nullptr;
  Lane lane;
  u32 generation = 0;
  bool ended = false;
  u32 calls = 0;   // gathers and scatters so far
  u64 placed = 0;  // bytes of inputs given out so far
};

}  // namespace v1
}  // namespace crossdock::coll
