// Kernels that work on what one rank has received, in the twin, in every world: lists by expert,
// copies by place, sums by row, compressed rows, copies of planes; and changes of masks. What has
// been received is made here, so one rank of the world runs them; its peers read what combines
// before have left in its window, and say so when they have.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <crossdock/kernel/ep_copy_rows.cuh>
#include <crossdock/kernel/ep_expand_rows.cuh>
#include <crossdock/kernel/ep_group_rows.cuh>
#include <crossdock/kernel/ep_reduce_rows.cuh>

#include "ep_places.hpp"
#include "ep_rig.hpp"
#include "support/ep_payload.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kAllWorlds[] = {1, 2, 3, 4, 5, 8, 32};

// ---- what has been received --------------------------------------------------------------------

// A dispatch in plain C++: EpReference says that it is one.
struct Received {
  u8* block;
  u32* ends;
  u32* counts;

  Received(Ranks& ranks, u32 rank, const EpCase& c)
      : block(ranks.local<u8>(rank, c.output().bytes)),
        ends(ranks.local<u32>(rank, c.world)),
        counts(ranks.local<u32>(rank, c.expert_map().most() + 1)) {}

  void deliver(const EpCase& c, const EpInputs& inputs, u32 rank) const {
    std::memset(block, 0xee, c.output().bytes);
    std::fill_n(counts, c.expert_map().most() + 1, 0u);
    u32 row = 0;
    for (u32 source = 0; source < c.world; ++source) {
      row = c.first_row(source, row);
      for (u32 token = 0; token < inputs.of(source).tokens; ++token)
        if (inputs.goes_to(source, token, rank)) put(c, inputs.of(source), rank, token, row++);
      ends[source] = row;
    }
    EpReference(c, inputs).check(rank, {block, ends, counts});
  }
  [[nodiscard]] const i32* ids(const EpCase& c) const {
    return reinterpret_cast<const i32*>(block + c.output().ids);
  }
  [[nodiscard]] const float* weights(const EpCase& c) const {
    return reinterpret_cast<const float*>(block + c.output().weights);
  }
  [[nodiscard]] EpArrived arrived(const EpCase& c, u32 rank) const {
    return {.source_ends = ends,
            .expert_counts = counts,
            .ids = ids(c),
            .weights = weights(c),
            .world = c.world,
            .experts = c.expert_map().count(rank),
            .top_k = c.top_k,
            .stride = c.fixed ? c.max_tokens : 0};
  }
  [[nodiscard]] bool holds(const EpCase& c, u32 row) const {
    return c.fixed ? row < ends[row / c.max_tokens] : row < ends[c.world - 1];
  }

 private:
  void put(const EpCase& c, const EpTokensIn& in, u32 rank, u32 token, u32 row) const {
    const EpOutputLayout out = c.output();
    std::memcpy(block + out.rows + u64{row} * out.row_bytes, &in.rows[u64{token} * c.row_bytes],
                out.row_bytes);
    auto* scales = reinterpret_cast<u32*>(block + out.scales);
    for (u32 i = 0; i < c.scale_bytes / 4; ++i)
      std::memcpy(out.scale_columns == 0 ? &scales[u64{row} * (c.scale_bytes / 4) + i]
                                         : &scales[u64{i} * out.scale_columns + row],
                  &in.scales[u64{token} * c.scale_bytes + 4 * i], 4);
    reinterpret_cast<u32*>(block + out.sources)[row] = token;
    const i64 first = c.expert_map().first(rank);
    for (u32 k = 0; k < c.top_k; ++k) {
      const u64 choice = u64{token} * c.top_k + k, at = u64{row} * c.top_k + k;
      const i64 local = in.ids[choice] - first;
      const bool here = in.ids[choice] >= 0 && local >= 0 && local < c.expert_map().count(rank);
      reinterpret_cast<i32*>(block + out.ids)[at] = here ? static_cast<i32>(local) : -1;
      reinterpret_cast<float*>(block + out.weights)[at] = here ? in.weights[choice] : 0.0f;
      if (here) ++counts[local];
    }
  }
};

// ---- peers that still read ----------------------------------------------------------------------

