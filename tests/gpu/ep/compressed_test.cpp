// Combines of few tokens whose rows travel compressed, on real GPUs: every bit and the error of
// each format, and graphs replayed.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <optional>

#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"
#include "support/ep_payload.hpp"

namespace crossdock::testing {
namespace {

constexpr ep::Payload kPayloads[] = {ep::Payload::kFp8, ep::Payload::kLogFmt10};

EpCase few(u32 tokens) {
  EpCase c = large(tokens);
  c.fixed = true;
  return c;
}

TEST_F(EpGpu, CompressedRowsOfFewTokens) {
  for (const ep::Payload payload : kPayloads)
    for (const u32 tokens : {9u, 40u, 100u}) {
      SCOPED_TRACE(tokens);
      EpCase c = few(tokens);
      c.biases = tokens == 40 ? 2 : 0;
      c.overlap = tokens != 40 && ranks_of_a_gpu() == 1;
      EpGroupRig r = rig(c, [](ep::Options& o) { o.compressed = true; });
      const EpInputs inputs(c, tokens);
      const EpPayloadReference reference(c, inputs, payload);
      r.load(inputs);
      const auto handles = r.dispatch();
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      for (const auto& handle : handles)
        r.write_expert_rows(handle, reference.expert_rows(handle.rank(), tokens));
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(r.combine(handle, r.combined(handle.rank()), {.payload = payload}));
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      double largest = 0;
      for (const u32 rank : r.group().local_ranks())
        ASSERT_NO_FATAL_FAILURE(
            reference.check(rank, r.combined_rows(rank).data(), tokens, &largest));
      std::printf("  payload %u, %u tokens: largest error %.2f of what is promised\n",
                  static_cast<u32>(payload), tokens, largest);
    }
}

// Dispatch and combine in graphs, far ahead of the host, with formats in turns.
TEST_F(EpGpu, GraphsOfCompressedCombines) {
  EpCase c = few(24);
  c.combine_weights = false;
  // On a shared GPU a launch that waits for the one before would keep other ranks from running.
  c.overlap = ranks_of_a_gpu() == 1;
  c.host_counts = false;
  EpGroupRig r = rig(c, [](ep::Options& o) { o.compressed = true; });
  const EpInputs inputs(c, 1);
  r.load(inputs);
  std::vector<cuda::Graph> graphs;
  std::vector<ep::Handle> kept;
  for (const u32 rank : r.group().local_ranks()) {
    auto capture = cuda::Capture::begin(*r.rank(rank).device().stream()).value();
    std::optional<ep::Handle> last;
    for (const ep::Payload payload : {kPayloads[0], ep::Payload::kBf16, kPayloads[1]}) {
      last.emplace(r.group().dispatch(rank, r.tokens(rank)).value());
      ASSERT_NO_FATAL_FAILURE(r.combine(*last, r.combined(rank), {.payload = payload}));
    }
    kept.push_back(std::move(*last));
    graphs.push_back(capture.finish().value());
  }
  // The last combine of a replay is of the slot of the last dispatch, whose input stays as it is.
  const EpPayloadReference reference(c, inputs, kPayloads[1]);
  for (const auto& handle : kept)
    r.write_expert_rows(handle, reference.expert_rows(handle.rank(), 5));
  for (u32 replay = 0; replay < 500; ++replay)
    for (u32 i = 0; i < graphs.size(); ++i) {
      const u32 rank = r.group().local_ranks()[i];
      ASSERT_TRUE(graphs[i].launch(*r.rank(rank).device().stream()).ok());
    }
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (const u32 rank : r.group().local_ranks())
    ASSERT_NO_FATAL_FAILURE(reference.check(rank, r.combined_rows(rank).data(), 5));
}

}  // namespace
}  // namespace crossdock::testing
