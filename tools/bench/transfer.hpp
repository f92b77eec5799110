// What `crossdock bench transfer` measures, as plain types shared by its parts: the options, one
// case, one result. The parts: transfer.cpp (command line, order of cases), transfer_run.cpp (the
// engine), ceilings.cpp (memcpy, process_vm_writev, plain sockets), transfer_report.cpp (text and
// JSON).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/transfer/engine.hpp>

namespace crossdock::tools::bench {

struct TransferBench {
  std::string transport = "shm";
  std::string op = "write";
  std::vector<std::string> blocks;  // empty: 64KiB 256KiB 1MiB 4MiB
  std::uint64_t batch = 0;          // requests a batch; 0: all that fit --bytes
  std::uint64_t bytes = std::uint64_t{512} << 20;
  std::uint32_t threads = 1;
  std::uint32_t repeat = 5;
  bool engine_memory = true;  // false: memory the caller allocated and registered
  bool scattered = false;     // blocks in random order on both sides
  bool suite = false;         // every case of the README's table
  bool json = false;
  std::string vs;
  std::string versus_home;  // folder of the peer's Python environment; empty: below .cache/
  std::chrono::nanoseconds versus_timeout = std::chrono::minutes(2);  // of its install, of each run
  std::string role;  // two hosts: "target" or "initiator"
  std::string peer;
  std::string listen;
};

struct Case {
  std::string name = {};
  std::string transport = {};
  transfer::Op op = transfer::Op::kWrite;
  std::uint64_t block_bytes = 1 << 20;
  std::uint64_t count = 0;  // requests in all
  std::uint64_t batch = 0;  // 0: one batch a thread
  std::uint32_t threads = 1;
  bool engine_memory = true;
  bool scattered = false;
};

struct Measurement {
  std::string name = {};
  double gb_per_s = 0;      // 1e9 bytes; median of the repeats
  double cpu_s_per_gb = 0;  // both processes; beside a remote target the initiator alone
  double p50_us = 0;        // latencies only
  double p99_us = 0;
  double value = 0;  // anything else, with its unit
  std::string unit = {};
  std::string refused = {};        // what a peer answered instead
  std::string ceiling = {};        // name of the measurement it is compared with
  double ratio = 0;                // to the ceiling
  std::vector<double> rates = {};  // GB/s of each round
};

struct Scratch {
  std::uint64_t bytes = 0;
  std::uint32_t repeat = 5;
};

// How long a child process may take for its memory before it says where it is: a loaded machine
// fills some 100 MB a second.
inline std::chrono::milliseconds start_patience(std::uint64_t bytes) {
  return std::chrono::seconds(10 + std::min<std::uint64_t>(bytes / 100'000'000, 3600));
}
Error not_started(std::uint64_t bytes);

// --- ceilings.cpp: what the machine gives without us ---
// The better of one call for everything and a call a MiB: the library's choice of instructions
// depends on the length of a call.
Result<Measurement> measure_memcpy(const Scratch& scratch);
// Pages in random order on both sides: what scattered pages cost whoever copies them, the kernel
// too.
Result<Measurement> measure_page_memcpy(const Scratch& scratch);
Result<Measurement> measure_vm_writev(const Scratch& scratch, std::uint64_t block_bytes);
Result<Measurement> measure_socket_stream(const Scratch& scratch);
// What two wake-ups and four passes through the socket layer take, no matter who asks for them.
Result<Measurement> measure_socket_ping_pong(std::uint32_t operations);
// The child's end of the last three. Line protocol on stdin and stdout.
int run_ceiling_child(const std::string& kind, std::uint64_t bytes);

// --- transfer_run.cpp: the engine ---
// One engine here, one in a child process (or a remote target), memory of `bytes` on both sides.
class Rig {
 public:
  static Result<Rig> create(const Case& shape, std::uint64_t bytes, const std::string& remote_peer);
  Rig(Rig&&) noexcept;
  ~Rig();
  // Medians of `repeat` rounds, each of which runs every case once, and before them the ceiling, if
  // there is one: what else happens on the machine then meets all of them. `ratio` is the median of
  // each round's share of its ceiling.
  using Ceiling = std::function<Result<Measurement>()>;
  Result<std::vector<Measurement>> throughput(std::span<const Case> cases, std::uint32_t repeat,
                                              const Ceiling& ceiling);
  // Synchronous operations of one small block.
  Result<Measurement> latency(const Case& shape, std::uint32_t operations);
  // Slices a second through submit and completion, 64 B of each block.
  Result<Measurement> submission(const Case& shape, std::uint32_t repeat);

 private:
  struct Impl;
  explicit Rig(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};
Result<Measurement> measure_submission(std::uint32_t repeat);
Result<Measurement> measure_registration(std::uint32_t repeat);
Result<Measurement> measure_creation(std::uint32_t repeat);
// The target's end: an engine with one region, until stdin ends.
int run_target(const TransferBench& options);

// --- versus.cpp: writes of the same cases by Mooncake's engine over TCP, both its modes. A case
// that it refuses has its answer in `refused` and no figure.
Result<> measure_mooncake(const TransferBench& options, const std::vector<Case>& cases,
                          std::vector<Measurement>& results);

// --- transfer_report.cpp ---
void print_report(const TransferBench& options, const std::vector<Measurement>& results);

}  // namespace crossdock::tools::bench
