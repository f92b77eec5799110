// Strides of the four pool layouts, shard plans between tensor-parallel sizes, and the cutting of
// page copies into contiguous runs. Pure functions; nothing here touches the memory of a pool.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include <crossdock/kv/page_layout.hpp>

namespace crossdock::kv {
inline namespace v1 {
namespace {

constexpr std::size_t kLargestPool = std::size_t{1} << 48;
constexpr std::uint32_t kLongestPage = 65536;
constexpr std::uint32_t kLargestTp = 4096;

Result<> check_options(const LayoutOptions& options) {
  if (options.num_pages == 0)
    return invalid_argument("page layout: num_pages = 0 must be at least 1");
  if (options.page_tokens == 0 || options.page_tokens > kLongestPage)
    return invalid_argument(fmt::format("page layout: page_tokens = {} must be between 1 and {}",
                                        options.page_tokens, kLongestPage));
  return {};
}

// Merges with the last run when the bytes continue on both sides.
void append_run(std::vector<CopyRun>& runs, std::size_t first_own, const CopyRun& run) {
  if (runs.size() > first_own) {
    CopyRun& last = runs.back();
    if (last.source + last.length == run.source &&
        last.destination + last.length == run.destination) {
      last.length += run.length;
      return;
    }
  }
  runs.push_back(run);
}

// Whether [heads] of a cell is one contiguous piece of it.
bool whole_cell(const PageLayout& layout, HeadRange heads) {
  return layout.heads() == heads;
}

Result<> check_pages(const PageLayout& layout, std::span<const PageId> pages, const char* side) {
  for (const PageId page : pages)
    if (page >= layout.options().num_pages)
      return invalid_argument(fmt::format("copy plan: {} page {} is outside the pool of {} pages",
                                          side, page, layout.options().num_pages));
  return {};
}

Result<> check_heads(const PageLayout& layout, HeadRange heads, const char* side) {
  const HeadRange held = layout.heads();
  if (heads.count >= 1 && heads.first >= held.first && heads.count <= held.count &&
      heads.first - held.first <= held.count - heads.count)
    return {};
  return invalid_argument(
      fmt::format("copy plan: heads [{}, +{}) are not all in the {} shard, "
                  "which holds [{}, +{})",
                  heads.first, heads.count, side, held.first, held.count));
}

// How the rows of a head range travel between two cells.
enum class Grain : std::uint8_t { kCell, kHead, kToken, kRow };

Grain grain_of(const PageLayout& source, const PageLayout& destination, HeadRange heads) {
  if (source.options().cell != destination.options().cell) return Grain::kRow;
  if (source.options().cell == CellOrder::kHeadMajor) return Grain::kHead;
  return whole_cell(source, heads) && whole_cell(destination, heads) ? Grain::kCell : Grain::kToken;
}

// Cutter: the loop over one cell, at the coarsest grain that both layouts share.
struct Cutter {
  const PageLayout& source;
  const PageLayout& destination;
  HeadRange heads;
  std::vector<CopyRun>& runs;
  std::size_t first_own;
  Grain grain;

  void piece(CopyRun cell, std::uint32_t token, std::uint32_t head, std::size_t length) const {
    append_run(runs, first_own,
               {cell.source + source.row_offset(token, head),
                cell.destination + destination.row_offset(token, head), length});
  }

  void cut(CopyRun cell) const {
    const std::size_t row = source.shape().row_bytes();
    const std::uint32_t tokens = source.options().page_tokens;
    if (grain == Grain::kCell || grain == Grain::kHead) {
      // Head major: the heads of the range follow each other with all their tokens.
      piece(cell, 0, heads.first, row * tokens * heads.count);
      return;
    }
    for (std::uint32_t token = 0; token < tokens; ++token) {
      if (grain == Grain::kToken) {
        piece(cell, token, heads.first, row * heads.count);
        continue;
      }
      for (std::uint32_t i = 0; i < heads.count; ++i)
        piece(cell, token, heads.first + i, row);
    }
  }
};

Result<> check_plan(const PageLayout& source, const PageLayout& destination, const CopyPlan& plan) {
  CROSSDOCK_CHECK_OK(check_compatible(source, destination));
  if (plan.source_pages.size() != plan.destination_pages.size())
    return invalid_argument(
        fmt::format("copy plan: {} source pages but {} destination pages; the lists pair up",
                    plan.source_pages.size(), plan.destination_pages.size()));
  if (plan.layer >= source.shape().num_layers)
    return invalid_argument(fmt::format("copy plan: layer {} of a model with {} layers", plan.layer,
                                        source.shape().num_layers));
  CROSSDOCK_CHECK_OK(check_heads(source, plan.heads, "source"));
  CROSSDOCK_CHECK_OK(check_heads(destination, plan.heads, "destination"));
  CROSSDOCK_CHECK_OK(check_pages(source, plan.source_pages, "source"));
  return check_pages(destination, plan.destination_pages, "destination");
}

}  // namespace

Result<PageLayout> PageLayout::create(const ModelShape& shape, const LayoutOptions& options) {
  CROSSDOCK_CHECK_OK(validate(shape));
  CROSSDOCK_CHECK_OK(check_options(options));
  CROSSDOCK_TRY(heads, heads_of_rank(shape, options.tp_size, options.tp_rank));
  PageLayout layout;
  layout.shape_ = shape;
  layout.options_ = options;
  layout.heads_ = heads;
  const std::size_t cell = shape.row_bytes() * heads.count * options.page_tokens;
  const std::size_t planes = shape.num_planes();
  layout.cell_bytes_ = cell;
  if (layout.page_bytes() > kLargestPool / options.num_pages)
    return invalid_argument(
        fmt::format("page layout: {} pages of {} bytes exceed the limit of 2^48 bytes",
                    options.num_pages, layout.page_bytes()));
  const std::size_t pages = options.num_pages;
  const std::size_t layers = shape.num_layers;
  const bool joined = options.planes == Planes::kJoined;
  if (options.order == PoolOrder::kLayerFirst) {
    layout.layer_stride_ = pages * planes * cell;
    layout.page_stride_ = joined ? planes * cell : cell;
    layout.plane_stride_ = joined ? cell : pages * cell;
  } else {
    layout.layer_stride_ = joined ? planes * cell : cell;
    layout.page_stride_ = layers * layout.layer_stride_;
    layout.plane_stride_ = joined ? cell : pages * layers * cell;
  }
  return layout;
}

std::string PageLayout::describe() const {
  return fmt::format("{}; {} pages of {} tokens, {} first, {}, {} major, rank {} of {}",
                     shape_.describe(), options_.num_pages, options_.page_tokens,
                     options_.order == PoolOrder::kLayerFirst ? "layer" : "block",
                     options_.planes == Planes::kJoined ? "joined" : "split",
                     options_.cell == CellOrder::kTokenMajor ? "token" : "head", options_.tp_rank,
                     options_.tp_size);
}

Result<HeadRange> heads_of_rank(const ModelShape& shape, std::uint32_t tp_size,
                                std::uint32_t rank) {
  const std::uint32_t heads = shape.num_kv_heads;
  if (tp_size == 0 || tp_size > kLargestTp || rank >= tp_size)
    return invalid_argument(fmt::format(
        "tensor parallel rank {} of {}: the rank must be below the size, which is 1 to {}", rank,
        tp_size, kLargestTp));
  if (tp_size <= heads ? heads % tp_size != 0 : tp_size % heads != 0)
    return invalid_argument(
        fmt::format("tensor parallel size {} must divide the {} KV heads or be a multiple of them",
                    tp_size, heads));
  if (tp_size <= heads) return HeadRange{rank * (heads / tp_size), heads / tp_size};
  return HeadRange{rank / (tp_size / heads), 1};
}

Result<std::vector<ShardPart>> plan_shards(const ModelShape& shape, std::uint32_t source_tp,
                                           std::uint32_t destination_tp,
                                           std::uint32_t destination_rank) {
  CROSSDOCK_TRY(wanted, heads_of_rank(shape, destination_tp, destination_rank));
  CROSSDOCK_TRY(first_shard, heads_of_rank(shape, source_tp, 0));
  const std::uint32_t copies = source_tp > shape.num_kv_heads ? source_tp / shape.num_kv_heads : 1;
  std::vector<ShardPart> parts;
  for (std::uint32_t head = wanted.first; head < wanted.first + wanted.count;) {
    const std::uint32_t shard = head / first_shard.count;
    const std::uint32_t shard_end = (shard + 1) * first_shard.count;
    const std::uint32_t end = std::min(shard_end, wanted.first + wanted.count);
    parts.push_back({shard * copies + destination_rank % copies, {head, end - head}});
    head = end;
  }
  return parts;
}

Result<std::vector<std::uint32_t>> destinations_of(const ModelShape& shape, std::uint32_t source_tp,
                                                   std::uint32_t source_rank,
                                                   std::uint32_t destination_tp) {
  CROSSDOCK_CHECK_OK(heads_of_rank(shape, source_tp, source_rank));
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < destination_tp; ++rank) {
    CROSSDOCK_TRY(parts, plan_shards(shape, source_tp, destination_tp, rank));
    const bool sends = std::any_of(parts.begin(), parts.end(), [&](const ShardPart& part) {
      return part.source_rank == source_rank;
    });
    if (sends) ranks.push_back(rank);
  }
  return ranks;
}

Result<> check_compatible(const PageLayout& source, const PageLayout& destination) {
  if (source.shape().same_bytes(destination.shape()) &&
      source.options().page_tokens == destination.options().page_tokens)
    return {};
  return make_error(Code::kIncompatible,
                    fmt::format("the two pools hold different caches: source {}; destination {}",
                                source.describe(), destination.describe()));
}

Result<> append_copy_runs(const PageLayout& source, const PageLayout& destination,
                          const CopyPlan& plan, std::vector<CopyRun>& runs) {
  CROSSDOCK_CHECK_OK(check_plan(source, destination, plan));
  const Cutter cutter{source, destination, plan.heads,
                      runs,   runs.size(), grain_of(source, destination, plan.heads)};
  const std::uint32_t planes = source.shape().num_planes();
  const auto cut = [&](std::size_t i, std::uint32_t plane) {
    cutter.cut({source.cell_offset(plan.layer, plan.source_pages[i], plane),
                destination.cell_offset(plan.layer, plan.destination_pages[i], plane), 0});
  };
  // The order in which neighbours follow each other in memory, so that they merge.
  if (source.options().planes == Planes::kSplit) {
    for (std::uint32_t plane = 0; plane < planes; ++plane)
      for (std::size_t i = 0; i < plan.source_pages.size(); ++i)
        cut(i, plane);
  } else {
    for (std::size_t i = 0; i < plan.source_pages.size(); ++i)
      for (std::uint32_t plane = 0; plane < planes; ++plane)
        cut(i, plane);
  }
  return {};
}

}  // namespace v1
}  // namespace crossdock::kv
