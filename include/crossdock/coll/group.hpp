// Collectives over NVLink that leave the SMs to others: gathers and scatters, tensors from rank to
// rank, rows of a table that is dealt to the ranks. Copy engines move the bytes, and streams wait
// for each other's words in memory; what needs a kernel says so.
//
//   Session s = group.begin(rank)            s.all_gather(x, all, bytes)   s.end()
//   group.send(rank, next, x, bytes)         group.receive(rank, previous, y, bytes)
//   group.write_rows(rank, 0, rows, n)       group.fetch_rows(rank, numbers, n, out)
//
// Calls put work on a stream and return; nothing waits for the GPU or allocates, and all of it may
// be captured into a CUDA graph: what ranks say to each other is the same in every replay. Arrays
// are memory of GPUs, or pinned: others are refused, since a copy of them would wait here. Every
// rank makes the same collective calls in the same order. On different streams a rank's sessions,
// its barriers and its tensors to or from one peer still run in the order of the calls: the later
// stream waits for the earlier on the GPU. Replays of graphs with them are put in an order by
// whoever launches them. A wait for a peer that does not come ends by Options::wait, and check()
// then names the peer; what the stream does afterwards is of no use, as is the group until all
// ranks reset() it. A rank's Group and Sessions are single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <crossdock/coll/options.hpp>
#include <crossdock/core/deadline.hpp>
#include <crossdock/symm/group_options.hpp>

namespace crossdock::coll {

class Core;

inline namespace v1 {

// A CUstream of the rank's GPU. Null: the rank's own stream. Ignored on the CPU.
using StreamPtr = void*;

struct GroupOptions {
  // A `place` is where the processes find each other, once: all seats are needed, and there is no
  // reform().
  symm::GroupOptions ranks = {};
  Options coll = {};
};

// Gathers and scatters whose inputs are in the window of the rank until all peers have read them.
// A rank has one session at a time; all ranks make the same calls with the same sizes.
class CROSSDOCK_API Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();  // as end(), silently

  // The place of the next input in the window, of `bytes`: what is written there, on the stream of
  // the session, need not be copied. Given out once.
  Result<void*> input(std::uint64_t bytes);
  // output[world][bytes]: the input of each rank, in memory of this rank's GPU. `input` is memory
  // of the rank, or what input() gave; `bytes` a multiple of 16. No SM.
  Result<> all_gather(const void* input, void* output, std::uint64_t bytes);
  // output[count]: the sum over the ranks of input[rank of this][count], in the order of the ranks,
  // in fp32. input[world][count]; count * size of a value a multiple of 16. Copy engines bring the
  // parts; one kernel adds them up.
  Result<> reduce_scatter(const void* input, void* output, std::uint64_t count, DataType type);
  // Tells the peers that their inputs have been read. Later calls of the session are refused.
  Result<> end();

 private:
  friend class coll::Core;
  friend class Group;
  struct State;
  explicit Session(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class CROSSDOCK_API Group {
 public:
  // Collective among the processes; compiles the kernels or loads them from the cache. Needs a
  // driver for CUDA 11.7 on GPUs.
  static Result<Group> create(const GroupOptions& options);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;
  // The memory goes when the last Session is gone too. Streams have ended by then, or lose their
  // work: what waits for a peer is let go at once, as after a failure. Then the streams that calls
  // were given are waited for, up to Options::wait (at most 10 s) and 2 s more; no others. What is
  // still used after that stays, with a line in the log, until a later group is made or goes and
  // finds it unused. Graphs with calls of the group do not run any more by then.
  ~Group();

  [[nodiscard]] std::uint32_t world() const noexcept;
  [[nodiscard]] std::span<const std::uint32_t> local_ranks() const noexcept;
  [[nodiscard]] const Sizes& memory() const noexcept;

  // Begins a session of the rank: the stream goes on when all peers have read the inputs of the one
  // before. kBusy while another session of the rank has not ended.
  Result<Session> begin(std::uint32_t rank, StreamPtr stream = nullptr);

  // Sends a tensor of at most Options::tensor_bytes, a multiple of 16, to rank `to`, in the order
  // of the calls. It is copied within the rank when less than Options::inflight of them are on
  // their way, and may then be overwritten. Both sides name the same size. No SM.
  Result<> send(std::uint32_t rank, std::uint32_t to, const void* tensor, std::uint64_t bytes,
                StreamPtr stream = nullptr);
  Result<> receive(std::uint32_t rank, std::uint32_t from, void* tensor, std::uint64_t bytes,
                   StreamPtr stream = nullptr);

  // The rank's rows of the table: shard_rows rows, zero at first.
  [[nodiscard]] Result<std::span<std::byte>> shard(std::uint32_t rank) const;
  // Writes `count` dense rows over the rank's rows from `first` on. Collective: when the streams
  // are past it, all ranks have written and fetches see it; fetches from before are over. No SM.
  Result<> write_rows(std::uint32_t rank, std::uint64_t first, const void* rows,
                      std::uint64_t count, StreamPtr stream = nullptr);
  // output[i] = row numbers[i] of the table, zero where that is -1. Row r is that of rank
  // r / shard_rows. A number that the table does not have is an error of check(). Not collective:
  // one kernel on Options::fetch_sms SMs pulls the rows.
  Result<> fetch_rows(std::uint32_t rank, const void* numbers, std::uint32_t count, void* output,
                      StreamPtr stream = nullptr);

  // The stream goes on when the streams of all ranks have come to it. No SM.
  Result<> barrier(std::uint32_t rank, StreamPtr stream = nullptr);

  // Waits for the ranks' own streams, then check().
  Result<> synchronize(Deadline deadline);
  // The first failure of a local rank, naming what was waited for and who is to blame. Never waits.
  [[nodiscard]] Result<> check() const;
  // After a failure: collective, when no work of the group is left on any stream of this process
  // but the ranks' own. Sessions from before are of no use.
  Result<> reset(Deadline deadline);

  // What the library's tools and tests need beside the API.
  [[nodiscard]] coll::Core& core() const noexcept { return *core_; }

 private:
  explicit Group(std::shared_ptr<coll::Core> core);
  std::shared_ptr<coll::Core> core_;
};

}  // namespace v1
}  // namespace crossdock::coll
