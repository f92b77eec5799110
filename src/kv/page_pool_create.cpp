// PagePool over memory of an engine: the one place where the pool meets the transfer layer.
// SPDX-License-Identifier: Apache-2.0
#include "kv/pool_core.hpp"

namespace crossdock::kv {
inline namespace v1 {

Result<PagePool> PagePool::create(transfer::Engine& engine, const PageLayout& layout,
                                  std::string_view label) {
  transfer::RegionOptions options;
  options.label = std::string(label);
  CROSSDOCK_TRY(region, engine.allocate(layout.pool_bytes(), options));
  void* const memory = region.address();
  return PagePool(detail::PoolCore::make(layout, memory, std::move(region)));
}

}  // namespace v1
}  // namespace crossdock::kv
