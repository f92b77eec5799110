// The steps of the suite that move rows. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "symm/copy.hpp"
#include "symm/kernels/suite.hpp"
#include "symm/kernels/suite_data.hpp"

namespace crossdock::symm {
namespace {

// A row in the memory of a rank, and what it should hold.
struct RowCheck {
  const char* step;
  u32 at;    // the rank that has it
  u32 from;  // the rank it is from
  u32 row;
  bool written;  // else it must be untouched
  u32 seed;

  Result<> compare(const u32* got, u32 words) const {
    for (u32 i = 0; i < words; ++i) {
      const u32 want = written ? suite_word(seed, from, row, i) : kUntouchedWord;
      if (got[i] == want) continue;
      return make_error(
          Code::kInternal,
          fmt::format(
              "{}: word {} of row {} from rank {} is {:#x} at rank {}; it should be {:#x}{}", step,
              i, row, from, got[i], at, want, written ? "" : ", untouched"));
    }
    return {};
  }
};

// ---- ring_all_to_all ----

struct RingBuffers {
  u32 rank;
  LocalMemory input, output, send_rows, receive_rows;
};

// None for some pairs, all for others.
u32 rows_between(const SuiteShape& shape, u32 seed, u32 from, u32 to) {
  const u32 value = device::mix(from * 131 + to + seed * 65537) % (shape.ring_rows + 4);
  if (value < shape.ring_rows) return value;
  return value == shape.ring_rows ? 0 : shape.ring_rows;
}

// Rows of one pair have numbers that no other pair's rows have.
u32 row_number(const SuiteShape& shape, u32 to, u32 row) {
  return to * shape.ring_rows + row;
}

Result<RingBuffers> make_ring_buffers(Rank& rank, const SuiteShape& shape, u32 seed,
                                      Deadline deadline) {
  const u32 words = shape.row_bytes / 4;
  const u64 rows = u64{rank.world()} * shape.ring_rows;
  std::vector<u32> input(rows * words);
  std::vector<u32> send(rank.world());
  std::vector<u32> receive(rank.world());
  for (u32 peer = 0; peer < rank.world(); ++peer) {
    send[peer] = rows_between(shape, seed, rank.rank(), peer);
    receive[peer] = rows_between(shape, seed, peer, rank.rank());
    for (u32 row = 0; row < shape.ring_rows; ++row) {
      const u32 number = row_number(shape, peer, row);
      for (u32 i = 0; i < words; ++i)
        input[u64{number} * words + i] = suite_word(seed, rank.rank(), number, i);
    }
  }
  const std::vector<u8> empty(rows * shape.row_bytes, kUntouched);
  RingBuffers b{
      .rank = rank.rank(), .input = {}, .output = {}, .send_rows = {}, .receive_rows = {}};
  CROSSDOCK_TRY(in, rank.allocate(rows * shape.row_bytes));
  CROSSDOCK_TRY(out, rank.allocate(rows * shape.row_bytes));
  CROSSDOCK_TRY(send_rows, rank.allocate(send.size() * sizeof(u32)));
  CROSSDOCK_TRY(receive_rows, rank.allocate(receive.size() * sizeof(u32)));
  CROSSDOCK_CHECK_OK(upload(rank, in.as<u32>(), input, deadline));
  CROSSDOCK_CHECK_OK(upload(rank, out.as<u8>(), empty, deadline));
  CROSSDOCK_CHECK_OK(upload(rank, send_rows.as<u32>(), send, deadline));
  CROSSDOCK_CHECK_OK(upload(rank, receive_rows.as<u32>(), receive, deadline));
  b.input = std::move(in);
  b.output = std::move(out);
  b.send_rows = std::move(send_rows);
  b.receive_rows = std::move(receive_rows);
  return b;
}

Result<> check_ring(const Rank& rank, const RingBuffers& b, const SuiteShape& shape, u32 seed,
                    Deadline deadline) {
  const u32 words = shape.row_bytes / 4;
  const u64 rows = u64{rank.world()} * shape.ring_rows;
  CROSSDOCK_TRY(got, download(rank, b.output.as<u32>(), rows * words, deadline));
  for (u32 from = 0; from < rank.world(); ++from)
    for (u32 row = 0; row < shape.ring_rows; ++row) {
      const RowCheck check{.step = "ring_all_to_all",
                           .at = rank.rank(),
                           .from = from,
                           .row = row_number(shape, rank.rank(), row),
                           .written = row < rows_between(shape, seed, from, rank.rank()),
                           .seed = seed};
      const u64 place = u64{from} * shape.ring_rows + row;
      CROSSDOCK_CHECK_OK(check.compare(got.data() + place * words, words));
    }
  return {};
}

}  // namespace

// Two launches, so that rings go on where the last launch left them.
Result<> Suite::ring_all_to_all(Deadline deadline) {
  for (int launch = 0; launch < 2; ++launch) {
    const u32 seed = ++seed_;
    std::vector<RingBuffers> buffers;
    for (const u32 r : group().local_ranks()) {
      CROSSDOCK_TRY(made, make_ring_buffers(group().rank(r), shape_, seed, deadline));
      buffers.push_back(std::move(made));
    }
    for (const RingBuffers& b : buffers)
      CROSSDOCK_CHECK_OK(
          ring_.launch(group().rank(b.rank), {.input = b.input.as<u8>(),
                                              .output = b.output.as<u8>(),
                                              .send_rows = b.send_rows.as<u32>(),
                                              .receive_rows = b.receive_rows.as<u32>(),
                                              .max_rows = shape_.ring_rows}));
    CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
    for (const RingBuffers& b : buffers)
      CROSSDOCK_CHECK_OK(check_ring(group().rank(b.rank), b, shape_, seed, deadline));
  }
  return {};
}

// ---- push_rows, pull_rows ----

Result<> Suite::fill_rows(Rank& rank, Deadline deadline) const {
  const u32 words = shape_.row_bytes / 4;
  const u32 rows = suite_rows(shape_);
  std::vector<u32> source(u64{rows} * words);
  for (u32 row = 0; row < rows; ++row)
    for (u32 i = 0; i < words; ++i)
      source[u64{row} * words + i] = suite_word(seed_, rank.rank(), row, i);
  CROSSDOCK_CHECK_OK(upload(rank, rank.at<u32>(areas_.rows.source), source, deadline));
  const std::vector<u8> empty(u64{rank.world()} * rows * shape_.row_bytes, kUntouched);
  return upload(rank, rank.at<u8>(areas_.rows.destination), empty, deadline);
}

Result<> Suite::check_pushed(const Rank& rank, const MoveRows::Run& run, Deadline deadline) const {
  const u32 words = shape_.row_bytes / 4;
  const u32 rows = suite_rows(shape_);
  CROSSDOCK_TRY(got, download(rank, rank.at<u32>(areas_.rows.destination),
                              u64{rank.world()} * rows * words, deadline));
  for (u32 from = 0; from < rank.world(); ++from) {
    // As the sender computed it.
    device::MoveRowsParams p{};
    p.view.rank = from;
    p.view.world = rank.world();
    p.seed = run.seed;
    p.fixed_peer = run.peer;
    for (u32 row = 0; row < rows; ++row) {
      const RowCheck check{.step = "push_rows",
                           .at = rank.rank(),
                           .from = from,
                           .row = row,
                           .written = device::row_peer(p, row) == rank.rank(),
                           .seed = seed_};
      CROSSDOCK_CHECK_OK(check.compare(got.data() + (u64{from} * rows + row) * words, words));
    }
  }
  return {};
}

Result<> Suite::check_pulled(const Rank& rank, const MoveRows::Run& run, Deadline deadline) const {
  const u32 words = shape_.row_bytes / 4;
  const u32 rows = suite_rows(shape_);
  CROSSDOCK_TRY(got,
                download(rank, rank.at<u32>(areas_.rows.destination), u64{rows} * words, deadline));
  const device::MoveRowsParams p = pull_.params(rank, run);
  for (u32 row = 0; row < rows; ++row) {
    const RowCheck check{.step = "pull_rows",
                         .at = rank.rank(),
                         .from = device::row_peer(p, row),
                         .row = row,
                         .written = true,
                         .seed = seed_};
    CROSSDOCK_CHECK_OK(check.compare(got.data() + u64{row} * words, words));
  }
  return {};
}

// Windows are filled by the host, then all ranks meet, move, and meet again before anybody looks.
Result<> Suite::move_rows(MoveRows& kernel, Deadline deadline) {
  ++seed_;
  const bool push = kernel.options().direction == Direction::kPush;
  const MoveRows::Run run{.blocks = shape_.move_blocks,
                          .rows_per_warp = shape_.rows_per_warp,
                          .slots = suite_rows(shape_),
                          .seed = seed_};
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(fill_rows(group().rank(r), deadline));
  CROSSDOCK_CHECK_OK(meet());
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(kernel.launch(group().rank(r), run));
  CROSSDOCK_CHECK_OK(meet());
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(push ? check_pushed(group().rank(r), run, deadline)
                            : check_pulled(group().rank(r), run, deadline));
  return {};
}

Result<> Suite::push_rows(Deadline deadline) {
  return move_rows(push_, deadline);
}

Result<> Suite::pull_rows(Deadline deadline) {
  return move_rows(pull_, deadline);
}

}  // namespace crossdock::symm