// In a peer's stream: what a combine before has left at another rank, and that it has been read.
// One block.
struct EpPeerReadParams {
  SymmetricView view;
  u32 owner;
  u64 from;  // in its window
  u64 bytes;
  u8* to;
  u64 pulled;  // in its window
};
void peer_read(const EpPeerReadParams& p) {
  const u32* from = p.view.at<const u32>(p.from, p.owner);
  for (u64 i = thread_index(); i < p.bytes / 4; i += block_size())
    ptx::st_weak(reinterpret_cast<u32*>(p.to) + i, ptx::ld_weak(from + i));
  ThreadGroup::block().sync();
  if (thread_index() != 0) return;
  signal_counter(p.view.at<u32>(p.pulled + p.view.rank * sizeof(PaddedWord), p.owner), 1);
}

// ---- the rig ------------------------------------------------------------------------------------

// What an expert makes of a place.
u16 place_value(u32 place, u32 i, u32 seed) {
  return expert_value(seed, 17, place, i, 3);
}

struct Variant {
  bool masked = false;
  bool fixed = false;
  bool by_column = false;
};

class LocalRig {
 public:
  static constexpr u8 kOld = 0x77;

  LocalRig(const EpCase& c, const Variant& v, u32 rank)
      : case_(c),
        rank_(rank),
        ranks_(c.world, layout()),
        places_(ranks_, rank, c, {.masked = v.masked, .scales_by_column = v.by_column}),
        received_(ranks_, rank, c),
        outputs_(ranks_.local<u8>(rank, places_.memory_places() * c.combine_bytes)),
        pieces_(ranks_.local<u32>(rank, u64{kMostBlocks} * (c.expert_map().most() + 1))),
        free_(ranks_.local<u32>(rank, u64{2} * c.world)) {
    for (u32 peer = 0; peer < c.world; ++peer) {
      seen_.push_back(ranks_.local<u8>(peer, sums_bytes() + c.output().bytes));
      free_[peer] = 1;
      free_[c.world + peer] = 2;
    }
  }
  void run_and_check(u32 seed) {
    ranks_.reset();
    const EpInputs inputs(case_, seed);
    ASSERT_NO_FATAL_FAILURE(received_.deliver(case_, inputs, rank_));
    places_.fill();
    std::memset(ranks_.window<u8>(rank_, sums_), kOld, sums_bytes());
    std::memset(ranks_.window<u8>(rank_, copy_), kOld, case_.output().bytes);
    auto* values = reinterpret_cast<u16*>(outputs_);
    for (u64 i = 0; i < places_.memory_places() * row_values(); ++i)
      values[i] =
          place_value(static_cast<u32>(i / row_values()), static_cast<u32>(i % row_values()), seed);
    launch(seed);
    ASSERT_NO_FATAL_FAILURE(ranks_.run_clean(schedule(seed)));
    ASSERT_NO_FATAL_FAILURE(
        places_.check({received_.block, received_.ends, received_.counts}, stride()));
    ASSERT_NO_FATAL_FAILURE(check_sums(seed));
    ASSERT_NO_FATAL_FAILURE(check_copy());
    for (u32 peer = 0; peer < case_.world; ++peer)
      for (u64 i = 0; i < sums_bytes() + case_.output().bytes; ++i)
        ASSERT_EQ(seen_[peer][i], kOld) << "written before rank " << peer << " had read byte " << i;
  }

