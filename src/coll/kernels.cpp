// Instantiates the kernels for the twin, each beside its text for the JIT. See kernels.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "coll/kernels.hpp"

#include <crossdock/kernel/add_parts.cuh>
#include <crossdock/kernel/fetch_rows.cuh>

namespace crossdock::coll {

using namespace crossdock::device;  // NOLINT: everything here is about device types
using symm::KernelRef;
using symm::make_kernel;
using symm::Member;

namespace {

constexpr u32 kMostSharedBytes = 227u << 10;

template <FetchRowsConfig kConfig>
KernelRef<FetchRowsParams> fetch() {
  using C = FetchRowsConfig;
  return make_kernel<kConfig>(KernelId::kFetchRows, "fetch_rows", "FetchRowsConfig",
                              &kernel::fetch_rows<kConfig>, Member{"warps", &C::warps},
                              Member{"stages", &C::stages}, Member{"wide", &C::wide});
}

template <AddPartsConfig kConfig>
KernelRef<AddPartsParams> add() {
  using C = AddPartsConfig;
  return make_kernel<kConfig>(KernelId::kAddParts, "add_parts", "AddPartsConfig",
                              &kernel::add_parts<kConfig>, Member{"threads", &C::threads},
                              Member{"bf16", &C::bf16});
}

}  // namespace

u32 fetch_shared_bytes(const FetchRowsConfig& config, u32 row_bytes) {
  return fetch_rows_shared_bytes(config, row_bytes);
}

FetchRowsConfig fetch_variant(u32 row_bytes, bool wide) {
  const FetchRowsConfig most{.warps = 8, .stages = 2, .wide = wide};
  if (fetch_shared_bytes(most, row_bytes) <= kMostSharedBytes) return most;
  return {.warps = 2, .stages = 2, .wide = wide};
}

KernelRef<FetchRowsParams> fetch_rows_kernel(const FetchRowsConfig& c) {
  if (c.warps == 8)
    return c.wide ? fetch<{.warps = 8, .stages = 2, .wide = true}>()
                  : fetch<{.warps = 8, .stages = 2, .wide = false}>();
  return c.wide ? fetch<{.warps = 2, .stages = 2, .wide = true}>()
                : fetch<{.warps = 2, .stages = 2, .wide = false}>();
}

KernelRef<AddPartsParams> add_parts_kernel(DataType type) {
  return type == DataType::kBf16 ? add<{.threads = kAddThreads, .bf16 = true}>()
                                 : add<{.threads = kAddThreads, .bf16 = false}>();
}

}  // namespace crossdock::coll
