// inproc://name: one table per name in this process, gone with its last handle. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {

std::shared_ptr<Store> open_inproc_store(std::string_view name);

// How many names have handles now; what a leak test looks at.
std::size_t num_inproc_stores();

}  // namespace crossdock::rendezvous
