// The failing end of CROSSDOCK_CHECK. Any thread; allocates nothing.
// SPDX-License-Identifier: Apache-2.0
#include "base/check.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace crossdock::base {

void check_failed(const char* condition, std::string_view text, const char* file,
                  int line) noexcept {
  const char* slash = std::strrchr(file, '/');
  std::fprintf(stderr, "crossdock: bug: %.*s: %s (%s:%d)\n", static_cast<int>(text.size()),
               text.data(), condition, slash != nullptr ? slash + 1 : file, line);
  std::abort();
}

}  // namespace crossdock::base
