// SPDX-License-Identifier: Apache-2.0
#include "wire/segment.hpp"

#include <gtest/gtest.h>
#include <numeric>

#include "support/wire_samples.hpp"

namespace crossdock::wire {
namespace {

std::vector<RegionEntry> regions(std::uint32_t n) {
  std::vector<RegionEntry> out;
  for (std::uint32_t i = 0; i < n; ++i)
    out.push_back(test::sample_region(i));
  return out;
}

SegmentPage page_of(const std::vector<std::byte>& bytes) {
  FrameReader reader;
  reader.feed(bytes);
  return expect<SegmentPage>(**reader.next()).value();
}

TEST(Segment, AHundredThousandRegionsTravelInPages) {
  const auto sent = regions(100'000);
  const auto frames = encode_segment(7, sent).value();
  EXPECT_GT(frames.size(), 10u);
  EXPECT_LT(frames.size(), 100u);
  SegmentAssembler assembler;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    EXPECT_LE(frames[i].size(), kFrameHeaderBytes + kMaxFramePayload);
    EXPECT_EQ(assembler.add(page_of(frames[i])).value(), i + 1 == frames.size());
  }
  EXPECT_EQ(assembler.version(), 7u);
  EXPECT_TRUE(assembler.take() == sent);
}

TEST(Segment, TheLargestEntriesStillFit) {
  std::vector<RegionEntry> sent(500);
  for (RegionEntry& region : sent) {
    region.label = std::string(kMaxRegionLabelBytes, 'l');
    region.keys.assign(kMaxRegionKeys,
                       {.transport = 1, .blob = std::string(kMaxKeyBlobBytes, 'k')});
  }
  SegmentAssembler assembler;
  const auto frames = encode_segment(1, sent).value();
  for (const auto& frame : frames)
    ASSERT_TRUE(assembler.add(page_of(frame)).ok());
  ASSERT_TRUE(assembler.complete());
  EXPECT_TRUE(assembler.take() == sent);
}

TEST(Segment, AnEmptySegmentIsOnePage) {
  const auto frames = encode_segment(3, {}).value();
  ASSERT_EQ(frames.size(), 1u);
  SegmentAssembler assembler;
  EXPECT_TRUE(assembler.add(page_of(frames[0])).value());
  EXPECT_TRUE(assembler.take().empty());
}

TEST(Segment, PagesOutOfOrderAreRefused) {
  const SegmentPage first{.version = 1, .first = 0, .total = 3, .regions = regions(1)};
  const SegmentPage skipped{.version = 1, .first = 2, .total = 3, .regions = regions(1)};
  const SegmentPage other_version{.version = 2, .first = 1, .total = 3, .regions = regions(1)};
  const SegmentPage other_total{.version = 1, .first = 1, .total = 4, .regions = regions(1)};
  const SegmentPage empty{.version = 1, .first = 1, .total = 3, .regions = {}};
  const SegmentPage too_many{.version = 1, .first = 1, .total = 3, .regions = regions(3)};
  SegmentAssembler never_started;
  EXPECT_EQ(never_started.add(skipped).code(), Code::kCorrupt);
  for (const SegmentPage& bad : {skipped, other_version, other_total, empty, too_many}) {
    SegmentAssembler assembler;
    ASSERT_FALSE(assembler.add(first).value());
    EXPECT_EQ(assembler.add(bad).code(), Code::kCorrupt) << bad.first << " of " << bad.total;
  }
}

TEST(Segment, ANewVersionStartsOver) {
  SegmentAssembler assembler;
  ASSERT_FALSE(
      assembler.add({.version = 1, .first = 0, .total = 3, .regions = regions(1)}).value());
  ASSERT_TRUE(assembler.add({.version = 2, .first = 0, .total = 1, .regions = regions(1)}).value());
  EXPECT_EQ(assembler.version(), 2u);
}

TEST(Segment, LaterChangesArePagedToo) {
  EXPECT_TRUE(encode_regions_added(1, {}).value().empty());
  const auto frames = encode_regions_added(2, regions(20'000)).value();
  std::size_t total = 0;
  for (const auto& bytes : frames) {
    FrameReader reader;
    reader.feed(bytes);
    total += expect<RegionAdded>(**reader.next())->regions.size();
  }
  EXPECT_EQ(total, 20'000u);
  std::vector<std::uint32_t> ids(kMaxRegionIds * 2 + 1);
  std::iota(ids.begin(), ids.end(), 0u);
  EXPECT_EQ(encode_regions_removed(3, ids).value().size(), 3u);
}

TEST(Segment, AnOverlongLabelIsTheCallersMistake) {
  const std::vector<RegionEntry> bad{{.label = std::string(65, 'x')}};
  EXPECT_EQ(encode_segment(1, bad).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace crossdock::wire
