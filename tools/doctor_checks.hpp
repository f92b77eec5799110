// The checks of `crossdock doctor`: what of this machine Crossdock needs or profits from, what was
// found, and what to do about it. Each check only looks; the kernel objects it makes to try a call
// are gone when it returns.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace crossdock::tools {

enum class Health : std::uint8_t {
  kGood,
  kAbsent,  // optional and not there: something does without it
  kPoor,    // works, but slower or for less than it could
  kBroken,  // something everybody needs does not work
};
std::string_view to_string(Health health) noexcept;

struct Finding {
  std::string name;
  Health health = Health::kGood;
  std::string found;
  std::string cause = {};  // what follows from it; empty when good
  std::string fix = {};
};

// `root` is "/" for the machine itself.
std::vector<Finding> examine(const std::string& root);

}  // namespace crossdock::tools
