// A group of expert parallelism under test, on GPUs or in the twin: uploads the tokens of a case,
// calls dispatch and combine through the API, and compares what comes back with the reference. Test
// code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <gtest/gtest.h>
#include <optional>
#include <vector>

#include <crossdock/ep/group.hpp>

#include "cuda/memory.hpp"
#include "ep/core.hpp"
#include "support/ep_case.hpp"
#include "symm/copy.hpp"

namespace crossdock::testing {

inline Deadline ep_soon() {
  return Deadline::in(std::chrono::seconds(120));
}

inline ep::GroupOptions ep_options(const EpCase& c, symm::Backend backend) {
  ep::GroupOptions options;
  options.ranks.world = c.world;
  options.ranks.backend = backend;
  options.ep.experts = c.experts;
  options.ep.top_k = c.top_k;
  options.ep.max_tokens = c.max_tokens;
  options.ep.hidden = c.combine_bytes / 2;
  options.ep.row_bytes = c.output().row_bytes;
  options.ep.scale_bytes = c.scale_bytes;
  options.ep.wide_ids = c.wide_ids;
  options.ep.cast = c.cast;
  for (u32 rank = 0; rank < c.world; ++rank) {
    options.ep.dispatch_sms_of.push_back(c.blocks_of(rank));
    options.ep.combine_sms_of.push_back(std::max(c.blocks_of(rank), c.push ? 2u : 1u));
  }
  options.ep.combine = c.push ? ep::CombineBy::kPush : ep::CombineBy::kPull;
  options.ep.overlap_launches = c.overlap;
  options.ep.small_tokens = c.fixed ? c.max_tokens : 0;
  options.ep.host_counts = c.host_counts;
  return options;
}

// Seed `seed` with every memory effect that is legal, for groups in the twin.
inline twin::Schedule weak_schedule(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = s.stale = s.fire_deadlines = true;
  return s;
}

class EpGroupRig {
 public:
  EpGroupRig(const EpCase& c, ep::Group group) : case_(c), group_(std::move(group)) {
    for (const u32 r : group_.local_ranks()) {
      symm::Rank& rank = this->rank(r);
      const u64 tokens = std::max(c.max_tokens, 1u);
      Memory m;
      m.rank = r;
      m.rows = rank.allocate(tokens * c.row_bytes).value();
      m.scales = rank.allocate(tokens * c.scale_bytes + 16).value();
      m.ids = rank.allocate(tokens * c.top_k * 8).value();
      m.weights = rank.allocate(tokens * c.top_k * 4).value();
      m.combined = rank.allocate(tokens * c.combine_bytes).value();
      m.combined_weights = rank.allocate(tokens * c.top_k * 4).value();
      for (u32 which = 0; which < c.biases; ++which)
        m.bias[which] = upload_bias(rank, which);
      memory_.push_back(std::move(m));
    }
  }
  static Result<EpGroupRig> create(const EpCase& c, symm::Backend backend) {
    return create(c, ep_options(c, backend));
  }
  static Result<EpGroupRig> create(const EpCase& c, const ep::GroupOptions& options) {
    CROSSDOCK_TRY(group, ep::Group::create(options));
    return EpGroupRig(c, std::move(group));
  }

  [[nodiscard]] ep::Group& group() { return group_; }
  [[nodiscard]] symm::Rank& rank(u32 r) { return group_.core().group().rank(r); }
  [[nodiscard]] u8* combined(u32 r) { return of(r).combined.as<u8>(); }

