// Whether a pointer that a caller gave is memory that a rank's kernels may follow, or its copies.
// One that kernels follow and must not would end the CUDA context, with everything in it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <crossdock/core/result.hpp>

#include "symm/rank.hpp"

namespace crossdock::symm {

struct GivenPointer {
  std::string_view engine;  // "ep"
  std::string_view call;    // "dispatch"
  const void* address;
  std::string_view what;  // "rows"
};

// kInvalidArgument: memory of another GPU, or not memory that the driver knows. Pinned and managed
// memory passes where the rank's GPU reaches it at this address, and null and the twin's pointers
// do.
Result<> check_pointer(const Rank& rank, const GivenPointer& given);

// The same for what only copies of a stream read and write, so that memory of any GPU will do.
// kInvalidArgument: not memory that the driver knows. A copy of that waits in the driver for all
// work before it in the stream, and so, maybe, for a call that this thread has yet to make.
Result<> check_copied(const Rank& rank, const GivenPointer& given);

}  // namespace crossdock::symm
