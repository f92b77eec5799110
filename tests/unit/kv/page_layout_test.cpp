// Layout arithmetic against a naive reference that knows only the definition of each layout: every
// element of the destination shard must get the element of the same (layer, plane, token, head) of
// the source, exactly once, over random geometries.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <random>

#include <crossdock/kv/page_layout.hpp>

namespace crossdock::kv {
namespace {

struct Element {
  std::uint32_t layer, page, plane, token, head;  // head counted inside the shard
};

// The definition, index by index, as the header pictures it.
std::size_t reference_row(const PageLayout& layout, const Element& e) {
  const auto& o = layout.options();
  const std::size_t layers = layout.shape().num_layers;
  const std::size_t planes = layout.shape().num_planes();
  const std::size_t pages = o.num_pages;
  std::size_t cell = 0;
  if (o.order == PoolOrder::kLayerFirst && o.planes == Planes::kJoined)
    cell = (e.layer * pages + e.page) * planes + e.plane;
  else if (o.order == PoolOrder::kLayerFirst)
    cell = (e.layer * planes + e.plane) * pages + e.page;
  else if (o.planes == Planes::kJoined)
    cell = (e.page * layers + e.layer) * planes + e.plane;
  else
    cell = (e.plane * pages + e.page) * layers + e.layer;
  const std::size_t heads = layout.heads().count;
  const std::size_t row = o.cell == CellOrder::kTokenMajor ? e.token * heads + e.head
                                                           : e.head * o.page_tokens + e.token;
  return (cell * heads * o.page_tokens + row) * layout.shape().row_bytes();
}

class Dice {
 public:
  explicit Dice(std::uint32_t seed) : random_(seed) {}
  std::uint32_t roll(std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(random_);
  }
  std::vector<PageId> distinct_pages(std::uint32_t count, std::uint32_t of) {
    std::vector<PageId> all(of);
    std::iota(all.begin(), all.end(), 0u);
    // Half of the time contiguous, so that merging is exercised.
    if (roll(0, 1) == 0) std::shuffle(all.begin(), all.end(), random_);
    all.resize(count);
    return all;
  }

