// The second process of the VMM test. CUDA does not survive a fork, so the test starts its own
// executable anew with kImportChildFlag and the name of a socket.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace crossdock::testing {

inline constexpr const char* kImportChildFlag = "--import-child";

// Receives an allocation, checks the parent's pattern, writes its own. Returns an exit code that
// says which step failed; 0 is success.
int import_child(const std::string& socket_name);

}  // namespace crossdock::testing