 private:
  static constexpr u32 kMostBlocks = 3;
  [[nodiscard]] u32 row_values() const { return case_.combine_bytes / 2; }
  [[nodiscard]] u32 stride() const { return case_.fixed ? case_.max_tokens : 0; }
  [[nodiscard]] u64 sums_bytes() const {
    return u64{case_.world} * case_.max_tokens * case_.combine_bytes;
  }
  SymmetricLayout layout() {
    SymmetricLayout window;
    pulled_ = window.add("pulled", u64{case_.world} * sizeof(PaddedWord));
    sums_ = window.add("sums", sums_bytes());
    copy_ = window.add("copy", case_.output().bytes);
    return window;
  }
  void launch(u32 seed) {
    launch_group(1 + seed % kMostBlocks);
    launch_expand(1 + seed % 2);
    launch_reduce(1 + seed / 2 % 2, weighted(seed));
    launch_copy(1 + seed % 2);
    for (u32 peer = 0; peer < case_.world; ++peer) {
      EpPeerReadParams p{ranks_.view(peer), rank_, sums_, sums_bytes(), seen_[peer], pulled_};
      const auto read = [&] { ranks_.launch(peer, {1, 32, 0, "peer_read"}, peer_read, p); };
      // Of the rank itself they would come behind what waits for them; a combine has come before.
      if (peer == rank_) {
        std::memset(seen_[peer], kOld, sums_bytes() + case_.output().bytes);
        *ranks_.window<u32>(rank_, pulled_ + peer * sizeof(PaddedWord)) = 2;
        continue;
      }
      read();
      p.from = copy_;
      p.bytes = case_.output().bytes;
      p.to += sums_bytes();
      read();
    }
  }
  void launch_group(u32 blocks) {
    constexpr EpGroupRowsConfig kConfig{.threads = 64};
    EpGroupRowsParams p{ranks_.common(rank_, KernelId::kEpGroupRows),
                        received_.arrived(case_, rank_), places_.grouping(), pieces_,
                        EpGroupStep::kAll};
    const Ranks::Shape shape{blocks, kConfig.threads,
                             ep_list_shared_bytes(kConfig.threads / kWarpSize, p.arrived.experts),
                             "ep_group_rows", true};
    if (blocks > 1) {
      p.step = EpGroupStep::kCount;
      ranks_.launch(rank_, shape, kernel::ep_group_rows<kConfig>, p);
      p.step = EpGroupStep::kWrite;
    }
    ranks_.launch(rank_, shape, kernel::ep_group_rows<kConfig>, p);
  }
  void launch_expand(u32 blocks) {
    constexpr EpExpandRowsConfig kConfig{.warps = 2, .stages = 3, .stage_bytes = 128};
    const EpOutputLayout out = case_.output();
    EpExpandRowsParams p{};
    p.common = ranks_.common(rank_, KernelId::kEpExpandRows);
    p.arrived = received_.arrived(case_, rank_);
    p.grouping = places_.grouping();
    p.from = {received_.block + out.rows,
              received_.block + out.scales,
              reinterpret_cast<const u32*>(received_.block + out.sources),
              out.row_bytes,
              out.scale_bytes,
              out.scale_columns};
    p.to = places_.to();
    p.parts = ceil_div(out.row_bytes, kConfig.stage_bytes);
    p.part_bytes = ep_part_bytes(out.row_bytes, p.parts);
    ranks_.launch(rank_,
                  {blocks, kConfig.threads(), kConfig.shared_bytes(), "ep_expand_rows", true},
                  kernel::ep_expand_rows<kConfig>, p);
  }
  static bool weighted(u32 seed) { return seed % 2 == 0; }
  void launch_reduce(u32 blocks, bool weighs) {
    constexpr EpReduceRowsConfig kConfig{.warps = 2, .packs = false};
    EpReduceRowsParams p{};
    p.common = ranks_.common(rank_, KernelId::kEpReduceRows);
    p.view = ranks_.view(rank_);
    p.arrived = received_.arrived(case_, rank_);
    p.positions = places_.grouping().positions;
    p.offsets = places_.grouping().offsets;
    p.outputs = outputs_;
    p.output_stride = case_.combine_bytes;
    p.rows_per_expert = places_.to().rows_per_expert;
    p.input = ranks_.window<u8>(rank_, sums_);
    p.free = {.pulled = pulled_, .at = free_, .masking = {}};
    p.row_bytes = case_.combine_bytes;
    p.weighted = weighs;
    ranks_.launch(rank_, {blocks, kConfig.warps * kWarpSize, 0, "ep_reduce_rows", true},
                  kernel::ep_reduce_rows<kConfig>, p);
  }
  void launch_copy(u32 blocks) {
    constexpr EpCopyRowsConfig kConfig{.threads = 64};
    const EpOutputLayout out = case_.output();
    EpCopyRowsParams p{};
    p.common = ranks_.common(rank_, KernelId::kEpCopyRows);
    p.view = ranks_.view(rank_);
    p.rows = received_.ends + case_.world - 1;
    u8* to = ranks_.window<u8>(rank_, copy_);
    const auto add = [&](u64 offset, u64 pitch, u32 columns, u32 bytes) {
      p.planes[p.num_planes++] = {received_.block + offset, to + offset, pitch, columns, bytes};
    };
    add(out.rows, 0, 1, out.row_bytes);
    if (out.scale_columns == 0) add(out.scales, 0, 1, out.scale_bytes);
    if (out.scale_columns != 0) add(out.scales, out.scale_columns * 4, out.scale_bytes / 4, 4);
    add(out.ids, 0, 1, case_.top_k * 4);
    add(out.weights, 0, 1, case_.top_k * 4);
    add(out.sources, 0, 1, 4);
    p.free = {.pulled = pulled_, .at = free_ + case_.world, .masking = {}};
    ranks_.launch(rank_, {blocks, kConfig.threads, 0, "ep_copy_rows", true},
                  kernel::ep_copy_rows<kConfig>, p);
  }
  // Of a row that is held.
  [[nodiscard]] float sum_of(u32 row, u32 i, u32 seed) const {
    float sum = 0;
    for (u32 choice = row * case_.top_k; choice < (row + 1) * case_.top_k; ++choice) {
      const i32 expert = received_.ids(case_)[choice];
      if (expert < 0) continue;
      const u64 place = ep_target(places_.grouping().positions[choice], static_cast<u32>(expert),
                                  places_.grouping().offsets[expert], places_.to().rows_per_expert);
      const float value = from_bf16(place_value(static_cast<u32>(place), i, seed));
      sum = std::fma(weighted(seed) ? received_.weights(case_)[choice] : 1.0f, value, sum);
    }
    return sum;
  }
  void check_sums(u32 seed) {
    const auto* got = ranks_.window<u16>(rank_, sums_);
    for (u32 row = 0; row < case_.world * case_.max_tokens; ++row)
      for (u32 i = 0; i < row_values(); ++i) {
        const u16 want =
            received_.holds(case_, row) ? bf16_of(sum_of(row, i, seed)) : u16{kOld * 0x0101};
        ASSERT_EQ(got[u64{row} * row_values() + i], want) << "row " << row << " value " << i;
      }
  }
  // Every plane, gaps as they are; what lies behind the rows is what was there.
  void check_copy() {
    const EpOutputLayout out = case_.output();
    const u8* got = ranks_.window<u8>(rank_, copy_);
    std::vector<u8> want(out.bytes, kOld);
    const u64 rows = received_.ends[case_.world - 1];
    const auto copy = [&](u64 offset, u64 bytes) {
      std::memcpy(&want[offset], received_.block + offset, bytes);
    };
    copy(out.rows, rows * out.row_bytes);
    if (out.scale_columns == 0) copy(out.scales, rows * out.scale_bytes);
    for (u32 i = 0; out.scale_columns != 0 && i < out.scale_bytes / 4; ++i)
      copy(out.scales + u64{i} * out.scale_columns * 4, rows * 4);
    copy(out.ids, rows * case_.top_k * 4);
    copy(out.weights, rows * case_.top_k * 4);
    copy(out.sources, rows * 4);
    for (u64 i = 0; i < out.bytes; ++i)
      ASSERT_EQ(got[i], want[i]) << "byte " << i << " of the copied planes";
  }