 private:
  std::mt19937 random_;
};

std::uint32_t random_tp(Dice& dice, std::uint32_t heads) {
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t tp = 1; tp <= heads; ++tp)
    if (heads % tp == 0) sizes.push_back(tp);
  sizes.push_back(heads * 2);
  sizes.push_back(heads * 3);
  return sizes[dice.roll(0, static_cast<std::uint32_t>(sizes.size()) - 1)];
}

LayoutOptions random_layout(Dice& dice, std::uint32_t page_tokens, std::uint32_t tp) {
  return {.num_pages = dice.roll(3, 7),
          .page_tokens = page_tokens,
          .order = static_cast<PoolOrder>(dice.roll(0, 1)),
          .planes = static_cast<Planes>(dice.roll(0, 1)),
          .cell = static_cast<CellOrder>(dice.roll(0, 1)),
          .tp_size = tp,
          .tp_rank = dice.roll(0, tp - 1)};
}

// Applies the runs of one source rank to `owner`, which maps each destination byte to
// (source rank, source offset) + 1; counts bytes that were covered twice.
std::size_t apply(const std::vector<CopyRun>& runs, std::uint32_t rank,
                  std::vector<std::uint64_t>& owner) {
  std::size_t twice = 0;
  for (const CopyRun& run : runs) {
    for (std::size_t i = 0; i < run.length; ++i) {
      twice += owner.at(run.destination + i) != 0;
      owner[run.destination + i] = (std::uint64_t{rank} << 32) + run.source + i + 1;
    }
  }
  return twice;
}

TEST(PageLayout, EveryRowIsWhereTheDefinitionSays) {
  Dice dice(7);
  for (int round = 0; round < 200; ++round) {
    ModelShape shape{"t",  dice.roll(1, 3), dice.roll(1, 6), dice.roll(1, 5), dice.roll(1, 2),
                     false};
    if (dice.roll(0, 3) == 0) shape.latent = true, shape.num_kv_heads = 1;
    const auto options = random_layout(dice, dice.roll(1, 4), random_tp(dice, shape.num_kv_heads));
    const auto layout = PageLayout::create(shape, options);
    ASSERT_TRUE(layout.ok()) << layout.error().describe();
    const Element e{dice.roll(0, shape.num_layers - 1), dice.roll(0, options.num_pages - 1),
                    dice.roll(0, shape.num_planes() - 1), dice.roll(0, options.page_tokens - 1),
                    dice.roll(0, layout->heads().count - 1)};
    const std::size_t offset = layout->cell_offset(e.layer, e.page, e.plane) +
                               layout->row_offset(e.token, layout->heads().first + e.head);
    EXPECT_EQ(offset, reference_row(*layout, e)) << layout->describe();
  }
}

struct Geometry {
  ModelShape shape;
  LayoutOptions source, destination;
  std::vector<PageId> source_pages, destination_pages;
};

Geometry random_geometry(Dice& dice) {
  Geometry g;
  g.shape = {"t", dice.roll(1, 3), dice.roll(1, 8), dice.roll(1, 3), dice.roll(1, 2), false};
  if (dice.roll(0, 4) == 0) g.shape.latent = true, g.shape.num_kv_heads = 1;
  const std::uint32_t tokens = dice.roll(1, 4);
  g.source = random_layout(dice, tokens, random_tp(dice, g.shape.num_kv_heads));
  g.destination = random_layout(dice, tokens, random_tp(dice, g.shape.num_kv_heads));
  const std::uint32_t count = dice.roll(1, 3);
  g.source_pages = dice.distinct_pages(count, g.source.num_pages);
  g.destination_pages = dice.distinct_pages(count, g.destination.num_pages);
  return g;
}

// Moves all layers from every source rank that the plan names to one destination rank.
void move_all(const Geometry& g, const PageLayout& destination, std::vector<std::uint64_t>& owner) {
  const auto plan =
      plan_shards(g.shape, g.source.tp_size, g.destination.tp_size, g.destination.tp_rank);
  ASSERT_TRUE(plan.ok()) << plan.error().describe();
  for (const ShardPart& part : *plan) {
    LayoutOptions options = g.source;
    options.tp_rank = part.source_rank;
    const auto source = PageLayout::create(g.shape, options);
    ASSERT_TRUE(source.ok());
    for (std::uint32_t layer = 0; layer < g.shape.num_layers; ++layer) {
      std::vector<CopyRun> runs;
      ASSERT_TRUE(append_copy_runs(*source, destination,
                                   {layer, g.source_pages, g.destination_pages, part.heads}, runs)
                      .ok());
      EXPECT_EQ(apply(runs, part.source_rank, owner), 0u) << "bytes covered twice";
    }
  }
}

// The offset in the source shard `rank` of the row that must arrive at `e` of the destination.
std::size_t expected_source(const Geometry& g, std::uint32_t rank, std::uint32_t model_head,
                            Element e, std::size_t page_index) {
  LayoutOptions options = g.source;
  options.tp_rank = rank;
  const auto source = PageLayout::create(g.shape, options);
  e.page = g.source_pages[page_index];
  e.head = model_head - source->heads().first;
  return reference_row(*source, e);
}

void expect_exact(const Geometry& g, const PageLayout& destination,
                  const std::vector<std::uint64_t>& owner) {
  const std::size_t row = g.shape.row_bytes();
  std::size_t covered = 0;
  for (std::size_t i = 0; i < g.destination_pages.size(); ++i) {
    const std::uint32_t rows = g.shape.num_layers * g.shape.num_planes() *
                               g.destination.page_tokens * destination.heads().count;
    for (std::uint32_t n = 0; n < rows; ++n) {
      std::uint32_t rest = n;
      const auto digit = [&rest](std::uint32_t base) {
        const std::uint32_t value = rest % base;
        rest /= base;
        return value;
      };
      Element e{digit(g.shape.num_layers), g.destination_pages[i], digit(g.shape.num_planes()),
                digit(g.destination.page_tokens), digit(destination.heads().count)};
      const std::size_t at = reference_row(destination, e);
      ASSERT_NE(owner[at], 0u) << "row never covered";
      const auto rank = static_cast<std::uint32_t>(owner[at] >> 32);
      const std::size_t from = expected_source(g, rank, destination.heads().first + e.head, e, i);
      for (std::size_t b = 0; b < row; ++b)
        ASSERT_EQ(owner[at + b], (std::uint64_t{rank} << 32) + from + b + 1);
      covered += row;
    }
  }
  const auto touched = std::count_if(owner.begin(), owner.end(), [](auto o) { return o != 0; });
  EXPECT_EQ(static_cast<std::size_t>(touched), covered)
      << "bytes outside of the pages were written";
}

TEST(PageLayout, ReslicingCoversEveryDestinationByteExactlyOnce) {
  Dice dice(20'261);
  for (int round = 0; round < 400; ++round) {
    const Geometry g = random_geometry(dice);
    const auto destination = PageLayout::create(g.shape, g.destination);
    ASSERT_TRUE(destination.ok());
    std::vector<std::uint64_t> owner(destination->pool_bytes(), 0);
    move_all(g, *destination, owner);
    expect_exact(g, *destination, owner);
    if (testing::Test::HasFailure()) FAIL() << "round " << round << ": " << destination->describe();
  }
}

TEST(PageLayout, DestinationsAreTheInverseOfThePlan) {
  const ModelShape shape{"t", 1, 8, 4, 2, false};
  for (const std::uint32_t from : {1u, 2u, 4u, 8u, 16u}) {
    for (const std::uint32_t to : {1u, 2u, 4u, 8u, 16u, 32u}) {
      std::size_t pairs = 0;
      for (std::uint32_t rank = 0; rank < from; ++rank)
        pairs += destinations_of(shape, from, rank, to)->size();
      std::size_t planned = 0;
      for (std::uint32_t rank = 0; rank < to; ++rank)
        planned += plan_shards(shape, from, to, rank)->size();
      EXPECT_EQ(pairs, planned) << from << " -> " << to;
    }
  }
}

TEST(PageLayout, NeighbourPagesMergeIntoOneRun) {
  const ModelShape shape{"t", 2, 4, 8, 2, false};
  const auto layout = PageLayout::create(shape, {.num_pages = 8, .page_tokens = 4});
  ASSERT_TRUE(layout.ok());
  const std::vector<PageId> pages{2, 3, 4};
  std::vector<CopyRun> runs;
  ASSERT_TRUE(append_copy_runs(*layout, *layout, {1, pages, pages, {0, 4}}, runs).ok());
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].length, 3u * 2 * layout->cell_bytes());
}

