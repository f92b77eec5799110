// CROSSDOCK_CHECK(condition, "text"): for bugs of this library only. Prints one line and aborts.
// What a user, a peer or the system can cause must become an Error instead; no peer may ever reach
// a check. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace crossdock::base {

// Writes "crossdock: bug: <text>: <condition> (<file>:<line>)" to stderr and aborts.
[[noreturn]] void check_failed(const char* condition, std::string_view text, const char* file,
                               int line) noexcept;

}  // namespace crossdock::base

#define CROSSDOCK_CHECK(condition, text)                                       \
  do {                                                                         \
    if (!(condition)) [[unlikely]]                                             \
      ::crossdock::base::check_failed(#condition, (text), __FILE__, __LINE__); \
  } while (0)