  EpCase case_;
  u32 rank_;
  u64 pulled_ = 0, sums_ = 0, copy_ = 0;
  Ranks ranks_;
  EpPlaces places_;
  Received received_;
  u8* outputs_;
  u32* pieces_;
  u32* free_;  // of the sums, then of the copy
  std::vector<u8*> seen_;
};

// Sixteen schedules of a world, dealt to ranks and layouts.
void every_layout(u32 world) {
  for (u32 v = 0; v < 8; ++v) {
    const Variant variant{.masked = v % 2 != 0, .fixed = v / 2 % 2 != 0, .by_column = v / 4 != 0};
    const EpCase c{.world = world,
                   .experts = 2 * world + 3,
                   .top_k = 4,
                   .max_tokens = world > 8 ? 2u : 7u,
                   .row_bytes = 144,
                   .scale_bytes = 12,
                   .scales_by_column = v % 3 == 0,
                   .combine_bytes = world > 3 ? 208u : 2064u,  // two parts
                   .fixed = variant.fixed};
    LocalRig rig(c, variant, v * 5 % world);
    for (u32 seed = 1 + v; seed <= kEpSeeds; seed += 8) {
      SCOPED_TRACE("world " + std::to_string(world) + " layout " + std::to_string(v) + " seed " +
                   std::to_string(seed));
      ASSERT_NO_FATAL_FAILURE(rig.run_and_check(seed));
    }
  }
}
TEST(EpLocal, ListsCopiesAndSumsInEveryWorld) {
  for (const u32 world : kAllWorlds)
    ASSERT_NO_FATAL_FAILURE(every_layout(world));
}

