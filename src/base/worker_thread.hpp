// Starts a thread: named, with every signal blocked (signals belong to the host
// process), and without throwing. The caller joins it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <thread>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

// `name` is cut to 15 characters. kNoMemory when the system gives no more threads.
Result<std::thread> start_worker(const std::string& name, std::function<void()> body);

}  // namespace crossdock::base
