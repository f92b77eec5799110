// The prefill/decode demo: what its processes share. The command starts two worker processes, one
// that plays prefill and one that plays decode, and watches them over a socket each:
//
//   crossdock demo pd ──spawn──> prefill worker ═══ KV pages (engine) ═══> decode worker
//          ^                         │  events                                 │  events
//          └─────────────────────────┴─────────────────────────────────────────┘
//
// Values only; each file of this folder says which process it runs in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <crossdock/kv/model_shape.hpp>
#include <crossdock/kv/page_layout.hpp>
#include <crossdock/kv/sender.hpp>

namespace crossdock::tools::pd {

inline constexpr std::uint32_t kHashTokens = 512;  // of one prefix hash in the trace

enum class Fault : std::uint8_t { kNone, kKillPrefill, kKillDecode, kStopPrefill };

struct Options {
  std::string transport = "auto";
  std::string trace;  // file; empty: the excerpt shipped with the command
  std::string model = "qwen3-30b-a3b";
  std::string kv_shape;  // overrides model
  std::string order = "layer-first";
  std::string mode = "both";
  std::string fault = "none";
  std::string timeline;  // file to write
  std::uint32_t requests = 16;
  std::uint32_t tokens = 0;  // > 0: synthetic requests of that length
  std::uint32_t page_tokens = 16;
  double prefill_tokens_per_s = 0;  // 0: measured at the start so that the link keeps up
  std::uint64_t memory_bytes = 0;   // both pools together; 0: from the machine
  std::uint32_t timeout_s = 30;     // of one request
  bool json = false;

  // Of the hidden worker command.
  std::string role;
  int event_fd = -1;
  std::uint64_t pool_bytes = 0;
  std::uint32_t limit_pages = 0;  // requests longer than this are skipped
};

// One request to play.
struct Job {
  std::uint64_t id = 0;  // line of the trace, or number of the synthetic request
  std::uint32_t num_tokens = 0;
  std::vector<std::uint64_t> hashes;  // one for each started block of kHashTokens

  [[nodiscard]] std::uint32_t num_pages(std::uint32_t page_tokens) const {
    return (num_tokens + page_tokens - 1) / page_tokens;
  }
};

// What a worker tells the command, and the command a worker. Fixed size: one message of a
// SOCK_SEQPACKET socket between processes of the same executable.
struct Event {
  enum class Kind : std::uint32_t {
    kHello,          // worker: text = name of its engine
    kStart,          // command: text = name of the peer, value = prefill rate or 0
    kCalibrated,     // prefill: value = tokens a second that it will keep to
    kComputeBegin,   // prefill
    kLayerComputed,  // prefill: layer
    kPrefillDone,    // prefill
    kSent,           // prefill: the request is over there; text = error
    kLayerArrived,   // decode: layer
    kComplete,       // decode: every page is there
    kVerified,       // decode: bytes, pages; text = first mismatch
    kFailed,         // decode: text = error
    kPool,           // any: pages in_use | quarantined << 32 in `pages`, total in `bytes`
    kSummary,        // any: bytes moved, value = CPU seconds, pages = pages shared instead of sent
    kFatal,          // any: the worker gives up; text = why
  };
  Kind kind = Kind::kHello;
  std::uint32_t layer = 0;
  std::uint64_t request = 0;
  std::uint64_t time_ns = 0;  // CLOCK_MONOTONIC, the same for all processes of a host
  std::uint64_t bytes = 0;
  std::uint64_t pages = 0;
  double value = 0;
  char text[472] = {};
};
static_assert(sizeof(Event) == 520);

// The parts that both workers and the command derive from the options.
struct Plan {
  kv::ModelShape shape;
  kv::LayoutOptions layout;  // of the worker's pool
  std::vector<Job> jobs;
  std::uint32_t skipped = 0;  // requests of the trace that are longer than the smaller pool
};

// Any process; the workers and the command get the same jobs.
Result<Plan> make_plan(const Options& options);
// A page has a whole share of a prefix block.
Result<> check_page_tokens(const Options& options);
// The number of pages that fit into a pool of `pool_bytes`.
Result<std::uint32_t> pages_that_fit(const Options& options, std::uint64_t pool_bytes);

// Each runs a whole worker process and returns its exit code.
int run_prefill(const Options& options);
int run_decode(const Options& options);

}  // namespace crossdock::tools::pd