// ---- compressed rows ----------------------------------------------------------------------------

// Value `i` of a compressed row, by what layout/ep_payload.cuh says of the bits.
float unpacked(const u8* row, EpPayload payload, u32 i) {
  const u8* unit = row + u64{i / kEpUnitValues} * ep_unit_bytes(payload);
  const u32 at = i % kEpUnitValues, group = at / kPayloadGroup;
  u32 word = 0;
  if (payload == EpPayload::kFp8) {
    std::memcpy(&word, unit + kEpFp8Scales + 4 * group, 4);
    return bit_cast<float>(minifloat::decode(minifloat::kE4m3, unit[at])) * bit_cast<float>(word);
  }
  std::memcpy(&word, unit + kEpLogRanges + 4 * group, 4);
  const EpLogRange range = EpLogRange::from(word);
  const u32 high = unit[kEpLogHigh + at / 4] >> 2 * (at % 4);
  const u32 code = unit[at] | (high & 1u) << 8;
  const u32 bits = code == 0 ? 0 : (range.lowest << 16) + (code - 1) * range.step();
  return bit_cast<float>(bits | (high & 2u) << 30);
}
// The same, of a row of bf16.
float through(const u16* row, EpPayload payload, u32 i) {
  const u16* group = row + i / kPayloadGroup * kPayloadGroup;
  if (payload == EpPayload::kLogFmt10) return through_log(group).values[i % kPayloadGroup];
  return through_fp8(group).values[i % kPayloadGroup] * fp8_scale(group);
}

// Received rows as they are, in a format: every held row and nothing else.
void pack(const EpCase& c, u32 rank, u32 seed, EpPayload payload) {
  constexpr EpReduceRowsConfig kConfig{.warps = 2, .packs = true};
  SymmetricLayout window;
  (void)window.add("unused", 128);
  Ranks ranks(c.world, window);
  const EpInputs inputs(c, seed);
  const Received received(ranks, rank, c);
  ASSERT_NO_FATAL_FAILURE(received.deliver(c, inputs, rank));
  const u32 rows = c.world * c.max_tokens, values = c.combine_bytes / 2;
  auto* outputs = ranks.local<u16>(rank, u64{rows} * values);
  for (u64 i = 0; i < u64{rows} * values; ++i)
    outputs[i] =
        wide_value(rank, 0, static_cast<u32>(i / values), static_cast<u32>(i % values), seed);
  const u32 row_stride = ep_payload_stride(payload, values);
  auto* packed = ranks.local<u8>(rank, u64{rows} * row_stride);
  std::memset(packed, 0x77, u64{rows} * row_stride);
  EpReduceRowsParams p{};
  p.common = ranks.common(rank, KernelId::kEpReduceRows);
  p.view = ranks.view(rank);
  p.arrived = received.arrived(c, rank);
  p.outputs = reinterpret_cast<const u8*>(outputs);
  p.output_stride = c.combine_bytes;
  p.input = packed;
  p.payload = payload;
  p.row_bytes = c.combine_bytes;
  ranks.launch(rank, {1 + seed % 2, kConfig.warps * kWarpSize, 0, "ep_reduce_rows", true},
               kernel::ep_reduce_rows<kConfig>, p);
  ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
  for (u32 row = 0; row < rows; ++row) {
    const u8* got = packed + u64{row} * row_stride;
    if (!received.holds(c, row)) {
      ASSERT_EQ(got[0], 0x77) << "row " << row;
      continue;
    }
    for (u32 i = 0; i < values; ++i)
      ASSERT_EQ(unpacked(got, payload, i), through(outputs + u64{row} * values, payload, i))
          << "row " << row << " value " << i;
  }
}
TEST(EpLocal, RowsAreCompressedInEveryWorld) {
  for (const u32 world : kAllWorlds)
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      const EpCase c{.world = world,
                     .experts = 2 * world + 3,
                     .max_tokens = world > 8 ? 1u : 3u,
                     .row_bytes = 16,
                     .combine_bytes = 1024,
                     .fixed = seed % 4 < 2};
      SCOPED_TRACE("world " + std::to_string(world) + " seed " + std::to_string(seed));
      ASSERT_NO_FATAL_FAILURE(
          pack(c, seed % world, seed, seed % 2 == 0 ? EpPayload::kFp8 : EpPayload::kLogFmt10));
    }
}

