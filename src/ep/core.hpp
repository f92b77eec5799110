// Core: what ep::Group and its Handles share: the symmetric group, the kernels, and what each local
// rank keeps. Everything that does not change from call to call is prepared here, so that a call
// fills in a few fields and launches. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <crossdock/ep/group.hpp>

#include "cuda/stream.hpp"
#include "ep/variants.hpp"
#include "ep/window.hpp"
#include "jit/jit.hpp"
#include "symm/group.hpp"
#include "symm/launch.hpp"

namespace crossdock::ep {

// A slot of a rank: routing and counts of the dispatch that holds it.
struct Slot {
  symm::LocalMemory routes;
  symm::LocalMemory source_ends;
  symm::LocalMemory expert_counts;
  symm::HostMemory host_rows;
  symm::HostMemory host_experts;
  symm::LocalMemory offsets;  // of the grouping; the rest if it is wanted at all
  symm::LocalMemory places;
  symm::LocalMemory positions;
  bool held = false;
};

struct RankState {
  u32 rank = 0;
  symm::LocalMemory state;     // EpState
  symm::LocalMemory previous;  // [2][most experts]
  symm::LocalMemory selections;
  symm::LocalMemory waits;
  std::vector<Slot> slots;
  u32 next_slot = 0;
  u32 ticket = 0;
  device::EpDispatchParams dispatch{};  // all that does not depend on the call
  device::EpCombineParams combine{};
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  static Result<std::shared_ptr<Core>> create(const GroupOptions& options);
  // Over a group that somebody else has made, for a window of make_window().
  static Result<std::shared_ptr<Core>> create(std::unique_ptr<symm::Group> group,
                                              std::unique_ptr<jit::Jit> jit, const Options& options,
                                              Deadline deadline);

  Result<Handle> dispatch(u32 rank, const Tokens& tokens, StreamPtr stream);
  Result<> combine(const Handle& handle, const Combined& combined, StreamPtr stream);
  Result<Grouped> group_rows(const Handle& handle, StreamPtr stream);
  struct ByPlace {
    const void* rows;
    u64 stride;
    bool weighted;
  };
  Result<> reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream);
  void release(u32 rank, u32 slot) noexcept;
  Result<Statistics> statistics(u32 rank, Deadline deadline) const;
  Result<> reset(Deadline deadline);

  [[nodiscard]] symm::Group& group() const { return *group_; }
  [[nodiscard]] symm::Launcher& launcher() { return *launcher_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const Window& window() const { return window_; }
  [[nodiscard]] const Sizes& memory() const { return memory_; }
  // A call's stream as a launch wants it; `kept` owns what the shape points to.
  Result<symm::LaunchShape> shape(const symm::Rank& rank, u32 grid, StreamPtr stream,
                                  std::optional<cuda::Stream>& kept) const;

 private:
  struct Variant {
    device::EpDispatchConfig config;
    symm::Prepared<device::EpDispatchParams> kernel;
  };
  Core() = default;
  Result<> prepare_kernels(Deadline deadline);
  Result<> prepare_variant(const DispatchShape& shape, Deadline deadline);
  Result<> prepare_rank(u32 rank);
  Result<> prepare_grouping(Deadline deadline);
  Result<Slot> make_slot(symm::Rank& rank);
  Result<> add_grouping(symm::Rank& rank, Slot& slot) const;
  Result<Slot*> grouped_slot(const Handle& handle, const char* call);
  Result<RankState*> find(u32 rank);
  Result<> check_tokens(const Tokens& tokens) const;
  Result<const Variant*> choose(const Tokens& tokens, u32 groups) const;
  [[nodiscard]] DispatchShape shape_of(u32 row_bytes, bool cast, u32 groups) const;
  Result<u32> take_slot(RankState& state) const;
  [[nodiscard]] u64 most_places() const;
  [[nodiscard]] device::EpArrived arrived_of(const Handle& handle) const;
  [[nodiscard]] device::EpOutputLayout output_of(const Tokens& tokens) const;

  Options options_;
  Window window_;
  Sizes memory_;
  std::vector<u32> dispatch_blocks_;
  std::vector<u32> combine_blocks_;
  std::unique_ptr<jit::Jit> jit_;
  std::unique_ptr<symm::Group> group_;  // outlives the memory of the ranks
  std::optional<symm::Launcher> launcher_;
  std::vector<Variant> variants_;
  std::optional<symm::Prepared<device::EpCombineParams>> combine_;
  std::optional<symm::Prepared<device::EpGroupRowsParams>> group_rows_;
  std::optional<symm::Prepared<device::EpReduceRowsParams>> reduce_rows_;
  std::vector<RankState> ranks_;
};

}  // namespace crossdock::ep
