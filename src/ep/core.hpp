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
#include "ep/side.hpp"
#include "ep/slots.hpp"
#include "ep/variants.hpp"
#include "ep/window.hpp"
#include "jit/jit.hpp"
#include "symm/group.hpp"
#include "symm/launch.hpp"

namespace crossdock::ep {

// What the kernels for few tokens keep of one small slot, and their parameters as far as they do
// not depend on the call.
struct SmallSlot {
  symm::LocalMemory state;     // EpSmallState
  symm::LocalMemory combines;  // EpState
  device::EpSmallParams dispatch{};
  device::EpCombineParams combine{};
  u32 told = 0;  // as RankState::told, of the slot
};

struct RankState {
  u32 rank = 0;
  symm::LocalMemory state;     // EpState
  symm::LocalMemory previous;  // [2][most experts]
  symm::LocalMemory selections;
  symm::LocalMemory waits;       // [2][world]: of dispatches, then of combines
  symm::LocalMemory mask;        // EpMask
  symm::LocalMemory copy_words;  // of blocks that copy: device::EpCopyWords
  SlotLayout layout;
  SlotLayout small_layout;
  // Those of the window first, then small ones. Slots are never taken away, so that a copy is made
  // once for all the handles that will need it.
  std::vector<std::unique_ptr<Slot>> slots;
  std::vector<symm::HostMemory> host_blocks;
  u32 next_slot = 0;
  u32 next_small = 0;
  Tickets tickets;
  device::EpDispatchParams dispatch{};  // all that does not depend on the call
  device::EpCombineParams combine{};
  // Ticket of the dispatch whose combine has told the others and not been received; 0: there is
  // none. The second half takes its epoch to be the last that was told, so there is one at a time.
  u32 told = 0;
  u32 let_in = 0;  // how often others have been let in again
  std::vector<SmallSlot> small;
};

// Where the rows of one dispatch arrive, where the caller finds them, and where combine looks for
// what the experts make of them.
struct Placement {
  u32 index = 0;  // of the slot
  Slot* slot = nullptr;
  u64 output_offset = 0;
  u8* block = nullptr;               // an EpOutputLayout
  u8* input = nullptr;               // an EpInputLayout, for the experts to fill; null: no combine
  u64 input_offset = 0;              // in the window, where peers read it
  u32 input_slot = device::kNoSlot;  // whose free_at goes with it
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  static Result<std::shared_ptr<Core>> create(const GroupOptions& options);
  // Over a group that somebody else has made, for a window of make_window(). Collective: an error,
  // that of `jit` too, is told to the other processes.
  static Result<std::shared_ptr<Core>> create(std::unique_ptr<symm::Group> group,
                                              Result<std::unique_ptr<jit::Jit>> jit,
                                              const Options& options, Deadline deadline);

  Result<Handle> dispatch(u32 rank, const Tokens& tokens, const DispatchOptions& how,
                          StreamPtr stream);
  Result<> combine(const Handle& handle, const Combined& combined, const CombineOptions& how,
                   StreamPtr stream);
  Result<Handle> dispatch_send(u32 rank, const Tokens& tokens, const DispatchOptions& how,
                               StreamPtr stream);
  // `to`: where copies of the rows go, or null.
  Result<> dispatch_receive(const Handle& handle, const Expanded* to, StreamPtr stream);
  Result<> combine_send(const Handle& handle, const CombineOptions& how, StreamPtr stream);
  Result<> combine_receive(const Handle& handle, const Combined& combined, StreamPtr stream);
  struct MaskChange {
    u32 set = 0;
    u32 clear = 0;
    device::i32* told = nullptr;
  };
  Result<> mask(u32 rank, u32 peer, bool masked, StreamPtr stream);
  Result<> change_mask(u32 rank, const MaskChange& change, StreamPtr stream);
  Result<> read_mask(u32 rank, std::int32_t* told, StreamPtr stream);
  Result<u32*> mask_memory(u32 rank);
  Result<u32> masked(u32 rank, Deadline deadline);
  Result<Grouped> group_rows(const Handle& handle, StreamPtr stream);
  Result<Grouped> grouped(const Handle& handle);
  Result<> expand_rows(const Handle& handle, const Expanded& to, StreamPtr stream);
  Result<> reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream);
  Result<> reserve_copies(u32 rank, u32 copies);
  Result<std::span<std::byte>> user_memory(u32 rank);
  Result<std::uint64_t> output_bytes(const Tokens& tokens) const;
  void release(u32 rank, u32 slot) noexcept;
  // Whether `p`, if not null, is memory of the rank's GPU; for calls on top of these too.
  struct Where {
    u32 rank;
    const char* call;
  };
  Result<> check_memory(const Where& where, const void* p, const char* what) const;
  Result<Statistics> statistics(u32 rank, Deadline deadline) const;
  Result<StatisticsMemory> statistics_memory(u32 rank);
  Result<> reset(Deadline deadline);
  Result<> reform(Deadline deadline);

