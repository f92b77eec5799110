// A user's program: includes installed headers, calls across the library's boundary.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/core/version.hpp>

int main() {
  const crossdock::Result<int> failed = crossdock::invalid_argument("a message");
  const std::string text = failed.error().describe();
  std::printf("%s\n", text.c_str());
  const bool right = text.starts_with("invalid argument") &&
                     crossdock::to_string(crossdock::Code::kPeerLost) == "peer lost";
  return right && !crossdock::kVersion.empty() ? 0 : 1;
}
