// What `crossdock bench ep` is told, shared by its parts: ep.cpp (command line and order),
// ep_rig.cpp (tokens, and whether what arrived is right), ep_run.cpp, ep_few.cpp, ep_layouts.cpp
// and ep_compressed.cpp (times), ep_beside.cpp (a product on the other multiprocessors),
// ep_wire.cpp and ep_known.hpp (what times are compared with).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <crossdock/ep/group.hpp>

#include "bench/ep_wire.hpp"
#include "bench/figures.hpp"
#include "bench/processes.hpp"
#include "ep/core.hpp"

namespace crossdock::tools::bench {

enum class EpPayload { kFp8, kCast, kBf16 };
const char* name_of(EpPayload payload);

struct EpBench {
  std::string backend = "gpu";
  std::uint32_t world = 0;  // 0: all GPUs; 4 in the twin
  std::vector<std::uint32_t> tokens = {4096, 128};
  // On the path for few tokens, in groups of their own; none with {0}.
  std::vector<std::uint32_t> small_tokens = {1, 8, 32, 128, 256};
  std::uint32_t small_sms = 0;          // 0: the library's choice
  std::uint32_t small_combine_sms = 0;  // 0: the library's choice
  bool small_packets = true;
  bool compressed = false;  // combines with compressed rows too, and from sums by expert
  bool masks = false;       // groups that may mask ranks too
  // With `expanded`: Options::small_expand_sms.
  std::uint32_t small_expand_sms = 32;
  bool only_small = false;
  std::uint32_t hidden = 7168;
  std::uint32_t experts = 256;
  std::uint32_t top_k = 8;
  // 0: the library's choice. The first gives the figures their plain names.
  std::vector<std::uint32_t> sms = {0, 8, 16, 24};
  bool skewed = false;    // choices by a Zipf law instead of evenly
  bool push = false;      // combine by push too
  bool expanded = false;  // dispatch into the expanded layout too, and combine from it
  // Options::expand_sms there, each in its group; 0: kAutoSms.
  std::vector<std::uint32_t> expand_sms = {0};
  bool beside_gemm = false;  // dispatch and combine beside a product on the other SMs too
  bool overlap = false;      // Options::overlap_launches
  bool host_counts = true;
  std::uint32_t repeat = 5;
  std::chrono::nanoseconds timeout = std::chrono::seconds(240);
  FigureOutput output = {};
  std::optional<std::uint32_t> rank;  // several processes, one rank each
  std::optional<std::uint32_t> device;
  std::optional<std::uint32_t> local_rank = {};
  std::string store;
  std::string name = "bench-ep";

  [[nodiscard]] ProcessOptions process() const { return {rank, world, device, store, local_rank}; }
};

// Tokens of every rank, made from its number; the same in every process.
struct EpTokensOfRank {
  std::vector<std::uint8_t> rows;    // bf16; FP8 takes the first half of each row as bytes
  std::vector<std::uint8_t> scales;  // for FP8
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// One group with tokens in place, for one number of tokens and of SMs.
class EpBenchRig {
 public:
  struct Shape {
    std::uint32_t tokens = 0;
    std::uint32_t sms = 0;
    bool push = false;
    bool small = false;
    std::uint32_t expand_sms = 0;  // of few tokens: Options::small_expand_sms
    bool masks = false;
    EpWire* wire = nullptr;  // what times are compared with; null: nothing
  };
  static Result<EpBenchRig> create(const EpBench& options, const symm::GroupOptions& ranks,
                                   const Shape& shape);

  [[nodiscard]] ep::Group& group() { return group_; }
  [[nodiscard]] symm::Rank& rank(std::uint32_t r) { return group_.core().group().rank(r); }
  [[nodiscard]] ep::Tokens tokens(std::uint32_t r, EpPayload payload);
  [[nodiscard]] ep::Combined combined(std::uint32_t r);
  // Of few tokens in halves: the first and at once the second.
  Result<ep::Handle> dispatch(std::uint32_t r, EpPayload payload, bool halves);
  Result<> combine(const ep::Handle& handle, bool halves);
  // Dispatch of each payload and a combine, everything that arrived compared; wrong is kInternal.
  Result<> verify(Deadline deadline, bool halves = false);
  // Rows that come back as they were sent, compressed: no further off than `error` of a value.
  Result<> verify_payload(ep::Payload payload, double error, Deadline deadline);

  // Bytes that a rank receives of a payload, on average; `off_rank`: from other ranks only.
  [[nodiscard]] double received_bytes(EpPayload payload, bool off_rank) const;
  [[nodiscard]] std::uint32_t count() const { return shape_.tokens; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  // Places of an expert begin at a multiple of it (Options::expert_alignment).
  [[nodiscard]] std::uint32_t alignment() const;
  [[nodiscard]] const EpTokensOfRank& sent(std::uint32_t rank) const { return all_[rank]; }

 private:
  struct Memory {
    std::uint32_t rank = 0;
    symm::LocalMemory rows, scales, ids, weights, combined;
  };
  EpBenchRig(const EpBench& options, ep::Group group, const Shape& shape)
      : options_(options), group_(std::move(group)), shape_(shape), count_(shape.tokens) {}
  Memory& of(std::uint32_t r);
  [[nodiscard]] bool goes_to(std::uint32_t source, std::uint32_t token,
                             std::uint32_t destination) const;
  Result<> upload_all(Deadline deadline);
  Result<std::uint32_t> rows_of(const ep::Handle& handle, Deadline deadline);
  Result<> check_rows(const ep::Handle& handle, EpPayload payload, Deadline deadline);
  Result<> give_back(const ep::Handle& handle, Deadline deadline);
  Result<> check_combined(std::uint32_t r, Deadline deadline);

  EpBench options_;
  ep::Group group_;
  Shape shape_;
  std::uint32_t count_;              // of tokens
  std::vector<EpTokensOfRank> all_;  // by rank
  std::vector<Memory> memory_;
};

// What a period is of: the name without "_us", and what crosses the link, if it is one call.
struct EpTimed {
  std::string operation;
  std::string suffix;
  std::optional<EpPayload> payload;
};
// With what it is compared with, and its aim.
Result<Figure> ep_time(EpBenchRig& rig, const EpBench& options, const EpTimed& of, double us);

// Times on GPUs. `suffix` is appended to the names: "_8sm".
Result<> measure_ep(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                    std::vector<Figure>& figures, Deadline deadline);
// Of a rig for few tokens: dispatch and combine, whole and in halves, and both in turns.
Result<> measure_small(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline);
// Of such a rig whose group may mask ranks; nobody is masked.
Result<> measure_masks(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline);
// Of such a rig with compressed rows: combines of each format.
Result<> measure_compressed(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                            std::vector<Figure>& figures, Deadline deadline);
// Of a rig that pushes: combine alone, as "combine_push_bf16".
Result<> measure_push(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                      std::vector<Figure>& figures, Deadline deadline);

// Dispatch, lists and copies one after the other, and combine from the copies.
Result<> measure_layouts(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                         std::vector<Figure>& figures, Deadline deadline);
// Dispatch with copies, by itself or after it, compared with what was sent.
Result<> verify_expanded(EpBenchRig& rig, const EpBench& options, bool beside, Deadline deadline);
// Of a rig with expand_sms: dispatch with copies beside it, and without.
Result<> measure_expanded(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                          std::vector<Figure>& figures, Deadline deadline);
Result<> measure_beside(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                        std::vector<Figure>& figures, Deadline deadline);

}  // namespace crossdock::tools::bench
