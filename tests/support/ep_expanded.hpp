// Memory for expanded or masked copies of received rows, filled with a pattern, and a check of
// everything in it against what the dispatch has delivered. On GPUs or in the twin. Test code; one
// thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <gtest/gtest.h>
#include <vector>

#include <crossdock/ep/group.hpp>
#include <crossdock/layout/ep_grouping.cuh>

#include "support/ep_case.hpp"
#include "symm/copy.hpp"

namespace crossdock::testing {

struct EpExpandedShape {
  device::u64 places = 0;
  device::u32 rows_per_expert = 0;
  device::u32 experts = 0;
  device::u32 top_k = 0;
  device::u32 world = 0;
  device::u32 alignment = 1;
  bool scales_by_column = false;
  device::u32 row_gap = 0;
  bool weights = true;
};

// Of the copies of one rank. Masked: every expert has room for all rows that the rank can get.
inline EpExpandedShape expanded_shape(const EpCase& c, const ep::Handle& handle,
                                      const ep::Grouped& grouped, device::u32 alignment,
                                      bool masked) {
  const device::u32 experts = c.expert_map().count(handle.rank());
  const device::u32 per_expert = masked ? handle.received().capacity * c.top_k : 0;
  return {.places = masked ? device::u64{per_expert} * experts : grouped.places,
          .rows_per_expert = per_expert,
          .experts = experts,
          .top_k = c.top_k,
          .world = c.world,
          .alignment = alignment,
          .weights = c.weights};
}

class EpExpandedMemory {
 public:
  EpExpandedMemory(symm::Rank& rank, const ep::Handle& handle, const ep::Grouped& grouped,
                   const EpExpandedShape& shape)
      : rank_(&rank), got_(handle.received()), grouped_(grouped), shape_(shape) {
    const auto plane = [&](u64 bytes) { return rank.allocate(std::max<u64>(bytes, 16)).value(); };
    row_stride_ = got_.row_bytes + shape.row_gap;
    columns_ = device::round_up(shape.places, u64{4});
    rows_ = plane(shape.places * row_stride_);
    scales_ = plane(columns_ * got_.scale_bytes);
    weights_ = plane(shape.places * 4);
    sources_ = plane(shape.places * sizeof(ep::Source));
    fill(Deadline::in(std::chrono::seconds(60)));
  }
  // The pattern everywhere.
  void fill(Deadline deadline) {
    for (const symm::LocalMemory* plane : {&rows_, &scales_, &weights_, &sources_})
      EXPECT_TRUE(
          symm::upload(*rank_, plane->as<u8>(), std::vector<u8>(plane->bytes(), kPattern), deadline)
              .ok());
  }
  // Of another dispatch with rows of the same shape.
  void take(const ep::Handle& handle, const ep::Grouped& grouped) {
    got_ = handle.received();
    grouped_ = grouped;
  }
  [[nodiscard]] ep::Expanded to() const {
    return {.places = shape_.places,
            .rows_per_expert = shape_.rows_per_expert,
            .rows = rows_.address(),
            .row_stride = shape_.row_gap == 0 ? 0 : row_stride_,
            .scales = got_.scales == nullptr ? nullptr : scales_.address(),
            .scales_by_column = shape_.scales_by_column,
            .weights = shape_.weights ? weights_.as<float>() : nullptr,
            .sources = sources_.as<ep::Source>()};
  }
  // Every place: the row it should have, zeroes, or what was there before.
  void check(Deadline deadline) const {
    const auto ends = get(got_.source_ends, shape_.world, deadline);
    const u64 num_rows = ends.back();
    const Host host{
        .rows = get(static_cast<const u8*>(got_.rows), num_rows * got_.row_bytes, deadline),
        .scales = got_.scales == nullptr
                      ? std::vector<u32>{}
                      : get(static_cast<const u32*>(got_.scales), scale_words(num_rows), deadline),
        .weights = get(got_.weights, num_rows * shape_.top_k, deadline),
        .tokens = get(got_.tokens, num_rows, deadline),
        .ends = ends,
        .out_rows = get(rows_.as<u8>(), shape_.places * row_stride_, deadline),
        .out_scales = get(scales_.as<u32>(), columns_ * got_.scale_bytes / 4, deadline),
        .out_weights = get(weights_.as<float>(), shape_.places, deadline),
        .out_sources = get(sources_.as<ep::Source>(), shape_.places, deadline)};
    auto ids = get(got_.ids, num_rows * shape_.top_k, deadline);
    for (u64 choice = 0; choice < ids.size(); ++choice)
      if (const u64 row = choice / shape_.top_k; row >= ends[source_of(host, row)])
        ids[choice] = -1;  // a gap
    const auto counts = get(got_.expert_counts, shape_.experts, deadline);
    const auto aligned = get(grouped_.aligned_counts, shape_.experts, deadline);
    std::vector<bool> used(shape_.places, false);
    u64 packed = 0;
    for (u32 e = 0; e < shape_.experts; ++e) {
      u64 at = shape_.rows_per_expert == 0 ? packed : u64{e} * shape_.rows_per_expert;
      u32 n = 0;
      for (u64 choice = 0; choice < ids.size(); ++choice) {
        if (ids[choice] != static_cast<i32>(e)) continue;
        used[at + n] = true;
        ASSERT_NO_FATAL_FAILURE(check_copy(host, at + n, choice)) << "expert " << e << " " << n;
        ++n;
      }
      ASSERT_EQ(counts[e], n);
      ASSERT_EQ(aligned[e], device::round_up(n, shape_.alignment));
      packed += aligned[e];
      u32 end = aligned[e];
      if (shape_.rows_per_expert != 0) end = std::min(end, shape_.rows_per_expert);
      for (; n < end; ++n) {
        used[at + n] = true;
        ASSERT_NO_FATAL_FAILURE(check_padding(host, at + n)) << "expert " << e << " padding " << n;
      }
    }
    for (u64 place = 0; place < shape_.places; ++place)
      if (!used[place]) {
        ASSERT_NO_FATAL_FAILURE(check_untouched(host, place)) << place;
      }
  }