  [[nodiscard]] symm::Group& group() const { return *group_; }
  [[nodiscard]] symm::Launcher& launcher() { return *launcher_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const Window& window() const { return window_; }
  [[nodiscard]] const Sizes& memory() const { return memory_; }
  // Of the local ranks that layers over the group have; null: not yet made.
  [[nodiscard]] Side* side(u32 rank);
  void add_side(Side side) { sides_.push_back(std::move(side)); }
  // Whether a dispatch of the large path that is asked for copies makes them in its own launch.
  [[nodiscard]] bool copies_beside(u32 rank) const { return copy_blocks_[rank] != 0; }
  // A call's stream as a launch wants it; `kept` owns what the shape points to.
  Result<symm::LaunchShape> shape(const symm::Rank& rank, u32 grid, StreamPtr stream,
                                  std::optional<cuda::Stream>& kept) const;

 private:
  struct SmallVariant {
    device::EpSmallConfig config;
    symm::Prepared<device::EpSmallParams> kernel;
    std::optional<symm::Prepared<device::EpSmallExpandedParams>> expanded;
  };
  struct Variant {
    device::EpDispatchConfig config;
    symm::Prepared<device::EpDispatchParams> kernel;
  };
  struct ExpandedVariant {
    device::EpDispatchConfig config;
    symm::Prepared<device::EpExpandedDispatchParams> kernel;
  };
  Core() = default;
  Result<> prepare(Result<std::unique_ptr<jit::Jit>> jit, Deadline deadline);
  Result<> prepare_kernels(Deadline deadline);
  void fit_copy_blocks();
  Result<> check_resident();
  void begin_anew(const char* by);
  [[nodiscard]] u32 vacant_bits() const;
  Result<> mask_vacant(Deadline deadline);
  [[nodiscard]] Result<> check_nothing_open(const RankState& state) const;
  Result<> prepare_variant(const DispatchShape& shape, Deadline deadline);
  Result<> prepare_rank(u32 rank);
  Result<> prepare_grouping(Deadline deadline);
  // ---- small.cpp
  Result<> prepare_small(Deadline deadline);
  Result<> prepare_small_rank(RankState& state);
  Result<bool> takes_small(const Tokens& tokens, const DispatchOptions& how) const;
  Result<const SmallVariant*> choose_small(u32 row_bytes, bool cast, u32 tokens) const;
  // The most tokens of any rank in a call.
  [[nodiscard]] u32 most_tokens(const DispatchOptions& how) const;
  struct SmallCall {
    u32 most;
    bool receives;
    const Expanded* to;  // copies in the same launch, or null
  };
  Result<Handle> dispatch_small(RankState& state, const Tokens& tokens, const SmallCall& call,
                                StreamPtr stream);
  Result<> launch_small(const device::EpSmallParams& params, Handle::State& handle,
                        const Expanded* to, StreamPtr stream);
  // Whether copies of rows by expert are made in the launch that receives them.
  [[nodiscard]] bool copies_few(bool packets) const;
  [[nodiscard]] u32 few_copy_blocks() const;
  device::EpSmallExpandedParams small_expanded(const device::EpSmallParams& params,
                                               const Handle::State& handle,
                                               const Expanded& to) const;
  // ---- reads.cpp
  Result<> prepare_reads(Deadline deadline);
  Result<std::uint64_t> capture_of(const symm::Rank& rank, StreamPtr stream) const;
  Result<> check_not_told(const RankState& state, const Handle::State& handle) const;
  Result<> await_reads(const RankState& state, const Handle::State& handle, StreamPtr stream);
  // ---- packets.cpp
  Result<> prepare_packets(Deadline deadline);
  [[nodiscard]] bool in_packets(u32 most, const Tokens& t) const;
  Result<> launch_packets(const device::EpSmallParams& params, const Handle::State& handle,
                          StreamPtr stream);
  Result<> combine_packets(const Handle::State& handle, const device::EpCombineParams& params,
                           StreamPtr stream);
  // ---- slots.cpp
  Result<> add_host_words(RankState& state, Slot& slot) const;
  Result<u32> add_slot(RankState& state, SlotKind kind, symm::LocalMemory memory) const;
  Result<u32> prepare_slot(RankState& state, SlotKind kind) const;
  Result<u32> make_slot(RankState& state, SlotKind kind, const cuda::Stream* stream) const;
  Result<u32> take_slot(RankState& state, SlotKind kind, const cuda::Stream* stream) const;
  Result<u32> take_small_slot(RankState& state) const;
  Result<u32> take_window_slot(RankState& state, const cuda::Stream* stream) const;
  // Whether a call on `stream`, or on the rank's own, is captured.
  Result<bool> in_capture(u32 rank, const cuda::Stream* stream) const;
  Result<> refuse_in_capture(u32 rank, const cuda::Stream* stream, SlotKind kind) const;
  // ---- checks.cpp
  Result<> check_shape(const Tokens& tokens) const;
  Result<> check_tokens(u32 rank, const Tokens& tokens, const DispatchOptions& how) const;
  Result<> check_combined(const Handle::State& handle, const device::EpCombineOutput& to) const;
  Result<> check_experts(const Handle::State& handle, const ExpertOutput& from) const;
  // What is copied by expert.
  struct Copied {
    u32 rank;
    u32 row_bytes;
    u32 scale_bytes;  // 0: no scales
    bool weights;
  };
  Result<> check_expanded(const Copied& from, const Expanded& to) const;
  Result<> check_by_place(const Handle& handle, const ByPlace& outputs, u64 stride) const;
  // ---- calls.cpp, placement.cpp
  Result<RankState*> find(u32 rank);
  Result<Handle::State*> own(const Handle& handle, const char* call) const;
  // As own(), and its rows have been received.
  Result<Handle::State*> own_received(const Handle& handle, const char* call) const;
  enum class Halves { kBoth, kTell, kAdd };
  struct CombineCall {
    const Combined& combined;
    CombineOptions how;
    Halves halves;
  };
  Result<> combine_halves(Handle::State& handle, const CombineCall& call, StreamPtr stream);
  // The parameters of a combine of the handle's rows, as far as its halves have them in common.
  Result<device::EpCombineParams> combine_params(RankState& state, const Handle::State& handle,
                                                 const CombineCall& call) const;
  void cut_rows(device::EpCombineParams& params, u32 blocks) const;
  // ---- compressed.cpp
  Result<> prepare_compressed(Deadline deadline);
  Result<> check_payload(const Handle::State& handle, Payload payload, const char* call) const;
  Result<> check_how(const Handle::State& handle, const CombineOptions& how) const;
  // The format in which the handle's rows travel if `wanted` is asked for.
  static device::EpPayload payload_of(const Handle::State& handle, Payload wanted);
  [[nodiscard]] u8* packed_rows(const RankState& state, const Handle::State& handle) const;
  Result<> pack_input(RankState& state, Handle::State& handle, device::EpPayload payload,
                      StreamPtr stream);
  [[nodiscard]] u32 packed_blocks(u32 rank) const;
  Result<u32*> take_turn(RankState& state, const Handle::State& handle, Halves halves) const;
  static void note_turn(const Handle::State& handle, Halves halves, u32& told);
  Result<const Handle::State*> reused(u32 rank, const Tokens& tokens,
                                      const DispatchOptions& how) const;
  Result<Placement> place(RankState& state, const Tokens& tokens, const DispatchOptions& how,
                          const cuda::Stream* stream);
  Result<u64> user_offset(u32 rank, const void* block, u64 room, u64 needed,
                          const char* what) const;
  [[nodiscard]] device::EpDispatchInput input_of(const Tokens& tokens) const;
  Result<> copy_out(RankState& state, const Placement& placement,
                    const device::EpDispatchParams& params, const Handle::State* reused,
                    const symm::LaunchShape& shape);
  [[nodiscard]] device::EpFree free_of(const RankState& state, const Placement& placement) const;
  Result<> copy_in(RankState& state, const Handle::State& handle, const ExpertInput& from,
                   const symm::LaunchShape& shape);
  Result<> launch_copy(const symm::Rank& rank, std::span<const device::EpPlane> planes,
                       device::EpCopyRowsParams params, const symm::LaunchShape& shape);
  // What a handle needs of a dispatch, large or small.
  struct Dispatched {
    device::EpTokens tokens;
    const device::EpOutputLayout& output;
    const device::EpDispatchResult& result;
    bool weights;
    u32 stride;  // places from source to source; 0: rows without gaps
  };
  Handle make_handle(RankState& state, const Placement& placement, const Dispatched& dispatched);
  // ---- expanded.cpp
  Result<> prepare_copies(RankState& state);
  Result<> can_dispatch(const Tokens& tokens, u32 groups) const;
  Result<> check_expansion(u32 rank, const Tokens& tokens, bool weights, const Expanded& to) const;
  // Lists and copies that a dispatch makes itself; `to` null: none. `like`: whose routing is used
  // again, or null.
  struct Beside {
    const Slot& slot;
    const Expanded* to;
    const Handle::State* like;
  };
  Result<> launch_dispatch(const RankState& state, const Tokens& tokens,
                           const device::EpDispatchParams& params, const Beside& beside,
                           symm::LaunchShape shape);
  Result<Handle> expand_afterwards(Handle handle, const Expanded* to, StreamPtr stream);
  // ---- grouping.cpp
  [[nodiscard]] static device::EpExpanded expanded_of(const Copied& from, const Expanded& to);
  Result<Slot*> grouped_slot(const Handle& handle, const char* call);
  Result<Slot*> listed_slot(const Handle& handle, const char* call);
  [[nodiscard]] DispatchShape shape_of(u32 row_bytes, bool cast, u32 groups) const;
  [[nodiscard]] device::EpArrived arrived_of(const Handle::State& handle) const;
  [[nodiscard]] device::EpGrouping grouping_of(const Slot& slot) const;
  [[nodiscard]] device::EpOutputLayout output_of(const Tokens& tokens, u32 capacity) const;

  Options options_;
  Window window_;
  Sizes memory_;
  std::vector<u32> dispatch_blocks_;
  std::vector<u32> combine_blocks_;
  std::vector<u32> copy_blocks_;  // beside a dispatch, of the local ranks: at most the window's
  std::unique_ptr<jit::Jit> jit_;
  std::unique_ptr<symm::Group> group_;  // outlives the memory of the ranks
  std::optional<symm::Launcher> launcher_;
  std::vector<Variant> variants_;
  std::vector<ExpandedVariant> expanded_variants_;  // instead, with copies beside
  std::optional<symm::Prepared<device::EpCombineParams>> combine_;
  std::vector<SmallVariant> small_variants_;
  std::optional<symm::Prepared<device::EpCombineParams>> small_combine_;
  // With Options::compressed: by payload, without kBf16; and what makes such rows.
  std::optional<symm::Prepared<device::EpCombineParams>> packed_combines_[device::kEpPayloads];
  std::optional<symm::Prepared<device::EpReduceRowsParams>> pack_rows_;
  std::optional<symm::Prepared<device::EpAwaitReadsParams>> await_reads_;
  std::optional<symm::Prepared<device::EpMaskParams>> mask_;
  std::optional<symm::Prepared<device::EpPacketParams>> packets_[2];  // without and with a cast
  std::optional<symm::Prepared<device::EpPacketCombineParams>> packet_combine_;
  std::optional<symm::Prepared<device::EpGroupRowsParams>> group_rows_;
  std::optional<symm::Prepared<device::EpReduceRowsParams>> reduce_rows_;
  std::optional<symm::Prepared<device::EpExpandRowsParams>> expand_rows_;
  std::optional<symm::Prepared<device::EpCopyRowsParams>> copy_rows_;
  u32 current_rank_ = 0;   // what is being prepared, for errors that others are told
  u32 generation_ = 0;     // resets and reforms so far
  const char* anew_ = "";  // the last of them, for a handle from before it
  std::vector<RankState> ranks_;
  std::vector<Side> sides_;  // events of the group's GPUs
};

}  // namespace crossdock::ep
