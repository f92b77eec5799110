// Preparation of weights in the memory of a rank, by the kernel prepare_weights. See
// crossdock/moe/weights.hpp. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <crossdock/moe/weights.hpp>

#include "moe/gemm_core.hpp"
#include "moe/weight_kernel.hpp"
#include "moe/weight_matrix.hpp"
#include "symm/copy.hpp"
#include "symm/pointers.hpp"

namespace crossdock::moe {
inline namespace v1 {

struct PreparedWeights::Memory {
  std::shared_ptr<void> keeper;  // of the rank
  symm::LocalMemory gate_up = {}, gate_up_scales = {}, down = {}, down_scales = {};
};

}  // namespace v1

namespace {

// 16 bytes at a time are read.
Result<> check_alignment(const PlainWeights& plain) {
  const auto wrong = [](const void* p, u64 alignment) {
    return reinterpret_cast<std::uintptr_t>(p) % alignment != 0;
  };
  if (!wrong(plain.gate_up, 16) && !wrong(plain.down, 16) && !wrong(plain.gate_up_scales, 4) &&
      !wrong(plain.down_scales, 4))
    return {};
  return invalid_argument(fmt::format(
      "moe weights: gate_up at {} and down at {} must lie on multiples of 16 bytes, and "
      "their scales at {} and {} on multiples of 4",
      plain.gate_up, plain.down, plain.gate_up_scales, plain.down_scales));
}

// A kernel follows them.
Result<> check_there(const symm::Rank& rank, const PlainWeights& plain) {
  for (const auto& [p, what] : {std::pair{plain.gate_up, "gate_up"}, std::pair{plain.down, "down"},
                                std::pair{plain.gate_up_scales, "scales of gate_up"},
                                std::pair{plain.down_scales, "scales of down"}})
    CROSSDOCK_CHECK_OK(symm::check_pointer(rank, {"moe", "prepare_weights", p, what}));
  return {};
}

class Preparation {
 public:
  Preparation(GemmCore& core, symm::Rank& rank, Deadline deadline)
      : core_(core), rank_(rank), deadline_(deadline) {}

  Result<> begin() {
    CROSSDOCK_TRY(words, rank_.allocate(2 * sizeof(u64)));
    words_ = std::move(words);
    return {};
  }
  // Groups that are not exact.
  Result<u64> run(const NamedMatrix& m) {
    const std::vector<u64> fresh{~u64{0}, 0};
    CROSSDOCK_CHECK_OK(symm::upload(rank_, words_.as<u64>(), fresh, deadline_));
    CROSSDOCK_CHECK_OK(core_.prepare_weights(rank_, m.matrix, words_.as<u64>(), deadline_));
    CROSSDOCK_TRY(seen, symm::download(rank_, words_.as<u64>(), 2, deadline_));
    if (seen[0] == ~u64{0}) return seen[1];
    return weight_flaw_error(m, seen[0], [&](void* to, const u8* from, u64 bytes) {
      return rank_.read(to, from, bytes, deadline_);
    });
  }

 private:
  GemmCore& core_;
  symm::Rank& rank_;
  Deadline deadline_;
  symm::LocalMemory words_;
};

}  // namespace

inline namespace v1 {

PreparedWeights::PreparedWeights(const WeightLayout& layout, std::unique_ptr<Memory> memory)
    : layout_(layout), memory_(std::move(memory)) {}
PreparedWeights::PreparedWeights(PreparedWeights&&) noexcept = default;
PreparedWeights& PreparedWeights::operator=(PreparedWeights&&) noexcept = default;
PreparedWeights::~PreparedWeights() = default;

WeightsView PreparedWeights::view() const noexcept {
  const bool scaled = layout_.format != Format::kBf16;
  return {.layout = layout_,
          .gate_up = memory_->gate_up.address(),
          .gate_up_scales = scaled ? memory_->gate_up_scales.address() : nullptr,
          .down = memory_->down.address(),
          .down_scales = scaled ? memory_->down_scales.address() : nullptr};
}

Result<PreparedWeights> Weights::prepare(Gemm& gemm, std::uint32_t rank, const PlainWeights& plain,
                                         const PrepareOptions& options, Deadline deadline) {
  GemmCore& core = gemm.core();
  return prepare(core, core.shared_from_this(), rank, plain, options, deadline);
}

Result<PreparedWeights> Weights::prepare(GemmCore& core, std::shared_ptr<void> keeper,
                                         std::uint32_t rank, const PlainWeights& plain,
                                         const PrepareOptions& options, Deadline deadline) {
  const WeightLayout layout = layout_of(plain, options);
  CROSSDOCK_TRY(sizes, weight_sizes(layout));
  CROSSDOCK_CHECK_OK(check_plain(plain, layout));
  CROSSDOCK_CHECK_OK(check_alignment(plain));
  const auto ranks = core.group().local_ranks();
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
    return invalid_argument(fmt::format(
        "moe weights: rank {} is not one of the {} ranks of this process", rank, ranks.size()));
  symm::Rank& on = core.group().rank(rank);
  CROSSDOCK_CHECK_OK(check_there(on, plain));
  auto memory = std::make_unique<PreparedWeights::Memory>();
  memory->keeper = std::move(keeper);
  const u64 scale = sizes.scale_bytes;
  using Part = std::pair<symm::LocalMemory*, u64>;
  for (const auto& [part, bytes] : {Part{&memory->gate_up, sizes.gate_up_bytes},
                                    Part{&memory->gate_up_scales, sizes.gate_up_scales * scale},
                                    Part{&memory->down, sizes.down_bytes},
                                    Part{&memory->down_scales, sizes.down_scales * scale}}) {
    if (bytes == 0) continue;
    CROSSDOCK_TRY(made, on.allocate(bytes));
    *part = std::move(made);
  }
  PreparedWeights out(layout, std::move(memory));
  Preparation work(core, on, deadline);
  CROSSDOCK_CHECK_OK(work.begin());
  for (const NamedMatrix& m : weight_matrices(plain, out.view())) {
    CROSSDOCK_TRY(inexact, work.run(m));
    out.report_.inexact_groups += inexact;
  }
  out.report_.groups = folded_groups(plain, layout);
  return out;
}

}  // namespace v1
}  // namespace crossdock::moe
