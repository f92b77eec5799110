// Core: dispatches whose rows are copied to the places of their choices, in the same launch where
// that can be, else afterwards. See core.hpp. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {
namespace {

// The first variant with room for the shape; null: there is none.
template <class Variant>
const Variant* first_with_room(const std::vector<Variant>& variants, const DispatchShape& shape) {
  const auto found = std::find_if(variants.begin(), variants.end(), [&](const Variant& variant) {
    return variant.config.cast == shape.cast &&
           dispatch_shared_bytes(variant.config, shape) <= kMaxSharedBytes;
  });
  return found == variants.end() ? nullptr : &*found;
}

}  // namespace

Result<> Core::prepare_copies(RankState& state) {
  const u64 bytes = copy_words(window_) * sizeof(u64);
  CROSSDOCK_TRY(words, group_->rank(state.rank).allocate_state(bytes));
  state.copy_words = std::move(words);
  return {};
}

// Before a slot is taken.
Result<> Core::can_dispatch(const Tokens& t, u32 groups) const {
  const DispatchShape shape = shape_of(t.row_bytes, t.cast, groups);
  if (first_with_room(variants_, shape) != nullptr ||
      first_with_room(expanded_variants_, shape) != nullptr)
    return {};
  return make_error(
      Code::kUnsupported,
      fmt::format("ep dispatch: no kernel for rows of {} bytes was prepared", t.row_bytes));
}

Result<> Core::check_expansion(u32 rank, const Tokens& t, bool weights, const Expanded& to) const {
  if (options_.expert_alignment == 0)
    return invalid_argument(
        "ep dispatch: the group was made with expert_alignment = 0: give it the alignment of the "
        "rows, or leave DispatchOptions::expanded empty");
  const device::EpOutputLayout rows = output_of(t, window_.capacity);
  return check_expanded({rank, rows.row_bytes, rows.scale_bytes, weights}, to);
}

Result<> Core::launch_dispatch(const RankState& state, const Tokens& t,
                               const device::EpDispatchParams& p, const Beside& beside,
                               symm::LaunchShape shape) {
  const symm::Rank& rank = group_->rank(state.rank);
  const DispatchShape of = shape_of(t.row_bytes, t.cast, p.tokens.groups);
  if (!of.flags) return launcher_->launch(rank, first_with_room(variants_, of)->kernel, shape, p);
  const ExpandedVariant& variant = *first_with_room(expanded_variants_, of);
  device::EpExpandedDispatchParams q{};
  q.dispatch = p;
  if (beside.to != nullptr) {
    shape.grid += copy_blocks_[state.rank];
    const Handle::State* const like = beside.like;
    const bool weights = like != nullptr ? like->weights : t.weights != nullptr;
    q.grouping = grouping_of(beside.slot);
    q.grouping.weights = weights ? beside.slot.place_weights() : nullptr;
    q.to = expanded_of({state.rank, p.output.row_bytes, p.output.scale_bytes, weights}, *beside.to);
    if (like != nullptr) {
      q.earlier_ids = like->received.ids;
      q.earlier_weights = like->received.weights;
      q.earlier_tokens = like->received.tokens;
    }
    q.words = state.copy_words.as<u64>();
    q.parts = device::ceil_div(p.output.row_bytes, variant.config.copy_stage_bytes);
    q.part_bytes = device::ep_part_bytes(p.output.row_bytes, q.parts);
  }
  return launcher_->launch(rank, variant.kernel, shape, q);
}

Result<Handle> Core::expand_afterwards(Handle handle, const Expanded* to, StreamPtr stream) {
  if (to == nullptr) return handle;
  CROSSDOCK_CHECK_OK(group_rows(handle, stream));
  CROSSDOCK_CHECK_OK(expand_rows(handle, *to, stream));
  return handle;
}

}  // namespace crossdock::ep
