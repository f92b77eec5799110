// The second process of the VMM test. CUDA does not survive a fork, so the test starts its own
// executable anew with kImportChildFlag and the name of a socket.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cuda/driver_types.hpp"

namespace crossdock::testing {

inline constexpr const char* kImportChildFlag = "--import-child";

// What the child is told beside a descriptor: the bytes, and the fabric handle where there is one
// in place of a descriptor.
std::vector<std::byte> import_payload(std::size_t bytes,
                                      const cuda::FabricHandle* fabric = nullptr);

// Receives an allocation, checks the parent's pattern, writes its own. Returns an exit code that
// says which step failed; 0 is success.
int import_child(const std::string& socket_name);

}  // namespace crossdock::testing
