// A long mixed run in the twin through the API: dispatches that count or reuse, into slots, copies
// or memory of the caller as each rank likes, combines of any round that is held, everything held
// checked after every step and poisoned when it is dropped.
// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <memory>
#include <random>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

// What a collective dispatch has left, at all ranks.
struct Round {
  std::vector<ep::Handle> handles = {};
  std::shared_ptr<EpInputs> inputs;
  u32 number;
};

class Soak {
 public:
  Soak(const EpCase& c, u32 seed) : case_(c), random_(seed), rig_(make(c)) {}

  void step(u32 number) {
    rig_.group().core().launcher().set_schedule(weak_schedule(random_()));
    ASSERT_NO_FATAL_FAILURE(dispatch(number));
    for (const Round& round : held_)
      for (const auto& handle : round.handles)
        ASSERT_NO_FATAL_FAILURE(rig_.check(handle, EpReference(case_, *round.inputs)))
            << "step " << number << ", of step " << round.number;
    ASSERT_NO_FATAL_FAILURE(combine(held_[random_() % held_.size()], number));
    while (held_.size() > 7 || random_() % 2 == 0) {
      if (held_.empty()) break;
      drop(random_() % held_.size());
    }
  }
  [[nodiscard]] u32 reused() const { return reused_; }
  [[nodiscard]] u32 copied() const { return copied_; }
  [[nodiscard]] u32 combined() const { return combined_; }

 private:
  static EpGroupRig make(const EpCase& c) {
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ep.user_bytes = u64{1} << 19;
    return EpGroupRig::create(c, options).value();
  }
  // Rows of the caller's memory are this rank's alone until the round that has them is dropped.
  ep::DispatchOptions place(u32 rank, bool user) {
    if (!user) return {};
    std::byte* memory = rig_.group().user_memory(rank)->data();
    return {.output = memory,
            .output_room = u64{1} << 18,
            .input = memory + (u64{1} << 18),
            .input_room = u64{1} << 18};
  }
  void dispatch(u32 number) {
    const Round* like =
        held_.empty() || random_() % 3 != 0 ? nullptr : &held_[random_() % held_.size()];
    Round round{.inputs = std::make_shared<EpInputs>(case_, number), .number = number};
    if (like != nullptr)
      for (u32 r = 0; r < case_.world; ++r) {
        round.inputs->of(r).ids = like->inputs->of(r).ids;
        round.inputs->of(r).weights = like->inputs->of(r).weights;
      }
    rig_.load(*round.inputs);
    reused_ += like != nullptr;
    for (u32 r = 0; r < case_.world; ++r) {
      const bool user = user_[r] == 0 && random_() % 3 == 0;
      auto how = place(r, user);
      if (like != nullptr) how.routing = &like->handles[r];
      if (user) user_[r] = number;
      round.handles.push_back(
          rig_.group()
              .dispatch(r, like != nullptr ? rig_.tokens_like(r) : rig_.tokens(r), how)
              .value());
      copied_ += round.handles.back().copied();
    }
    held_.push_back(std::move(round));
    ASSERT_NO_FATAL_FAILURE(rig_.synchronize());
  }
  void combine(Round& round, u32 number) {
    for (const auto& handle : round.handles)
      rig_.write_expert_rows(handle, *round.inputs, number);
    // Other tokens than those of the last dispatch: as many, whose results are asked for.
    rig_.load(*round.inputs);
    for (const auto& handle : round.handles)
      ASSERT_NO_FATAL_FAILURE(rig_.combine(handle));
    ASSERT_NO_FATAL_FAILURE(rig_.synchronize());
    for (u32 r = 0; r < case_.world; ++r)
      ASSERT_NO_FATAL_FAILURE(rig_.check_combined(r, EpReference(case_, *round.inputs), number))
          << "step " << number << ", of step " << round.number;
    ++combined_;
  }
  void drop(std::size_t index) {
    Round& round = held_[index];
    for (u32 r = 0; r < case_.world; ++r) {
      rig_.poison(round.handles[r]);
      if (user_[r] == round.number) user_[r] = 0;
    }
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  EpCase case_;
  std::mt19937 random_;
  EpGroupRig rig_;
  std::deque<Round> held_;
  std::vector<u32> user_ = std::vector<u32>(case_.world, 0);  // the step that has it; 0: none
  u32 reused_ = 0, copied_ = 0, combined_ = 0;
};

TEST(EpSoak, EverythingMixedStaysRight) {
  for (u32 seed = 1; seed <= 2; ++seed) {
    SCOPED_TRACE(seed);
    Soak soak({.world = 1 + seed, .max_tokens = 14, .scale_bytes = 12, .biases = 1}, seed);
    for (u32 step = 1; step <= 60; ++step)
      ASSERT_NO_FATAL_FAILURE(soak.step(step));
    EXPECT_GT(soak.reused(), 5u);
    EXPECT_GT(soak.copied(), 10u);
    EXPECT_EQ(soak.combined(), 60u);
  }
}

}  // namespace
}  // namespace crossdock::testing
