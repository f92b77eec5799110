// A segment (all regions of one engine) as pages that fit a control frame, and back. 100,000
// regions are about 20 pages. No thread, no sockets; SegmentAssembler is single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <crossdock/core/result.hpp>

#include "wire/control.hpp"
#include "wire/frame.hpp"

namespace crossdock::wire {

// Whole frames to send in order. An empty segment is one page with total 0.
[[nodiscard]] Result<std::vector<std::vector<std::byte>>> encode_segment(
    std::uint64_t version, std::span<const RegionEntry> regions);
// RegionAdded frames for regions registered later; none for none.
[[nodiscard]] Result<std::vector<std::vector<std::byte>>> encode_regions_added(
    std::uint64_t version, std::span<const RegionEntry> regions);
// RegionsRemoved frames, at most kMaxRegionIds ids each; none for none.
[[nodiscard]] Result<std::vector<std::vector<std::byte>>> encode_regions_removed(
    std::uint64_t version, std::span<const std::uint32_t> region_ids);

// Collects the pages of one segment version in order. Memory grows with the pages received, never
// with the total a peer claims.
class SegmentAssembler {
 public:
  // True once the segment is complete. kCorrupt for a page out of order or of another version: a
  // new segment starts with first == 0.
  [[nodiscard]] Result<bool> add(SegmentPage page);
  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] std::uint64_t version() const { return version_; }
  // Precondition: complete(). Leaves the assembler empty for the next version.
  [[nodiscard]] std::vector<RegionEntry> take();

 private:
  std::vector<RegionEntry> regions_;
  std::uint64_t version_ = 0;
  std::uint32_t total_ = 0;
  bool started_ = false;
  bool complete_ = false;
};

}  // namespace crossdock::wire
