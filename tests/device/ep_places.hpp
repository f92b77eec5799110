// Lists of received rows by expert, and copies of the rows at their places, of one rank in the
// twin: the memory for both, filled with a pattern, and a check of all of it against plain loops
// over the rows that were delivered. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_grouping.cuh>

#include "ranks.hpp"
#include "support/ep_case.hpp"

namespace crossdock::testing {

struct EpPlacesShape {
  bool masked = false;
  bool scales_by_column = false;
  u32 copy_blocks = 2;  // of every rank
  u32 alignment = 4;
  u32 room_less_by = 0;  // places
};

class EpPlaces {
 public:
  static constexpr u8 kPattern = 0x5a;

  EpPlaces(Ranks& ranks, u32 rank, const EpCase& c, const EpPlacesShape& shape)
      : case_(c),
        shape_(shape),
        rank_(rank),
        grouping_(make_grouping(ranks)),
        to_(make_to(ranks)) {}

  [[nodiscard]] const EpGrouping& grouping() const { return grouping_; }
  [[nodiscard]] const EpExpanded& to() const { return to_; }
  [[nodiscard]] u64 most_places() const {
    return choices() + u64{case_.expert_map().most()} * (shape_.alignment - 1);
  }
  [[nodiscard]] u64 memory_places() const {
    return shape_.masked ? choices() * case_.expert_map().most() : most_places();
  }
  // Everything that will be written.
  void fill() {
    const EpOutputLayout out = case_.output();
    std::memset(to_.rows, kPattern, memory_places() * out.row_bytes);
    if (to_.scales != nullptr) std::memset(to_.scales, kPattern, memory_places() * out.scale_bytes);
    if (to_.weights != nullptr)
      std::memset(static_cast<void*>(to_.weights), kPattern, memory_places() * 4);
    std::memset(static_cast<void*>(to_.sources), kPattern, memory_places() * sizeof(EpSource));
    std::memset(static_cast<void*>(grouping_.rows), kPattern, most_places() * 4);
    std::memset(static_cast<void*>(grouping_.positions), kPattern, choices() * 4);
  }
  // What was delivered is right. `stride`: of the dispatch. `beyond`: what lies behind the places
  // is untouched.
  void check(const EpDelivered& got, u32 stride, bool beyond = true) const {
    const Delivered d = delivered(got, stride);
    const u32 experts = case_.expert_map().count(rank_);
    std::vector<bool> used(memory_places(), false);
    u32 place = 0;
    for (u32 e = 0; e < experts; ++e) {
      ASSERT_EQ(grouping_.offsets[e], place) << "expert " << e;
      const u32 begin = place;
      for (u32 choice = 0; choice < d.rows * case_.top_k; ++choice) {
        if (!d.holds(choice / case_.top_k) || d.ids[choice] != static_cast<i32>(e)) continue;
        ASSERT_EQ(grouping_.rows[place], static_cast<i32>(choice / case_.top_k)) << place;
        ASSERT_EQ(grouping_.positions[choice], place);
        if (case_.weights) {
          ASSERT_EQ(grouping_.weights[place], d.weights[choice]);
        }
        const u64 at = ep_target(place, e, begin, to_.rows_per_expert);
        used[at] = true;
        ASSERT_NO_FATAL_FAILURE(check_copy(d, at, choice)) << "expert " << e << " " << place;
        ++place;
      }
      for (; place % shape_.alignment != 0; ++place) {
        ASSERT_EQ(grouping_.rows[place], -1);
        if (shape_.masked && place - begin >= to_.rows_per_expert) continue;
        const u64 at = ep_target(place, e, begin, to_.rows_per_expert);
        used[at] = true;
        ASSERT_NO_FATAL_FAILURE(check_bytes(at, 0)) << "padding of expert " << e;
        ASSERT_EQ(to_.sources[at].rank, -1);
        ASSERT_EQ(to_.sources[at].token, -1);
      }
      ASSERT_EQ(grouping_.aligned[e], place - begin);
    }
    ASSERT_EQ(grouping_.offsets[experts], place);
    for (u64 at = 0; beyond && at < memory_places(); ++at)
      if (!used[at]) {
        ASSERT_NO_FATAL_FAILURE(check_bytes(at, kPattern)) << "untouched " << at;
      }
  }
  // Nothing has been copied.
  void check_untouched() const {
    for (u64 at = 0; at < memory_places(); ++at)
      ASSERT_NO_FATAL_FAILURE(check_bytes(at, kPattern)) << at;
  }

