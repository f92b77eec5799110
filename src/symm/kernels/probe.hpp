// Host side of the kernels that measure the wire: flag_ping_pong, push_rows and pull_rows.
// Single-owner; the Launcher outlives them. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <vector>

#include <crossdock/layout/probe.cuh>

#include "symm/launch.hpp"

namespace crossdock::symm {

struct FlagPingPongOptions {
  bool release = false;  // release and acquire accesses; false: relaxed, the bare latency
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Round trips of one flag between two ranks.
class FlagPingPong {
 public:
  // `flag`: offset of a 128-byte line of the window that nothing else uses.
  static Result<FlagPingPong> create(Launcher& launcher, u64 flag,
                                     const FlagPingPongOptions& options, Deadline deadline);
  struct Run {
    u32 first = 0;   // serves, and takes the time
    u32 second = 1;  // returns
    u32 rounds = 1;
    u32 start = 0;  // rounds of all runs before, since the last reset
  };
  // On `first` and `second`; other ranks may take part and return at once.
  Result<> launch(const Rank& rank, const Run& run);
  // After synchronize(), on `first`: nanoseconds of all rounds.
  Result<u64> elapsed_ns(const Rank& rank, Deadline deadline) const;

 private:
  struct Buffers {
    u32 rank;
    LocalMemory elapsed;
  };
  FlagPingPong(Launcher& launcher, u64 flag, const FlagPingPongOptions& options,
               Prepared<device::FlagPingPongParams> kernel)
      : launcher_(&launcher), flag_(flag), options_(options), kernel_(std::move(kernel)) {}

  Launcher* launcher_;
  u64 flag_;
  FlagPingPongOptions options_;
  Prepared<device::FlagPingPongParams> kernel_;
  std::vector<Buffers> buffers_;
};

enum class Direction : std::uint8_t { kPush, kPull };

struct MoveRowsOptions {
  Direction direction = Direction::kPush;
  device::MoveRowsConfig config{.warps = 8, .stages = 2};
  u32 row_bytes = 7168;
  u32 max_blocks = 1;
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Offsets in the window: `slots` rows to read, and where they go: a part of `slots` rows for each
// sender. Push and pull can share them.
struct MoveRowsAreas {
  u64 source = 0;
  u64 destination = 0;
  u32 slots = 0;  // of the widest row
};
MoveRowsAreas add_move_rows(device::SymmetricLayout& layout, u32 world, u32 slots, u32 row_bytes);

// Rows to or from peers' windows by bulk copies. Launched on the ranks that move.
class MoveRows {
 public:
  static Result<MoveRows> create(Launcher& launcher, const MoveRowsAreas& areas,
                                 const MoveRowsOptions& options, Deadline deadline);
  struct Run {
    u32 blocks = 1;
    u32 rows_per_warp = 1;
    u32 slots = 1;  // rows of the areas that are used; rows wrap around
    u32 seed = 1;
    u32 peer = device::kNoPeer;  // kNoPeer: a random other rank for each row
  };
  Result<> launch(const Rank& rank, const Run& run);
  // After synchronize(): nanoseconds of the slowest of the first `blocks` blocks.
  Result<u64> elapsed_ns(const Rank& rank, u32 blocks, Deadline deadline) const;
  [[nodiscard]] u64 bytes_of(const Run& run) const {
    return u64{run.blocks} * options_.config.warps * run.rows_per_warp * options_.row_bytes;
  }
  [[nodiscard]] const MoveRowsOptions& options() const { return options_; }
  [[nodiscard]] device::MoveRowsParams params(const Rank& rank, const Run& run) const;

 private:
  struct Buffers {
    u32 rank;
    LocalMemory elapsed;
  };
  MoveRows(Launcher& launcher, const MoveRowsAreas& areas, const MoveRowsOptions& options,
           Prepared<device::MoveRowsParams> kernel)
      : launcher_(&launcher), areas_(areas), options_(options), kernel_(std::move(kernel)) {}

  Launcher* launcher_;
  MoveRowsAreas areas_;
  MoveRowsOptions options_;
  Prepared<device::MoveRowsParams> kernel_;
  std::vector<Buffers> buffers_;
};

}  // namespace crossdock::symm
