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

// Blocks that copy are a rank's own affair. So where the rule has chosen their number, a GPU with
// fewer multiprocessors has fewer; with less than half of the rule copies afterwards are faster.
void Core::fit_copy_blocks() {
  copy_blocks_.assign(window_.world, window_.copy_blocks);
  if (options_.expand_sms != kAutoSms) return;
  for (const u32 r : group_->local_ranks()) {
    u32& blocks = copy_blocks_[r];
    for (const ExpandedVariant& variant : expanded_variants_) {
      const u32 room = launcher_->resident_blocks(group_->rank(r), variant.kernel);
      if (room != 0) blocks = std::min(blocks, room - std::min(room, dispatch_blocks_[r]));
    }
    if (2 * blocks < window_.copy_blocks) blocks = 0;
  }
}

Result<> Core::check_resident() {
  for (const u32 r : group_->local_ranks()) {
    current_rank_ = r;
    const symm::Rank& rank = group_->rank(r);
    const auto room = [&](const auto& kernel) { return launcher_->resident_blocks(rank, kernel); };
    for (const Variant& variant : variants_)
      CROSSDOCK_CHECK_OK(fits(rank, {"dispatch_sms", dispatch_blocks_[r], room(variant.kernel)}));
    for (const ExpandedVariant& variant : expanded_variants_)
      CROSSDOCK_CHECK_OK(
          fits(rank, {copy_blocks_[r] == 0 ? "dispatch_sms" : "dispatch_sms + expand_sms",
                      dispatch_blocks_[r] + copy_blocks_[r], room(variant.kernel)}));
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
