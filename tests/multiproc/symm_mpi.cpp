// A symmetric group whose processes meet by MPI: `mpirun -n N symm_mpi`. Every rank is a process
// with a window in host memory; each writes a word into every window and checks its own. Then they
// disagree about the size on purpose, and all of them have to hear of it.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <mpi.h>

#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

// MPI has no deadlines of its own; the launcher ends a job of which a process has died.
Result<> gather(const void* send, void* receive, std::size_t bytes, Deadline) {
  const int count = static_cast<int>(bytes);
  if (MPI_Allgather(send, count, MPI_BYTE, receive, count, MPI_BYTE, MPI_COMM_WORLD) != MPI_SUCCESS)
    return make_error(Code::kPeerLost, "MPI_Allgather failed");
  return {};
}

Result<std::unique_ptr<Group>> make_group(u32 rank, u32 world, u64 bytes) {
  CROSSDOCK_TRY(exchange, make_fixed_exchange({rank, world}, gather));
  device::SymmetricLayout layout;
  (void)layout.add("data", bytes);
  const GroupOptions options{.world = world,
                             .ranks = {{.rank = rank}},
                             .backend = Backend::kCpu,
                             .exchange = std::move(exchange)};
  return Group::create(options, layout);
}

Result<> words_arrive(u32 rank, u32 world) {
  CROSSDOCK_TRY(group, make_group(rank, world, 8 * world));
  const auto soon = Deadline::in(std::chrono::seconds(30));
  Rank& mine = group->rank(rank);
  for (u32 peer = 0; peer < world; ++peer) {
    const u64 word = 1000 * rank + peer + 1;
    CROSSDOCK_CHECK_OK(mine.write(mine.at<u64>(8 * rank, peer), &word, sizeof word, soon));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (u32 peer = 0; peer < world; ++peer) {
    u64 word = 0;
    CROSSDOCK_CHECK_OK(mine.read(&word, mine.at<u64>(8 * peer), sizeof word, soon));
    if (word != 1000 * peer + rank + 1)
      return make_error(Code::kCorrupt,
                        "rank " + std::to_string(peer) + " wrote " + std::to_string(word));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  return {};
}

Result<> disagreement_is_told(u32 rank, u32 world) {
  const auto group = make_group(rank, world, rank == 0 ? 8192 : 4096);
  if (group.code() == Code::kIncompatible) return {};
  return make_error(Code::kInternal, group.ok() ? "ranks of different sizes made a group"
                                                : group.error().describe());
}

int run() {
  int rank = 0, world = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  auto done = words_arrive(static_cast<u32>(rank), static_cast<u32>(world));
  if (done.ok() && world > 1)
    done = disagreement_is_told(static_cast<u32>(rank), static_cast<u32>(world));
  if (!done.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, done.error().describe().c_str());
  return done.ok() ? 0 : 1;
}

}  // namespace
}  // namespace crossdock::symm

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int code = crossdock::symm::run();
  MPI_Finalize();
  return code;
}