 private:
  struct Delivered {
    u32 rows;    // with the gaps between sources
    u32 stride;  // from source to source; 0: no gaps
    const i32* ids;
    const float* weights;
    const u8* payload;
    const u8* block;
    const u32* tokens;
    const u32* ends;
    [[nodiscard]] bool holds(u32 row) const { return stride == 0 || row < ends[row / stride]; }
  };
  [[nodiscard]] u64 choices() const { return u64{case_.world} * case_.max_tokens * case_.top_k; }
  EpGrouping make_grouping(Ranks& ranks) const {
    const u32 experts = case_.expert_map().most() + 1;
    return {.offsets = ranks.local<u32>(rank_, experts),
            .aligned = ranks.local<u32>(rank_, experts),
            .rows = ranks.local<i32>(rank_, most_places()),
            .positions = ranks.local<u32>(rank_, choices()),
            .weights = case_.weights ? ranks.local<float>(rank_, most_places()) : nullptr,
            .alignment = shape_.alignment};
  }
  EpExpanded make_to(Ranks& ranks) const {
    const EpOutputLayout out = case_.output();
    const u64 places = memory_places();
    const u64 row_room = choices() - (shape_.masked ? shape_.room_less_by : 0);
    return {
        .rows = ranks.local<u8>(rank_, places * out.row_bytes),
        .scales = out.scale_bytes == 0 ? nullptr : ranks.local<u8>(rank_, places * out.scale_bytes),
        .weights = case_.weights ? ranks.local<float>(rank_, places) : nullptr,
        .sources = ranks.local<EpSource>(rank_, places),
        .row_stride = out.row_bytes,
        .scale_stride = shape_.scales_by_column ? places : out.scale_bytes,
        .places = places - shape_.room_less_by,
        .rows_per_expert = shape_.masked ? static_cast<u32>(row_room) : 0,
        .scales_by_column = shape_.scales_by_column};
  }
  [[nodiscard]] Delivered delivered(const EpDelivered& got, u32 stride) const {
    const EpOutputLayout out = case_.output();
    return {stride != 0 ? case_.world * stride : got.source_ends[case_.world - 1],
            stride,
            reinterpret_cast<const i32*>(got.block + out.ids),
            reinterpret_cast<const float*>(got.block + out.weights),
            got.block + out.rows,
            got.block,
            reinterpret_cast<const u32*>(got.block + out.sources),
            got.source_ends};
  }
  [[nodiscard]] u32 scale_at(u64 place, u32 word) const {
    const auto* words = reinterpret_cast<const u32*>(to_.scales);
    return shape_.scales_by_column ? words[u64{word} * to_.scale_stride + place]
                                   : words[place * (case_.output().scale_bytes / 4) + word];
  }
  void check_bytes(u64 place, u8 value) const {
    const EpOutputLayout out = case_.output();
    for (u32 i = 0; i < out.row_bytes; ++i)
      ASSERT_EQ(to_.rows[place * out.row_bytes + i], value) << "byte " << i;
    for (u32 i = 0; i < out.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(place, i), value * 0x01010101u) << "scale " << i;
    if (case_.weights) {
      ASSERT_EQ(bit_cast<u32>(to_.weights[place]), value * 0x01010101u);
    }
  }
  void check_copy(const Delivered& d, u64 place, u32 choice) const {
    const EpOutputLayout out = case_.output();
    const u32 row = choice / case_.top_k;
    ASSERT_EQ(std::memcmp(to_.rows + place * out.row_bytes, d.payload + u64{row} * out.row_bytes,
                          out.row_bytes),
              0)
        << "row " << row;
    const auto* scales = reinterpret_cast<const u32*>(d.block + out.scales);
    for (u32 i = 0; i < out.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(place, i), out.scale_columns == 0
                                        ? scales[u64{row} * (out.scale_bytes / 4) + i]
                                        : scales[u64{i} * out.scale_columns + row])
          << "scale " << i << " of row " << row;
    if (case_.weights) {
      ASSERT_EQ(to_.weights[place], d.weights[choice]);
    }
    u32 source = 0;
    while (d.stride != 0 ? (source + 1) * d.stride <= row : d.ends[source] <= row)
      ++source;
    ASSERT_EQ(to_.sources[place].rank, static_cast<i32>(source));
    ASSERT_EQ(to_.sources[place].token, static_cast<i32>(d.tokens[row]));
  }

  EpCase case_;
  EpPlacesShape shape_;
  u32 rank_;
  EpGrouping grouping_;
  EpExpanded to_;
};

}  // namespace crossdock::testing
