// Turns a batch of requests into slices and shards: checks every request, merges adjacent ones,
// cuts the runs, groups them by direction and rails, and takes the leases. All or nothing: after an
// error no lease is held and nothing was posted. Thread-compatible; runs on the submitting thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "mem/region_table.hpp"
#include "transfer/peer_core.hpp"
#include "transfer/settings.hpp"
#include "transfer/transfer_core.hpp"

namespace crossdock::transfer::detail {

// Fills slices, shards, leases and totals of `transfer`; each shard's `rail_set` index says which
// of `sets` takes it.
struct Plan {
  std::vector<std::shared_ptr<RailSet>> sets;  // by shard
};
Result<> plan_batch(std::span<const Request> batch, const mem::RegionTable& regions, PeerCore& peer,
                    const Settings& settings, TransferCore& transfer, Plan& plan);

}  // namespace crossdock::transfer::detail
