// Dispatches of few tokens that copy rows to the places of their choices themselves, on real GPUs:
// whole and in halves.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"
#include "support/ep_expanded.hpp"

namespace crossdock::testing {
namespace {

class EpFewCopiesGpu : public EpGpu {
 protected:
  static constexpr u32 kAlignment = 4;

  // Ranks that share a GPU share its multiprocessors: all blocks of all have to run at once.
  [[nodiscard]] EpGroupRig copying(EpCase& c) const {
    const u32 sms = 80u / static_cast<u32>(ranks_of_a_gpu());
    return rig(c, [&](ep::Options& o) {
      o.expert_alignment = kAlignment;
      o.small_sms = 8;
      o.small_expand_sms = sms;
    });
  }
  static std::vector<ep::Handle> dispatch(EpGroupRig& r, std::vector<EpExpandedMemory>& memory,
                                          bool halves) {
    std::vector<ep::Handle> handles;
    for (const u32 rank : r.group().local_ranks()) {
      const ep::Expanded to = memory[handles.size()].to();
      handles.push_back(halves
                            ? r.group().dispatch_send(rank, r.tokens(rank)).value()
                            : r.group().dispatch(rank, r.tokens(rank), {.expanded = &to}).value());
    }
    for (u32 i = 0; halves && i < handles.size(); ++i)
      EXPECT_TRUE(r.group().dispatch_receive(handles[i], memory[i].to()).ok());
    return handles;
  }
};

TEST_F(EpFewCopiesGpu, RowsAreCopiedInTheLaunchThatReceivesThem) {
  for (const u32 tokens : {9u, 40u, 100u})
    for (const bool halves : {false, true}) {
      SCOPED_TRACE(std::to_string(tokens) + (halves ? " in halves" : ""));
      EpCase c = large(tokens);
      c.fixed = true;
      c.scale_bytes = 224;
      c.scales_by_column = halves;
      EpGroupRig r = copying(c);
      r.load(EpInputs(c, 99));
      std::vector<EpExpandedMemory> memory;
      for (const auto& handle : r.dispatch()) {
        const auto grouped = r.group().group_rows(handle).value();
        memory.emplace_back(r.rank(handle.rank()), handle, grouped,
                            expanded_shape(c, handle, grouped, kAlignment, false));
      }
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      for (u32 seed = 1; seed <= 3; ++seed) {
        const EpInputs inputs(c, seed);
        r.load(inputs);
        for (EpExpandedMemory& of : memory)
          of.fill(ep_soon());
        const auto handles = dispatch(r, memory, halves);
        ASSERT_NO_FATAL_FAILURE(r.synchronize());
        for (u32 i = 0; i < handles.size(); ++i) {
          memory[i].take(handles[i], r.group().grouped(handles[i]).value());
          ASSERT_NO_FATAL_FAILURE(r.check(handles[i], EpReference(c, inputs)));
          ASSERT_NO_FATAL_FAILURE(memory[i].check(ep_soon())) << "seed " << seed;
        }
      }
    }
}

}  // namespace
}  // namespace crossdock::testing
