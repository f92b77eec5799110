// The proxy and in-flight checks of shared memory.
// SPDX-License-Identifier: Apache-2.0
#include "twin/shared_shadow.hpp"

#include <algorithm>

namespace crossdock::twin {

namespace {
constexpr std::uint32_t kGranule = 16;
constexpr std::uint32_t kWarp = 32;
constexpr unsigned kThreadBits = 16;
}  // namespace

void SharedShadow::begin(std::size_t shared_bytes, std::uint32_t threads, bool enabled) {
  enabled_ = enabled;
  clock_ = cta_fence_ = 0;
  reads_.clear();
  if (!enabled) return;
  dirty_.assign(shared_bytes / kGranule + 1, 0);
  warp_fence_.assign((threads + kWarp - 1) / kWarp, 0);
  thread_fence_.assign(threads, 0);
}

void SharedShadow::generic_write(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread) {
  const std::uint64_t mark = ++clock_ << kThreadBits | thread;
  for (std::uint32_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g)
    dirty_[g] = mark;
}

void SharedShadow::async_write(std::uint32_t offset, std::uint32_t bytes) {
  for (std::uint32_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g)
    dirty_[g] = 0;
}

void SharedShadow::proxy_fence(std::uint32_t thread, SmemView& view) {
  if (!enabled_) return;
  view.fence = clock_;
  thread_fence_[thread] = clock_;
  std::uint64_t& warp = warp_fence_[thread / kWarp];
  warp = std::max(warp, view.warp);
  cta_fence_ = std::max(cta_fence_, view.cta);
}

std::optional<SharedShadow::Finding> SharedShadow::unfenced(std::uint32_t offset,
                                                            std::uint32_t bytes) const {
  for (std::uint32_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g) {
    if (dirty_[g] == 0) continue;
    const auto writer = static_cast<std::uint32_t>(dirty_[g] & ((1u << kThreadBits) - 1));
    const std::uint64_t when = dirty_[g] >> kThreadBits;
    const bool fenced =
        thread_fence_[writer] >= when || warp_fence_[writer / kWarp] >= when || cta_fence_ >= when;
    if (!fenced) return Finding{g * kGranule, writer, nullptr};
  }
  return std::nullopt;
}

std::optional<SharedShadow::Finding> SharedShadow::in_flight(std::uint32_t offset,
                                                             std::uint32_t bytes) const {
  for (const Entry& entry : reads_)
    if (offset < entry.read.offset + entry.read.bytes && entry.read.offset < offset + bytes)
      return Finding{offset, 0, &entry.read};
  return std::nullopt;
}

std::uint64_t SharedShadow::add_read(const InflightRead& read) {
  reads_.push_back({next_handle_, read});
  return next_handle_++;
}

void SharedShadow::end_read(std::uint64_t handle) {
  const auto found = std::find_if(reads_.begin(), reads_.end(),
                                  [&](const Entry& e) { return e.handle == handle; });
  if (found == reads_.end()) return;
  *found = reads_.back();
  reads_.pop_back();
}

}  // namespace crossdock::twin
