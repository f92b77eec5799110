// Paging of segments. No state.
// SPDX-License-Identifier: Apache-2.0
#include "wire/segment.hpp"

#include <fmt/format.h>

namespace crossdock::wire {
namespace {

using Frames = std::vector<std::vector<std::byte>>;

// version, first, total, list length
constexpr std::size_t kPageOverhead = 8 + 4 + 4 + 4;

std::size_t encoded_bytes(const RegionEntry& region) {
  std::size_t n = RegionEntry::kMinEncodedBytes + region.label.size();
  for (const RegionKey& key : region.keys)
    n += RegionKey::kMinEncodedBytes + key.blob.size();
  return n;
}

// How many regions from the front fit one frame; at least one, whose own limits the encoder checks.
std::size_t fitting(std::span<const RegionEntry> regions) {
  std::size_t bytes = kPageOverhead;
  std::size_t n = 0;
  while (n < regions.size()) {
    bytes += encoded_bytes(regions[n]);
    if (bytes > kMaxFramePayload && n != 0) break;
    ++n;
  }
  return n;
}

Error out_of_step(std::string message) {
  return Error{.code = Code::kCorrupt,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = std::move(message)};
}

}  // namespace

Result<Frames> encode_segment(std::uint64_t version, std::span<const RegionEntry> regions) {
  if (regions.size() > UINT32_MAX)
    return invalid_argument(
        fmt::format("a segment of {} regions exceeds 2^32 - 1", regions.size()));
  Frames frames;
  std::size_t first = 0;
  do {
    const auto rest = regions.subspan(first);
    const std::size_t n = fitting(rest);
    const SegmentPage page{
        .version = version,
        .first = static_cast<std::uint32_t>(first),
        .total = static_cast<std::uint32_t>(regions.size()),
        .regions = {rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(n)}};
    CROSSDOCK_TRY(frame, encode_frame(page));
    frames.push_back(std::move(frame));
    first += n;
  } while (first < regions.size());
  return frames;
}

Result<Frames> encode_regions_added(std::uint64_t version, std::span<const RegionEntry> regions) {
  Frames frames;
  while (!regions.empty()) {
    const std::size_t n = fitting(regions);
    const RegionAdded added{
        .version = version,
        .regions = {regions.begin(), regions.begin() + static_cast<std::ptrdiff_t>(n)}};
    CROSSDOCK_TRY(frame, encode_frame(added));
    frames.push_back(std::move(frame));
    regions = regions.subspan(n);
  }
  return frames;
}

Result<Frames> encode_regions_removed(std::uint64_t version,
                                      std::span<const std::uint32_t> region_ids) {
  Frames frames;
  while (!region_ids.empty()) {
    const auto ids = region_ids.first(std::min<std::size_t>(region_ids.size(), kMaxRegionIds));
    CROSSDOCK_TRY(frame, encode_frame(RegionsRemoved{.version = version,
                                                     .region_ids = {ids.begin(), ids.end()}}));
    frames.push_back(std::move(frame));
    region_ids = region_ids.subspan(ids.size());
  }
  return frames;
}

Result<bool> SegmentAssembler::add(SegmentPage page) {
  if (page.first == 0) {
    regions_.clear();
    version_ = page.version;
    total_ = page.total;
    started_ = true;
    complete_ = false;
  }
  if (!started_ || complete_ || page.version != version_ || page.total != total_ ||
      page.first != regions_.size())
    return out_of_step(fmt::format(
        "segment page out of order: version {}, first {} of {} after version {}, {} of {} regions",
        page.version, page.first, page.total, version_, regions_.size(), total_));
  if (page.regions.empty() && total_ != 0)
    return out_of_step(fmt::format("empty segment page at region {} of {}", page.first, total_));
  if (page.regions.size() > total_ - page.first)
    return out_of_step(fmt::format("segment page holds {} regions, only {} remain",
                                   page.regions.size(), total_ - page.first));
  regions_.insert(regions_.end(), std::make_move_iterator(page.regions.begin()),
                  std::make_move_iterator(page.regions.end()));
  complete_ = regions_.size() == total_;
  return complete_;
}

std::vector<RegionEntry> SegmentAssembler::take() {
  started_ = complete_ = false;
  return std::exchange(regions_, {});
}

}  // namespace crossdock::wire
