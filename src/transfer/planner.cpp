// See planner.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/planner.hpp"

#include <algorithm>
#include <fmt/format.h>

namespace crossdock::transfer::detail {
namespace {

constexpr std::uint64_t kMinShardBytes = 256 * 1024;
constexpr std::size_t kMaxShardSlices = 4096;

// Contiguous on both sides, inside one pair of regions.
struct Run {
  std::byte* local = nullptr;
  std::uint64_t remote = 0;
  std::uint64_t length = 0;
  const transport::RemoteRegion* region = nullptr;
};

// Consecutive slices of one direction for one set of rails.
struct Group {
  Op op = Op::kWrite;
  std::shared_ptr<RailSet> set;
  std::size_t first = 0;
  std::uint64_t bytes = 0;
};

std::string range_text(std::uint64_t address, std::uint64_t length) {
  return fmt::format("[{:#x}, +{})", address, length);
}

class Planner {
 public:
  Planner(const mem::RegionTable& regions, PeerCore& peer, const Settings& settings,
          TransferCore& transfer)
      : regions_(regions),
        peer_(peer),
        settings_(settings),
        transfer_(transfer),
        remote_(peer.regions().snapshot()) {}

  Result<> add_all(std::span<const Request> batch, Op op) {
    run_ = {};
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].op != op) continue;
      if (auto added = add(batch[i]); !added.ok()) {
        Error error = std::move(added).error();
        error.message = fmt::format("request {} of {}: {}", i, batch.size(), error.message);
        return error;
      }
    }
    cut_run();
    group_open_ = false;
    return {};
  }

  void make_shards(Plan& plan) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::size_t end =
          g + 1 < groups_.size() ? groups_[g + 1].first : transfer_.slices.size();
      cut_group(groups_[g], end, plan);
    }
  }

 private:
  Result<> add(const Request& request) {
    if (request.length == 0)
      return invalid_argument("length is 0; a request moves at least 1 byte");
    if (request.local == nullptr) return invalid_argument("the local address is null");
    CROSSDOCK_CHECK_OK(use_local(request));
    CROSSDOCK_CHECK_OK(use_remote(request));
    CROSSDOCK_CHECK_OK(use_rails(request.op));
    append(request);
    return {};
  }

  // Most requests of a batch hit the region of the one before.
  Result<> use_local(const Request& request) {
    const auto address = reinterpret_cast<std::uint64_t>(request.local);
    if (local_ != nullptr && local_->contains(address, request.length)) return {};
    auto lease = regions_.lease_local(address, request.length);
    if (!lease.ok()) {
      Error error = std::move(lease).error();
      error.message = "local memory: " + error.message;
      return error;
    }
    local_ = lease->region();
    if (transfer_.planned_local.insert(local_)) transfer_.local_leases.push_back(std::move(*lease));
    return {};
  }

  Result<> use_remote(const Request& request) {
    const bool inside = region_ != nullptr && request.remote >= region_->address &&
                        request.length <= region_->length &&
                        request.remote - region_->address <= region_->length - request.length;
    if (!inside) CROSSDOCK_CHECK_OK(find_region(request));
    const bool allowed = request.op == Op::kRead ? region_->access != Access::kLocalOnly
                                                 : region_->access == Access::kRemoteReadWrite;
    if (allowed) return {};
    return make_error(Code::kDenied, fmt::format("region {} of peer '{}' does not allow remote {}s",
                                                 range_text(region_->address, region_->length),
                                                 peer_.name(), to_string(request.op)));
  }

  Result<> find_region(const Request& request) {
    const RemoteRegionPtr* found = find_remote(*remote_, request.remote);
    if (found == nullptr)
      return invalid_argument(
          fmt::format("{} is in no region that peer '{}' registered ({} are known)",
                      range_text(request.remote, request.length), peer_.name(), remote_->size()));
    auto& region = **found;
    if (request.length > region.length - (request.remote - region.address))
      return invalid_argument(fmt::format("{} reaches past the end of region {} of peer '{}'",
                                          range_text(request.remote, request.length),
                                          range_text(region.address, region.length), peer_.name()));
    if (transfer_.planned_remote.insert(&region)) {
      region.leases.fetch_add(1);
      transfer_.remote_leases.push_back(*found);
      if (region.revoked.load())
        return make_error(Code::kClosed,
                          fmt::format("peer '{}' is releasing region {}", peer_.name(),
                                      range_text(region.address, region.length)));
    }
    region_ = &region;
    set_ = nullptr;
    return {};
  }

  Result<> use_rails(Op op) {
    if (!set_) {
      CROSSDOCK_TRY(set, peer_.rails_for(*region_));
      set_ = std::move(set);
    }
    if (!group_open_ || groups_.back().op != op || groups_.back().set != set_) {
      cut_run();
      groups_.push_back({op, set_, transfer_.slices.size(), 0});
      group_open_ = true;
    }
    return {};
  }

  void append(const Request& request) {
    auto* local = static_cast<std::byte*>(request.local);
    const bool adjacent = settings_.merge && run_.length != 0 && run_.region == region_ &&
                          run_.local + run_.length == local &&
                          run_.remote + run_.length == request.remote;
    if (!adjacent) {
      cut_run();
      run_ = {local, request.remote, 0, region_};
    }
    run_.length += request.length;
    groups_.back().bytes += request.length;
    transfer_.bytes_total += request.length;
  }

  void cut_run() {
    while (run_.length != 0) {
      const auto length = std::min<std::uint64_t>(run_.length, settings_.slice_bytes);
      transfer_.slices.push_back({.local = run_.local,
                                  .remote = run_.remote,
                                  .region = run_.region,
                                  .length = static_cast<std::uint32_t>(length)});
      run_.local += length;
      run_.remote += length;
      run_.length -= length;
    }
  }

  void cut_group(const Group& group, std::size_t end, Plan& plan) {
    const std::uint64_t rails = group.set->rails.size();
    const std::uint64_t target =
        std::clamp(group.bytes / rails, std::min(kMinShardBytes, settings_.shard_bytes),
                   settings_.shard_bytes);
    std::size_t first = group.first;
    std::uint64_t bytes = 0;
    for (std::size_t i = group.first; i < end; ++i) {
      bytes += transfer_.slices[i].length;
      const bool full = bytes >= target || i + 1 - first >= kMaxShardSlices;
      if (!full && i + 1 < end) continue;
      transport::Shard shard;
      shard.op = group.op;
      shard.slices = std::span(transfer_.slices).subspan(first, i + 1 - first);
      shard.bytes = bytes;
      transfer_.shards.push_back(shard);
      plan.sets.push_back(group.set);
      first = i + 1;
      bytes = 0;
    }
  }

  const mem::RegionTable& regions_;
  PeerCore& peer_;
  const Settings& settings_;
  TransferCore& transfer_;
  const std::shared_ptr<const RemoteRegions::Snapshot> remote_;
  const mem::RegionRecord* local_ = nullptr;
  transport::RemoteRegion* region_ = nullptr;
  std::shared_ptr<RailSet> set_;
  std::vector<Group> groups_;
  bool group_open_ = false;
  Run run_;
};

}  // namespace

Result<> plan_batch(std::span<const Request> batch, const mem::RegionTable& regions, PeerCore& peer,
                    const Settings& settings, TransferCore& transfer, Plan& plan) {
  Planner planner(regions, peer, settings, transfer);
  const bool reads =
      std::any_of(batch.begin(), batch.end(), [](const Request& r) { return r.op == Op::kRead; });
  const bool writes =
      std::any_of(batch.begin(), batch.end(), [](const Request& r) { return r.op == Op::kWrite; });
  if (reads) CROSSDOCK_CHECK_OK(planner.add_all(batch, Op::kRead));
  if (writes) CROSSDOCK_CHECK_OK(planner.add_all(batch, Op::kWrite));
  planner.make_shards(plan);
  return {};
}

}  // namespace crossdock::transfer::detail