// ---- masks --------------------------------------------------------------------------------------

// What a mask becomes, who is told so, and what is made up for at those that are let in again.
void change_mask(u32 world, u32 seed) {
  SymmetricLayout window;
  const EpAreas areas = add_ep(window, world, world, 1, true);
  Ranks ranks(world, window);
  const u32 rank = seed % world, all = kFullMask >> (kWarpSize - world);
  auto* mask = ranks.local<EpMask>(rank, 1);
  auto* told = ranks.local<i32>(rank, world);
  auto* state = ranks.local<EpState>(rank, 1);
  auto* slots = ranks.local<EpSmallState>(rank, 2);
  const u32 before = mix(seed) & all & ~(1u << rank);
  mask->ranks = before;
  mask->late = before & mix(seed + 100);
  state->combine.finished = 7 * seed;
  slots[0].released.value = slots[1].released.value = 5;
  slots[1].dispatch.finished = 3u << 30;
  EpMaskParams p{.mask = mask,
                 .set = mix(seed + 200) & all & ~(1u << rank),
                 .clear = seed % 4 == 0 ? 0 : mix(seed + 300) & all,
                 .told = told,
                 .view = ranks.view(rank),
                 .areas = areas,
                 .state = state,
                 .combine_blocks = 3,
                 .slots = 2,
                 .small = {&slots[0], &slots[1]}};
  const u32 after = (before & ~p.clear) | p.set, back = before & ~after;
  launch_mask_kernel(ranks, p);
  const u32 late = mask->late;
  ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
  EXPECT_EQ(mask->ranks, after);
  EXPECT_EQ(mask->late, after == before ? late : late & after);
  // One use behind, however many there were.
  EXPECT_EQ(slots[0].released.value, back != 0 ? ~0u : 5u);
  EXPECT_EQ(slots[1].released.value, back != 0 ? (3u << 30) - 1 : 5u);
  for (u32 peer = 0; peer < world; ++peer) {
    EXPECT_EQ(told[peer], static_cast<i32>(after >> peer & 1u)) << "rank " << peer;
    for (u32 source = 0; source < world; ++source)
      EXPECT_EQ(*ranks.window<u32>(peer, areas.pulled + source * sizeof(PaddedWord)),
                source == rank && (back >> peer & 1u) != 0 ? 21 * seed : 0)
          << "from rank " << source << " at rank " << peer;
  }
}
TEST(EpLocal, MasksChangeInEveryWorld) {
  for (const u32 world : kAllWorlds)
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      SCOPED_TRACE("world " + std::to_string(world) + " seed " + std::to_string(seed));
      ASSERT_NO_FATAL_FAILURE(change_mask(world, seed));
      ASSERT_FALSE(HasFailure());
    }
}

}  // namespace
}  // namespace crossdock::testing