TEST(PageLayout, RefusesWhatDoesNotFitWithASentence) {
  const ModelShape shape{"t", 2, 4, 8, 2, false};
  const auto odd = PageLayout::create(shape, {.num_pages = 1, .tp_size = 3});
  ASSERT_EQ(odd.code(), Code::kInvalidArgument);
  EXPECT_THAT(odd.error().message, testing::HasSubstr("must divide the 4 KV heads"));
  EXPECT_EQ(PageLayout::create(shape, {.num_pages = 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(PageLayout::create(shape, {.num_pages = 1, .page_tokens = 0}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(PageLayout::create(shape, {.num_pages = 1, .tp_size = 2, .tp_rank = 2}).code(),
            Code::kInvalidArgument);
  const ModelShape huge{"t", 4096, 4096, 65536, 8, false};
  EXPECT_EQ(PageLayout::create(huge, {.num_pages = UINT32_MAX, .page_tokens = 65536}).code(),
            Code::kInvalidArgument);
}

TEST(PageLayout, BadPlansAppendNothing) {
  const ModelShape shape{"t", 2, 4, 8, 2, false};
  const auto layout = PageLayout::create(shape, {.num_pages = 4, .tp_size = 2});
  ASSERT_TRUE(layout.ok());
  const std::vector<PageId> good{0, 1}, outside{0, 4}, shorter{0};
  std::vector<CopyRun> runs;
  const CopyPlan bad[] = {{0, good, shorter, {0, 2}},      {0, good, outside, {0, 2}},
                          {0, outside, good, {0, 2}},      {2, good, good, {0, 2}},
                          {0, good, good, {0, 3}},         {0, good, good, {0, 0}},
                          {0, good, good, {UINT32_MAX, 2}}};
  for (const CopyPlan& plan : bad)
    EXPECT_EQ(append_copy_runs(*layout, *layout, plan, runs).code(), Code::kInvalidArgument);
  EXPECT_TRUE(runs.empty());
  const auto other = PageLayout::create(shape, {.num_pages = 4, .page_tokens = 32, .tp_size = 2});
  EXPECT_EQ(append_copy_runs(*layout, *other, {0, good, good, {0, 2}}, runs).code(),
            Code::kIncompatible);
}

}  // namespace
}  // namespace crossdock::kv
