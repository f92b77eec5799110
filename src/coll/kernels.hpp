// The kernels beside the copy engines as KernelRefs: the variants of device/kernels.json that this
// layer launches. No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/coll/options.hpp>
#include <crossdock/layout/coll.cuh>

#include "symm/kernel.hpp"

namespace crossdock::coll {

inline constexpr device::u32 kAddThreads = 512;

// The variant with the most warps whose rows fit into shared memory.
device::FetchRowsConfig fetch_variant(device::u32 row_bytes, bool wide);
device::u32 fetch_shared_bytes(const device::FetchRowsConfig& config, device::u32 row_bytes);
symm::KernelRef<device::FetchRowsParams> fetch_rows_kernel(const device::FetchRowsConfig& config);
symm::KernelRef<device::AddPartsParams> add_parts_kernel(DataType type);

}  // namespace crossdock::coll
