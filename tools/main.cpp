// Entry of the `crossdock` command.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include <crossdock/core/version.hpp>

int main() {
  std::printf("crossdock %.*s\n", static_cast<int>(crossdock::kVersion.size()),
              crossdock::kVersion.data());
  return 0;
}
