// PageLayout: where the bytes of a paged KV pool lie, and how the shards of one tensor-parallel
// size map to those of another. Pure arithmetic on offsets; thread-compatible values.
//
//   layer first, joined  [layer][page][plane][cell]      block first, joined
//   [page][layer][plane][cell] layer first, split   [layer][plane][page][cell]      block first,
//   split   [plane][page][layer][cell]
//
// A cell is what one page holds of one layer in one plane (K or V):
//   token major  [token][head][head_dim]     head major  [head][token][head_dim]
// A latent cache (MLA) has one plane; joined and split are then the same.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <crossdock/kv/model_shape.hpp>

namespace crossdock::kv {
inline namespace v1 {

using PageId = std::uint32_t;

enum class PoolOrder : std::uint8_t { kLayerFirst = 0, kBlockFirst = 1 };
enum class Planes : std::uint8_t { kJoined = 0, kSplit = 1 };
enum class CellOrder : std::uint8_t { kTokenMajor = 0, kHeadMajor = 1 };

struct LayoutOptions {
  std::uint32_t num_pages = 0;
  std::uint32_t page_tokens = 16;
  PoolOrder order = PoolOrder::kLayerFirst;
  Planes planes = Planes::kJoined;
  CellOrder cell = CellOrder::kTokenMajor;
  // This pool is that of rank `tp_rank` of `tp_size`. Sizes up to the number of KV heads must
  // divide it; larger ones must be a multiple of it, and then each head is held by several ranks.
  std::uint32_t tp_size = 1;
  std::uint32_t tp_rank = 0;
};

// Heads [first, first + count) of the model.
struct HeadRange {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

class CROSSDOCK_API PageLayout {
 public:
  // kInvalidArgument names rule and value. The pool must be smaller than 2^48 bytes.
  static Result<PageLayout> create(const ModelShape& shape, const LayoutOptions& options);

  [[nodiscard]] const ModelShape& shape() const noexcept { return shape_; }
  [[nodiscard]] const LayoutOptions& options() const noexcept { return options_; }
  // The heads this rank holds.
  [[nodiscard]] HeadRange heads() const noexcept { return heads_; }
  [[nodiscard]] std::size_t cell_bytes() const noexcept { return cell_bytes_; }
  // One page over all layers and planes: what a page of this rank costs.
  [[nodiscard]] std::size_t page_bytes() const noexcept {
    return cell_bytes_ * shape_.num_planes() * shape_.num_layers;
  }
  [[nodiscard]] std::size_t pool_bytes() const noexcept {
    return page_bytes() * options_.num_pages;
  }
  // Offset of a cell from the start of the pool. Arguments must be in range (checked by callers
  // once per batch, not here).
  [[nodiscard]] std::size_t cell_offset(std::uint32_t layer, PageId page,
                                        std::uint32_t plane) const noexcept {
    return layer * layer_stride_ + page * page_stride_ + plane * plane_stride_;
  }
  // Offset of the row of `token` (in the page) and `head` (of the model) inside its cell.
  [[nodiscard]] std::size_t row_offset(std::uint32_t token, std::uint32_t head) const noexcept {
    const std::size_t local = head - heads_.first;
    return options_.cell == CellOrder::kTokenMajor
               ? (token * std::size_t{heads_.count} + local) * shape_.row_bytes()
               : (local * options_.page_tokens + token) * shape_.row_bytes();
  }
  [[nodiscard]] std::string describe() const;

 private:
  PageLayout() = default;
  ModelShape shape_;
  LayoutOptions options_;
  HeadRange heads_;
  std::size_t cell_bytes_ = 0;
  std::size_t layer_stride_ = 0;
  std::size_t page_stride_ = 0;
  std::size_t plane_stride_ = 0;
};

// The heads of `rank` of `tp_size`. kInvalidArgument when the size does not fit the heads.
CROSSDOCK_API Result<HeadRange> heads_of_rank(const ModelShape& shape, std::uint32_t tp_size,
                                              std::uint32_t rank);

// One source shard of one destination shard.
struct ShardPart {
  std::uint32_t source_rank = 0;
  HeadRange heads;
};

// Which ranks of a source of `source_tp` send which heads to `destination_rank` of a destination of
// `destination_tp`. Each head of the destination appears exactly once; where the source holds heads
// several times, destinations spread over the copies.
CROSSDOCK_API Result<std::vector<ShardPart>> plan_shards(const ModelShape& shape,
                                                         std::uint32_t source_tp,
                                                         std::uint32_t destination_tp,
                                                         std::uint32_t destination_rank);

// The destination ranks to which `source_rank` sends anything, ascending; the inverse of the above.
CROSSDOCK_API Result<std::vector<std::uint32_t>> destinations_of(const ModelShape& shape,
                                                                 std::uint32_t source_tp,
                                                                 std::uint32_t source_rank,
                                                                 std::uint32_t destination_tp);

// One contiguous copy between two pools, offsets from the start of each.
struct CopyRun {
  std::size_t source = 0;
  std::size_t destination = 0;
  std::size_t length = 0;
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

// What to copy: page i of `source_pages` to page i of `destination_pages`, for one layer and a
// range of heads that both layouts hold.
struct CopyPlan {
  std::uint32_t layer = 0;
  std::span<const PageId> source_pages;
  std::span<const PageId> destination_pages;
  HeadRange heads;
};

// kIncompatible, naming both, when the layouts disagree on the model's bytes or the page length.
CROSSDOCK_API Result<> check_compatible(const PageLayout& source, const PageLayout& destination);

// Appends the runs of `plan` to `runs`, neighbours merged where both sides are contiguous. Every
// byte of the head range of every destination page is covered exactly once. kInvalidArgument for
// pages, layer or heads out of range, or lists of different lengths; then nothing is appended.
CROSSDOCK_API Result<> append_copy_runs(const PageLayout& source, const PageLayout& destination,
                                        const CopyPlan& plan, std::vector<CopyRun>& runs);

}  // namespace v1
}  // namespace crossdock::kv
