// GemmCore: what moe::Gemm is made of: the ranks, the kernels that were prepared, and how a call
// becomes a launch. Also used over a launcher that somebody else owns, such as that of an
// expert-parallel group. Threads of different ranks may prepare and run at the same time; a rank is
// single-owner, and so is all else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include <crossdock/layout/weights.cuh>
#include <crossdock/moe/grouped_gemm.hpp>

#include "cuda/stream.hpp"
#include "jit/jit.hpp"
#include "moe/variants.hpp"
#include "symm/group.hpp"
#include "symm/launch.hpp"

namespace crossdock::moe {

class GemmCore : public std::enable_shared_from_this<GemmCore> {
 public:
  struct Settings {
    u32 sms = 0;
    std::chrono::nanoseconds wait{std::chrono::seconds(2)};
  };
  static Result<std::shared_ptr<GemmCore>> create(const GemmOptions& options);
  // On ranks of another engine; its launcher outlives the core.
  static std::shared_ptr<GemmCore> over(symm::Launcher& launcher, const Settings& settings);

  Result<> prepare(const GemmCall& like, Deadline deadline);
  // Whether the call takes the kernel that is best for it, not just one that does.
  [[nodiscard]] bool prepared_best(const GemmCall& call) const;
  // `blocks`: of this launch; 0: of the settings.
  Result<> run(u32 rank, const GemmCall& call, StreamPtr stream, u32 blocks = 0);

  // Prepares one matrix of weights on the rank and waits for the rank's own stream. `words`: two
  // u64 of the rank, the smallest flaw and the number of groups that are not exact, see
  // PrepareWeightsParams. Compiles or loads the kernel at the first call.
  Result<> prepare_weights(const symm::Rank& rank, const device::WeightMatrix& matrix, u64* words,
                           Deadline deadline);

  // Memory of [multiprocessors] u64 of every rank that runs: cycles of each block; null: not
  // wanted.
  void count_cycles(u64* cycles) { cycles_ = cycles; }
  // GroupedGemmConfig::hand_over of what is prepared and run from here on, where tiles of 128 rows
  // of e4m3 are taken; nullopt: the library's choice. For benches and tests.
  void hand_over(std::optional<bool> whether) { hand_over_ = whether; }

  [[nodiscard]] symm::Group& group() const { return launcher_->group(); }
  [[nodiscard]] symm::Launcher& launcher() { return *launcher_; }

 private:
  struct Variant {
    device::GroupedGemmConfig config;
    symm::Prepared<device::GroupedGemmParams> kernel;
  };
  explicit GemmCore(const Settings& settings) : settings_(settings) {}
  Result<> prepare_one(const GemmCall& like, Deadline deadline);
  static Result<> check_pointers(const symm::Rank& rank, const GemmCall& call);
  [[nodiscard]] Result<device::GroupedGemmConfig> choose(const GemmCall& call) const;
  [[nodiscard]] const Variant* find_any(const device::GroupedGemmConfig& config) const;
  Result<const symm::Prepared<device::PrepareWeightsParams>*> weight_kernel_of(Deadline deadline);

  Settings settings_;
  std::unique_ptr<jit::Jit> jit_;  // the group's, when it is the core's own
  std::unique_ptr<symm::Group> group_;
  std::optional<symm::Launcher> own_launcher_;
  symm::Launcher* launcher_ = nullptr;
  // What is in these two stays where it is: launches use it without the lock.
  mutable std::mutex prepared_;
  std::deque<Variant> variants_;
  std::optional<symm::Prepared<device::PrepareWeightsParams>> weight_kernel_;
  u64* cycles_ = nullptr;
  std::optional<bool> hand_over_;
};

// What is wrong with a call; see gemm_check.cpp.
Result<> check_gemm(const GemmCall& call);
// The kernel's parameters for a call that has been checked.
Result<device::GroupedGemmParams> gemm_params(const symm::Rank& rank, const GemmCall& call,
                                              const device::GroupedGemmConfig& config,
                                              std::chrono::nanoseconds wait);

}  // namespace crossdock::moe