 private:
  using u8 = device::u8;
  using u32 = device::u32;
  using u64 = device::u64;
  using i32 = device::i32;
  static constexpr u8 kPattern = 0x5a;
  struct Host {
    std::vector<u8> rows;
    std::vector<u32> scales;
    std::vector<float> weights;
    std::vector<u32> tokens;
    std::vector<u32> ends;
    std::vector<u8> out_rows;
    std::vector<u32> out_scales;
    std::vector<float> out_weights;
    std::vector<ep::Source> out_sources;
  };

  template <class T>
  std::vector<T> get(const T* from, u64 count, Deadline deadline) const {
    return symm::download(*rank_, from, count, deadline).value();
  }
  // Whose row, or gap, it is.
  [[nodiscard]] u64 source_of(const Host& h, u64 row) const {
    if (got_.source_stride != 0) return row / got_.source_stride;
    u64 source = 0;
    while (h.ends[source] <= row)
      ++source;
    return source;
  }
  [[nodiscard]] u64 scale_words(u64 rows) const {
    return got_.scale_columns == 0 ? rows * (got_.scale_bytes / 4)
                                   : u64{got_.scale_columns} * (got_.scale_bytes / 4);
  }
  [[nodiscard]] u32 scale_at(const Host& h, u64 place, u32 word) const {
    return shape_.scales_by_column ? h.out_scales[word * columns_ + place]
                                   : h.out_scales[place * (got_.scale_bytes / 4) + word];
  }
  // Everything at a place is `value` in each byte.
  void check_bytes(const Host& h, u64 place, u8 value) const {
    const u8* row = &h.out_rows[place * row_stride_];
    const auto differs = [value](u8 byte) { return byte != value; };
    ASSERT_EQ(std::find_if(row, row + got_.row_bytes, differs) - row, got_.row_bytes)
        << "the first byte that is not " << u32{value};
    const u32 word = value * 0x01010101u;
    for (u32 i = 0; got_.scales != nullptr && i < got_.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(h, place, i), word) << "scale " << i;
    if (shape_.weights) {
      ASSERT_EQ(device::bit_cast<u32>(h.out_weights[place]), word);
    }
  }
  void check_padding(const Host& h, u64 place) const {
    ASSERT_NO_FATAL_FAILURE(check_bytes(h, place, 0));
    ASSERT_EQ(h.out_sources[place].rank, -1);
    ASSERT_EQ(h.out_sources[place].token, -1);
    ASSERT_NO_FATAL_FAILURE(check_gap(h, place));
  }
  void check_untouched(const Host& h, u64 place) const {
    ASSERT_NO_FATAL_FAILURE(check_bytes(h, place, kPattern));
    ASSERT_EQ(static_cast<u32>(h.out_sources[place].rank), kPattern * 0x01010101u);
  }
  void check_gap(const Host& h, u64 place) const {
    for (u64 i = got_.row_bytes; i < row_stride_; ++i)
      ASSERT_EQ(h.out_rows[place * row_stride_ + i], kPattern) << "between rows";
  }
  void check_copy(const Host& h, u64 place, u64 choice) const {
    const u64 row = choice / shape_.top_k;
    const u8* sent = &h.rows[row * got_.row_bytes];
    ASSERT_EQ(
        std::mismatch(sent, sent + got_.row_bytes, &h.out_rows[place * row_stride_]).first - sent,
        got_.row_bytes)
        << "the first byte that is not that of row " << row;
    for (u32 i = 0; got_.scales != nullptr && i < got_.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(h, place, i), got_.scale_columns == 0
                                           ? h.scales[row * (got_.scale_bytes / 4) + i]
                                           : h.scales[u64{i} * got_.scale_columns + row])
          << "scale " << i << " of row " << row;
    if (shape_.weights) {
      ASSERT_EQ(h.out_weights[place], h.weights[choice]);
    }
    ASSERT_EQ(h.out_sources[place].rank, static_cast<i32>(source_of(h, row)));
    ASSERT_EQ(h.out_sources[place].token, static_cast<i32>(h.tokens[row]));
    ASSERT_NO_FATAL_FAILURE(check_gap(h, place));
  }

  symm::Rank* rank_;
  ep::Received got_;
  ep::Grouped grouped_;
  EpExpandedShape shape_;
  u64 row_stride_ = 0;
  u64 columns_ = 0;
  symm::LocalMemory rows_, scales_, weights_, sources_;
};

}  // namespace crossdock::testing
