// Expert parallelism over NVLink: dispatch brings every token once to each rank that owns an expert
// it chose, straight into its final row; combine brings the experts' outputs back as one sum.
//
//   Group ── dispatch(rank, tokens) ──> Handle ── received()      rows, in order of (rank, token)
//         <── combine(handle, ...) ───         └─ expert_input()  where the experts put their rows
//
// A group has the ranks of one NVLink domain, one or several of them in this process. Calls put
// work on a stream and return: they wait for no GPU, make memory of one only as dispatch() says,
// and may be captured into a graph. All ranks make the same calls in the same order, on one stream
// or on streams that they order themselves. A rank's Group and Handles are single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/ep/options.hpp>
#include <crossdock/symm/group_options.hpp>

namespace crossdock::ep {

class Core;

inline namespace v1 {

// A CUstream of the rank's GPU. Null: the rank's own stream. Ignored on the CPU.
using StreamPtr = void*;

// The tokens of one rank; memory of its GPU that stays as it is until the dispatch has run.
struct Tokens {
  std::uint32_t count = 0;         // at most max_tokens; may be 0, and differ between ranks
  const void* rows = nullptr;      // 16-byte aligned; bf16 with `cast`, else bytes
  std::uint32_t row_bytes = 0;     // a multiple of 16; the same on all ranks
  std::uint64_t row_stride = 0;    // bytes; 0: row_bytes
  const void* scales = nullptr;    // go along with the rows, not with `cast`
  std::uint32_t scale_bytes = 0;   // of a row, a multiple of 4; the same on all ranks
  std::uint64_t scale_stride = 0;  // bytes; 0: scale_bytes
  bool cast = false;               // bf16 to e4m3 with one fp32 scale for 128 values
  // The scales of a cast are powers of two, ue8m0: four of a row in a word, the first in its lowest
  // byte. The same on all ranks.
  bool cast_ue8m0 = false;
  // The rows and scales that are given, by column, are such as a cast makes (of `cast_ue8m0` too):
  // some ranks may give them so and others cast. On the large path without Options::expand_sms;
  // else it counts as false, and cast_ue8m0 with it.
  bool like_cast = false;
  bool scales_by_column = false;   // delivered as [words of a row][rows], for tensor maps
  const void* ids = nullptr;       // [count][top_k], i32 or i64 by Options::wide_ids; -1: masked
  const float* weights = nullptr;  // [count][top_k]; null, on all ranks then: none are delivered
};

class Handle;
struct Expanded;

// How a dispatch is made, besides its tokens.
struct DispatchOptions {
  // kAuto: small when `most_tokens` are at most Options::small_tokens and neither `routing` nor
  // `output` is given, which the small path does not have.
  Path path = Path::kAuto;
  // The most tokens that any rank has in this call, the same on all ranks. 0: Options::max_tokens.
  std::uint32_t most_tokens = 0;
  // An earlier dispatch of this rank: as many tokens with the same ids go the same ways again, with
  // other rows and scales, and nothing is counted. Tokens::ids and weights are null then: what the
  // earlier one delivered is delivered again. All ranks give the same earlier dispatch.
  const Handle* routing = nullptr;
  // Where the rows arrive instead of a slot: in this rank's user_memory(), on a multiple of 128,
  // with room for Group::output_bytes() of the tokens. Rows come first, without a gap; what else
  // is delivered follows, see Received. Free again when the caller says so.
  void* output = nullptr;
  std::uint64_t output_room = 0;  // bytes
  // With `output`: where the experts will put theirs, as above, with room for
  // Sizes::input_bytes. Peers have read it when a later combine of this rank has run. Null: there
  // will be no combine.
  void* input = nullptr;
  std::uint64_t input_room = 0;  // bytes
  // Where copies of the rows go, expert by expert: as if group_rows and expand_rows followed, whose
  // lists Group::grouped tells. With Options::expand_sms rows are copied while others are on their
  // way; on the small path with Options::small_expand_sms. Results are the same. Each rank chooses
  // for itself. Choices for which there is no room are a fault of this rank when its dispatch has
  // run. Not for halves.
  const Expanded* expanded = nullptr;
};

// What a dispatch delivers, in memory of the rank's GPU; there when the dispatch has run. Rows are
// in the order of their source rank, and of the tokens of one rank. On the large path they lie one
// after the other; on the small path (source_stride not 0) those of source s are places
// s * source_stride up to source_ends[s], and what lies between is not touched.
struct Received {
  void* rows = nullptr;
  std::uint32_t row_bytes = 0;      // rows are dense
  std::uint32_t capacity = 0;       // rows there is room for
  void* scales = nullptr;           // null: none
  std::uint32_t scale_bytes = 0;    // by row: the stride of a row
  std::uint32_t scale_columns = 0;  // by column: the stride of a word, in words; 0: by row
  std::int32_t* ids = nullptr;      // [row][top_k]: expert of this rank, counted from its first; -1
  float* weights = nullptr;         // [row][top_k]
  std::uint32_t* tokens = nullptr;  // [row]: the token's number at its rank
  const std::uint32_t* source_ends = nullptr;  // [world]: where the rows of each rank end
  std::uint32_t source_stride = 0;             // places from source to source; 0: rows without gaps
  const std::uint32_t* expert_counts = nullptr;  // [experts of this rank]: choices, not padded
};

// Where the experts put their output: row i belongs to the received row i.
struct ExpertInput {
  void* rows = nullptr;      // bf16, hidden values each, dense; null: no combine
  float* weights = nullptr;  // [row][top_k], for Combined::weights
};

// The routing and the memory of one dispatch. Dropping it gives its slot, or its copy, back to
// later dispatches of the rank, in the order of its calls.
class CROSSDOCK_API Handle {
 public:
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  ~Handle();

  [[nodiscard]] std::uint32_t rank() const noexcept;
  [[nodiscard]] const Received& received() const noexcept;
  // To be written after the dispatch; again, for another combine of this handle, when a later
  // dispatch or combine of the rank has run; reduce_rows() waits by itself. On the small path what
  // was received may be overwritten once a combine of the handle has begun.
  [[nodiscard]] const ExpertInput& expert_input() const noexcept;
  // All slots were held: the rows have been copied to ordinary memory. Nothing else differs, except
  // that combine copies the experts' output back.
  [[nodiscard]] bool copied() const noexcept;
  // How many rows arrive. Known long before they are there, so outputs of the exact size can be
  // made while they travel; with Options::mask_late when the dispatch has ended, since until then a
  // rank may be left out. Polls memory; not for captured calls, whose launches come later.
  Result<std::uint32_t> rows(Deadline deadline) const;
  // Choices of each expert of this rank, when all rows are there. As rows().
  Result<std::vector<std::uint32_t>> expert_counts(Deadline deadline) const;

 private:
  friend class Group;
  friend class ep::Core;
  struct State;
  explicit Handle(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Received rows by expert: a place for every choice of an expert of this rank, expert by expert,
// each beginning at a multiple of Options::expert_alignment. Nothing is copied: places name rows.
// How many choices each expert really has is Received::expert_counts.
struct Grouped {
  const std::uint32_t* offsets = nullptr;         // [experts of the rank + 1], padded
  const std::uint32_t* aligned_counts = nullptr;  // [experts of the rank]: places, with padding
  const std::int32_t* rows = nullptr;             // [place]: a received row, in order; -1: padding
  const std::uint32_t* positions = nullptr;  // [row][top_k]: the place of a choice of this rank
  const float* weights = nullptr;            // [place]: of the choice; null: none were delivered
  std::uint64_t places = 0;                  // the most there can be
};

// A place of a token: which rank sent it, and its number there. Both -1 in padding.
struct Source {
  std::int32_t rank;
  std::int32_t token;
};

// Where expand_rows puts copies of the received rows, one for each choice of an expert of this
// rank: memory of its GPU that the caller has. Two layouts:
//
//   expanded  rows_per_expert = 0: the places of Grouped, expert after expert
//   masked    else: the i-th choice of expert e is row e * rows_per_expert + i; how many of an
//             expert's rows are used is Received::expert_counts
//
// Padding (of an expert, up to a multiple of Options::expert_alignment, or to rows_per_expert) is
// zero; what lies behind it stays as it was. Planes that are null are not wanted.
struct Expanded {
  std::uint64_t places = 0;           // rows there is room for: Grouped::places is always enough
  std::uint32_t rows_per_expert = 0;  // masked: rows there is room for; world * max_tokens, unless
                                      // tokens choose an expert more than once
  void* rows = nullptr;               // 16-byte aligned, like the received rows
  std::uint64_t row_stride = 0;       // bytes, a multiple of 16; 0: dense
  void* scales = nullptr;             // like the received ones
  bool scales_by_column = false;      // as [words of a row][places], for tensor maps
  std::uint64_t scale_stride = 0;     // by row: bytes from row to row; by column: words from column
                                      // to column; 0: dense, by column rounded up to 4 words
  float* weights = nullptr;           // [place]
  Source* sources = nullptr;          // [place]
};

// What the experts made of the places of Grouped or, with rows_per_expert, of the rows of a masked
// layout: bf16, hidden values each.
struct ByPlace {
  const void* rows = nullptr;         // 16-byte aligned
  std::uint64_t row_stride = 0;       // bytes, a multiple of 16; 0: dense
  std::uint32_t rows_per_expert = 0;  // as in Expanded
  bool weighted = false;              // each choice times its weight; else a plain sum
  // The ids that arrived, [row][top_k], from where the caller has kept them: an output of its own
  // may be written by other dispatches then. Null: where the dispatch has put them.
  const std::int32_t* ids = nullptr;
  // Other than kBf16: the sums are written in this format, for combines that are told so
  // (CombineOptions::packed), and expert_input() stays as it is; they are there until a combine
  // compresses expert_input(). Needs Options::compressed and a handle of the small path. If its
  // rows travel in packets they stay bf16, and the sums are written to expert_input().
  Payload payload = Payload::kBf16;
};

// How a combine is made; the same on all ranks.
struct CombineOptions {
  // Other than kBf16 on the small path only, with Options::compressed. A handful of tokens, whose
  // rows travel in packets, stays bf16 whatever is asked for: they are faster so, and exact.
  Payload payload = Payload::kBf16;
  // reduce_rows() has written the rows in this format (ByPlace::payload), and no combine has
  // compressed others since. False: expert_input() is compressed in a launch before the combine,
  // which waits as reduce_rows() does, and stays as it is.
  bool packed = false;
};

// What the experts have made of the received rows, where it is not in expert_input(): memory of the
// rank's GPU with as many rows as have arrived, in their order, dense. combine copies it there
// first, when peers have read what was there before, so that a handle may be combined again at
// once.
struct ExpertOutput {
  const void* rows = nullptr;  // bf16, hidden values each, 16-byte aligned; null: in expert_input()
  const float* weights = nullptr;  // [row][top_k]; null: likewise
};

// What combine makes of a rank's tokens: bf16, the sum of the rows of all ranks in the order of the
// ranks, in fp32. Memory of the rank's GPU.
struct Combined {
  void* rows = nullptr;          // [count of the dispatch], 16-byte aligned
  std::uint64_t row_stride = 0;  // bytes; 0: dense
  const void* bias[2] = {};      // added first, rows like the output; null: none
  std::uint64_t bias_stride[2] = {};
  float* weights = nullptr;  // [count][top_k]: sums of ExpertInput::weights; null: not wanted
  ExpertOutput experts = {};
};

struct GroupOptions {
  symm::GroupOptions ranks = {};
  Options ep = {};
};

// Kept by the device over all dispatches and combines, copied to the host when asked for.
struct Statistics {
  std::vector<std::uint64_t> expert_selections;  // of the experts of the rank
  std::vector<std::uint64_t> source_wait_ns;     // waiting for the rows of each rank
  std::vector<std::uint64_t> combine_wait_ns;    // until each rank's rows were ready to combine
};

// The same where the device keeps it, for kernels of the caller: a call that has run has added
// its part. Null without Options::statistics.
struct StatisticsMemory {
  const std::uint64_t* expert_selections = nullptr;  // [experts of the rank]
  const std::uint64_t* source_wait_ns = nullptr;     // [world]
  const std::uint64_t* combine_wait_ns = nullptr;    // [world]
};

class CROSSDOCK_API Group {
 public:
  // Collective among the processes; compiles the kernels or loads them from the cache. A process
  // that fails, also because its GPU has no room for the blocks that must run at once, is named to
  // all.
  static Result<Group> create(const GroupOptions& options);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  ~Group();

  [[nodiscard]] std::uint32_t world() const noexcept;
  [[nodiscard]] std::span<const std::uint32_t> local_ranks() const noexcept;
  [[nodiscard]] const Sizes& memory() const noexcept;

  // When handles hold all slots of the rank, the rows are copied (Handle::copied). That takes
  // memory when more copies are held than ever before, which a capture cannot: kBusy then, unless
  // reserve_copies() has made it. kBusy also without Options::fall_back.
  Result<Handle> dispatch(std::uint32_t rank, const Tokens& tokens, StreamPtr stream = nullptr);
  Result<Handle> dispatch(std::uint32_t rank, const Tokens& tokens, const DispatchOptions& how,
                          StreamPtr stream = nullptr);
  // Memory for `copies` handles more than there are slots. Waits for the rank's own stream.
  Result<> reserve_copies(std::uint32_t rank, std::uint32_t copies);
  // The part of the rank's window that is the caller's: Options::user_bytes, zero after a reset.
  [[nodiscard]] Result<std::span<std::byte>> user_memory(std::uint32_t rank) const;
  // Bytes that a dispatch of such tokens fills, whatever their count.
  [[nodiscard]] Result<std::uint64_t> output_bytes(const Tokens& tokens) const;
  // Lists the received rows by expert, after the dispatch in the stream.
  Result<Grouped> group_rows(const Handle& handle, StreamPtr stream = nullptr);
  // The lists that group_rows, or a dispatch with DispatchOptions::expanded, has made of the
  // handle's rows. Launches nothing.
  [[nodiscard]] Result<Grouped> grouped(const Handle& handle) const;
  // Adds what the experts have made of each received row, bf16 rows by place, into its row of
  // expert_input(): in the order of the choices, in fp32, each times its weight if `weighted`.
  // `stride` in bytes, 0: dense. After group_rows of the same handle.
  //
  // May be called again for another combine of the handle at once: it waits until the peers have
  // read what the combine before has told them. Of few tokens that is part of the next combine:
  // peers tell by their own reduce_rows() or combine of the same dispatch, so all ranks make
  // another one, in the same place among their calls. Refused between the halves of a combine.
  Result<> reduce_rows(const Handle& handle, const void* by_place, std::uint64_t stride,
                       bool weighted, StreamPtr stream = nullptr);
  Result<> reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream = nullptr);
  // Copies of the received rows by expert. After group_rows of the same handle. More choices than
  // there is room for are a fault of the rank (check()), and nothing is written behind the room.
  Result<> expand_rows(const Handle& handle, const Expanded& to, StreamPtr stream = nullptr);
  Result<> combine(const Handle& handle, const Combined& combined, StreamPtr stream = nullptr);
  Result<> combine(const Handle& handle, const Combined& combined, const CombineOptions& how,
                   StreamPtr stream = nullptr);

  // The halves of a dispatch on the small path, so that no SM waits in between: the first sends
  // this rank's rows, the second, a block that runs when most has come, waits for those of the
  // others. What was received is there after the second only, and every other call with the handle
  // comes after it. Twice is an error; a handle may be dropped without it.
  Result<Handle> dispatch_send(std::uint32_t rank, const Tokens& tokens,
                               const DispatchOptions& how = {}, StreamPtr stream = nullptr);
  Result<> dispatch_receive(const Handle& handle, StreamPtr stream = nullptr);
  // And copies of the rows, as DispatchOptions::expanded.
  Result<> dispatch_receive(const Handle& handle, const Expanded& to, StreamPtr stream = nullptr);
  // The halves of a combine, by pull: the first tells the others that the experts' rows are ready,
  // the second waits for theirs, loads and adds up. In turns, and one combine of a rank at a time;
  // of few tokens one of each small slot. A combine that was told and never received keeps the
  // next from being made until a reset().
  Result<> combine_send(const Handle& handle, StreamPtr stream = nullptr);
  Result<> combine_send(const Handle& handle, const CombineOptions& how,
                        StreamPtr stream = nullptr);
  Result<> combine_receive(const Handle& handle, const Combined& combined,
                           StreamPtr stream = nullptr);

  // Goes on without `peer`, or with it again; by default nobody is masked. A masked rank is sent
  // nothing and not waited for; combine adds up what the others have. Ranks need not agree. In the
  // order of the stream; but with Options::mask_late masking also ends the waits for `peer` in
  // calls of `rank` that run beside it, on other streams, which go on as if `peer` had not come.
  //
  // Nobody waits until a masked rank has read its rows: one that still runs may add up rows of a
  // later call. So mask() is for ranks that one goes on without.
  //
  // Letting in again: both ranks let the other in before the same dispatch (whichever first, and
  // whatever either still runs), have made the same calls meanwhile, fewer than 65,000, and have no
  // half of a call open. A rank that is let in and does not let in is waited for as one that does
  // not come. One that has missed calls needs a reset() of the group. kInvalidArgument for the rank
  // itself, which also means that not all can be masked, and between the halves of a call. With
  // Options::mask_late also between a dispatch and its combine, and for combines of handles from
  // before: they do not know who was left out in the middle of their dispatch. A rank that has let
  // nobody in would make such a combine, and wait there for those that have; so with mask_late all
  // ranks let in before that dispatch, those that have masked nobody by clear_mask().
  Result<> mask(std::uint32_t rank, std::uint32_t peer, bool masked, StreamPtr stream = nullptr);
  // Nobody is masked from then on.
  Result<> clear_mask(std::uint32_t rank, StreamPtr stream = nullptr);
  // Writes 1 for every rank that is masked and 0 for the others to `told`, [world] in memory of the
  // rank's GPU, in the order of the stream.
  Result<> read_mask(std::uint32_t rank, std::int32_t* told, StreamPtr stream = nullptr);
  // The same word where kernels of the caller can change it, a bit for each masked rank: a bit that
  // an atomic OR sets between two calls of the stream is as good as mask(). A load and a store is
  // not, unless nothing of the group runs beside: a launch may mask a rank in between. Bits must
  // not be cleared there.
  Result<std::uint32_t*> mask_memory(std::uint32_t rank) const;
  // The ranks that are masked, a bit each, when what was called without a stream has been done.
  Result<std::uint32_t> masked(std::uint32_t rank, Deadline deadline) const;

  // Waits for the ranks' own streams (on the CPU: runs what was called), then check().
  Result<> synchronize(Deadline deadline);
  // The first fault of a local rank, naming what failed and who is to blame. Never waits.
  [[nodiscard]] Result<> check() const;
  // After a fault: collective, when no work of the group is left on any stream of this process.
  // Handles from before stay valid as memory only: calls refuse them.
  Result<> reset(Deadline deadline);
  // Elastic groups (symm::GroupOptions::place): goes on with the processes that are left, which all
  // call this when no work of the group is left on any stream, and with new ones, which call
  // create() with the same options for the ranks of those that are gone, and are waited for until
  // they have prepared their kernels. Else as reset(): what windows held is gone, user_memory() and
  // outputs that lie there included; their addresses stay, and nothing may use them until
  // it returns. Where somebody was left out, who may be alive and late, there is other memory
  // behind those addresses: what others know of the memory itself (a NIC's registration) is to be
  // made again. After an error, which all get, the group is of no use until a reform() succeeds.
  Result<> reform(Deadline deadline);
  // Ranks that no process has, ascending. With Options::masks they are masked; else every dispatch
  // waits for them until its deadline: a group without masks needs all its seats.
  [[nodiscard]] std::span<const std::uint32_t> vacant_ranks() const noexcept;
  // Ranks of processes that wait for a reform() of all to let them in.
  [[nodiscard]] Result<std::vector<std::uint32_t>> waiting_ranks(Deadline deadline) const;
  Result<Statistics> statistics(std::uint32_t rank, Deadline deadline) const;
  [[nodiscard]] Result<StatisticsMemory> statistics_memory(std::uint32_t rank) const;

  // What the library's tools and tests need beside the API.
  [[nodiscard]] ep::Core& core() const noexcept { return *core_; }

 private:
  explicit Group(std::shared_ptr<ep::Core> core);
  std::shared_ptr<ep::Core> core_;
};

}  // namespace v1
}  // namespace crossdock::ep
