// What calls say that cannot be made where they are made: in a forked child, on the control thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <string_view>

#include <crossdock/core/result.hpp>

namespace crossdock::transfer::detail {

inline Error forked_error() {
  return Error{.code = Code::kUnsupported,
               .scope = Scope::kEngine,
               .message =
                   "this engine was created before fork(); its threads are in the parent. "
                   "Create an engine in the child"};
}

inline Error control_thread_error(std::string_view call) {
  return invalid_argument(
      fmt::format("{} waits for the control thread of its engine, and must not be called on it, as "
                  "functions given to on_message and watch_peers are: submit there, or hand it to "
                  "another thread",
                  call));
}

}  // namespace crossdock::transfer::detail