  void load(const EpInputs& inputs) {
    for (const u32 r : group_.local_ranks()) {
      const EpTokensIn& in = inputs.of(r);
      Memory& m = of(r);
      m.tokens = in.tokens;
      put(r, m.rows.as<u8>(), in.rows);
      put(r, m.scales.as<u8>(), in.scales);
      put(r, m.weights.as<float>(), in.weights);
      if (case_.wide_ids) {
        put(r, m.ids.as<i64>(), in.ids);
      } else {
        put(r, m.ids.as<i32>(), std::vector<i32>(in.ids.begin(), in.ids.end()));
      }
    }
  }
  [[nodiscard]] ep::Tokens tokens(u32 r) {
    const Memory& m = of(r);
    return {.count = m.tokens,
            .rows = m.rows.address(),
            .row_bytes = case_.row_bytes,
            .scales = case_.scale_bytes == 0 ? nullptr : m.scales.address(),
            .scale_bytes = case_.scale_bytes,
            .cast = case_.cast,
            .scales_by_column = case_.scales_by_column,
            .ids = m.ids.address(),
            .weights = case_.weights ? m.weights.as<float>() : nullptr};
  }
  std::vector<ep::Handle> dispatch() {
    std::vector<ep::Handle> handles;
    for (const u32 r : group_.local_ranks())
      handles.push_back(group_.dispatch(r, tokens(r)).value());
    return handles;
  }
  // As an earlier dispatch: `handles` are of all local ranks, in their order.
  std::vector<ep::Handle> dispatch_like(const std::vector<ep::Handle>& earlier) {
    std::vector<ep::Handle> handles;
    for (const ep::Handle& like : earlier)
      handles.push_back(
          group_.dispatch(like.rank(), tokens_like(like.rank()), {.routing = &like}).value());
    return handles;
  }
  // The tokens of a rank without what a reused routing brings along.
  [[nodiscard]] ep::Tokens tokens_like(u32 r) {
    ep::Tokens t = tokens(r);
    t.ids = nullptr;
    t.weights = nullptr;
    return t;
  }
  void combine(const ep::Handle& handle) { combine(handle, of(handle.rank()).combined.address()); }
  // Into memory of the test.
  void combine(const ep::Handle& handle, void* rows, const ep::CombineOptions& how = {}) {
    const Memory& m = of(handle.rank());
    ep::Combined c{.rows = rows};
    if (case_.combine_weights) c.weights = m.combined_weights.as<float>();
    for (u32 which = 0; which < case_.biases; ++which)
      c.bias[which] = m.bias[which].address();
    const auto done = group_.combine(handle, c, how);
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  void synchronize() {
    const auto done = group_.synchronize(ep_soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  // Poison in the slot of a handle, so that what a later dispatch leaves out is seen.
  void poison(const ep::Handle& handle) {
    const std::vector<u8> bytes(case_.output().bytes, 0xee);
    put(handle.rank(), static_cast<u8*>(handle.received().rows), bytes);
  }

  void check(const ep::Handle& handle, const EpReference& reference) {
    const u32 r = handle.rank();
    const auto block = get(r, static_cast<const u8*>(handle.received().rows), case_.output().bytes);
    const auto ends = get(r, handle.received().source_ends, case_.world);
    const auto counts = get(r, handle.received().expert_counts, case_.expert_map().count(r));
    ASSERT_NO_FATAL_FAILURE(reference.check(r, {block.data(), ends.data(), counts.data()}));
    if (!case_.host_counts) return;
    EXPECT_EQ(handle.rows(ep_soon()).value(), reference.rows_at(r));
    EXPECT_EQ(handle.expert_counts(ep_soon()).value(), counts);
  }
  // What the experts make of the rows of rank `r` in a round.
  struct ExpertRows {
    std::vector<u16> rows;
    std::vector<float> weights;
  };
  [[nodiscard]] ExpertRows expert_rows(u32 r, const EpInputs& inputs, u32 round) const {
    ExpertRows out;
    u32 row = 0;
    for (u32 source = 0; source < case_.world; ++source) {
      row = case_.first_row(source, row);
      out.rows.resize(u64{row} * case_.combine_bytes / 2);
      out.weights.resize(u64{row} * case_.top_k);
      for (u32 token = 0; token < inputs.of(source).tokens; ++token) {
        if (!inputs.goes_to(source, token, r)) continue;
        for (u32 i = 0; i < case_.combine_bytes / 2; ++i)
          out.rows.push_back(expert_value(r, source, token, i, round));
        for (u32 k = 0; k < case_.top_k; ++k)
          out.weights.push_back(expert_weight(r, row, k));
        ++row;
      }
    }
    return out;
  }
  // In place of the experts.
  void write_expert_rows(const ep::Handle& handle, const EpInputs& inputs, u32 round) {
    const u32 r = handle.rank();
    const ExpertRows made = expert_rows(r, inputs, round);
    put(r, static_cast<u16*>(handle.expert_input().rows), made.rows);
    put(r, handle.expert_input().weights, made.weights);
  }
  void write_expert_rows(const ep::Handle& handle, const std::vector<u16>& rows) {
    put(handle.rank(), static_cast<u16*>(handle.expert_input().rows), rows);
  }
  // The same in memory of its own, for ep::Combined::experts.
  struct Elsewhere {
    symm::LocalMemory rows, weights;
  };
  Elsewhere expert_rows_elsewhere(u32 r, const EpInputs& inputs, u32 round) {
    const ExpertRows made = expert_rows(r, inputs, round);
    Elsewhere out{rank(r).allocate(made.rows.size() * 2 + 16).value(),
                  rank(r).allocate(made.weights.size() * 4 + 16).value()};
    put(r, out.rows.as<u16>(), made.rows);
    put(r, out.weights.as<float>(), made.weights);
    return out;
  }
  // The combined rows of a rank.
  std::vector<u8> combined_rows(u32 r) {
    const Memory& m = of(r);
    return get(r, m.combined.as<u8>(), u64{m.tokens} * case_.combine_bytes);
  }
  void check_combined(u32 r, const EpReference& reference, u32 round) {
    const Memory& m = of(r);
    const auto rows = get(r, m.combined.as<u8>(), u64{m.tokens} * case_.combine_bytes);
    ASSERT_NO_FATAL_FAILURE(reference.check_combined(r, rows.data(), round));
    if (!case_.combine_weights) return;
    const auto weights = get(r, m.combined_weights.as<float>(), u64{m.tokens} * case_.top_k);
    ASSERT_NO_FATAL_FAILURE(reference.check_weights(r, weights.data()));
  }
  // The rows of a combine into memory of the test.
  void check_rows(u32 r, const EpReference& reference, u32 round, const void* rows) {
    const auto got = get(r, static_cast<const u8*>(rows), u64{of(r).tokens} * case_.combine_bytes);
    ASSERT_NO_FATAL_FAILURE(reference.check_combined(r, got.data(), round));
  }
  // Dispatch, experts and combine of one set of tokens, everything checked.
  void round(u32 seed) {
    const EpInputs inputs(case_, seed);
    const EpReference reference(case_, inputs);
    load(inputs);
    auto handles = dispatch();
    ASSERT_NO_FATAL_FAILURE(synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(check(handle, reference));
      write_expert_rows(handle, inputs, seed);
    }
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(combine(handle));
    ASSERT_NO_FATAL_FAILURE(synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(check_combined(handle.rank(), reference, seed));
      poison(handle);
    }
  }

 private:
  struct Memory {
    u32 rank = 0;
    u32 tokens = 0;
    symm::LocalMemory rows, scales, ids, weights, combined, combined_weights;
    symm::LocalMemory bias[2];
  };
  Memory& of(u32 r) {
    for (Memory& m : memory_)
      if (m.rank == r) return m;
    std::abort();
  }
  template <class T>
  void put(u32 r, T* to, const std::vector<T>& values) {
    const auto done = symm::upload(rank(r), to, values, ep_soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  template <class T>
  std::vector<T> get(u32 r, const T* from, u64 count) {
    return symm::download(rank(r), from, count, ep_soon()).value();
  }
  symm::LocalMemory upload_bias(symm::Rank& on, u32 which) {
    const u32 values = case_.combine_bytes / 2;
    std::vector<u16> bias;
    for (u32 i = 0; i < case_.max_tokens * values; ++i)
      bias.push_back(bias_value(which, on.rank(), i / values, i % values));
    auto memory = on.allocate(bias.size() * 2).value();
    EXPECT_TRUE(symm::upload(on, memory.as<u16>(), bias, ep_soon()).ok());
    return memory;
  }
  EpCase case_;
  ep::Group group_;
  std::vector<Memory> memory_;
};

}  // namespace crossdock::testing
