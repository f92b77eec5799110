// Core: whether the blocks of its kernels run at once. They wait for each other, on this rank and
// on others: one that finds no place would be waited for until the deadline, and a peer be named
// for it. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/core.hpp"

namespace crossdock::ep {
namespace {

struct Grid {
  const char* option;
  u32 blocks;
  u32 room;  // blocks that run at once; 0: no limit is known, as in the twin
};

Result<> fits(const symm::Rank& rank, const Grid& grid) {
  if (grid.room == 0 || grid.blocks <= grid.room) return {};
  return invalid_argument(fmt::format(
      "ep: {} makes {} blocks of rank {}, which wait for each other, and {} runs {} of them at "
      "once: ask for at most that many",
      grid.option, grid.blocks, rank.rank(), rank.device().describe(), grid.room));
}

}  // namespace

Result<> Core::check_resident() const {
  for (const u32 r : group_->local_ranks()) {
    const symm::Rank& rank = group_->rank(r);
    const auto room = [&](const auto& kernel) { return launcher_->resident_blocks(rank, kernel); };
    for (const Variant& variant : variants_)
      CROSSDOCK_CHECK_OK(fits(rank, {"dispatch_sms", dispatch_blocks_[r], room(variant.kernel)}));
    for (const ExpandedVariant& variant : expanded_variants_)
      CROSSDOCK_CHECK_OK(
          fits(rank, {"dispatch_sms + expand_sms", dispatch_blocks_[r] + window_.copy_blocks,
                      room(variant.kernel)}));
    CROSSDOCK_CHECK_OK(fits(rank, {"combine_sms", combine_blocks_[r], room(*combine_)}));
    if (small_combine_)
      CROSSDOCK_CHECK_OK(fits(rank, {"combine_sms", combine_blocks_[r], room(*small_combine_)}));
    for (const auto& packed : packed_combines_)
      if (packed) CROSSDOCK_CHECK_OK(fits(rank, {"combine_sms", packed_blocks(r), room(*packed)}));
    // Those that send, one that plans, one that receives.
    const u32 small = small_blocks(options_, options_.small_tokens) + 2;
    for (const SmallVariant& variant : small_variants_) {
      CROSSDOCK_CHECK_OK(fits(rank, {"small_sms", small, room(variant.kernel)}));
      if (variant.expanded)
        CROSSDOCK_CHECK_OK(fits(rank, {"small_sms + small_expand_sms", small + few_copy_blocks(),
                                       room(*variant.expanded)}));
    }
  }
  return {};
}

}  // namespace crossdock::ep
