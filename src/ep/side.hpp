// Side: of one rank, where layers over a group put dispatches beside their products, and what
// orders them with calls on streams of the caller. Kept with the group, since the layers over one
// share its slots and epochs. The layers fill it in (moe/layer_split.cpp). Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/stream.hpp"

namespace crossdock::ep {

struct Side {
  // Whether a forward that has begun has it, and the capture that it was recorded in; 0: none.
  struct Arrived {
    cuda::Event event;
    bool used = false;
    std::uint64_t capture = 0;
  };
  // The last forward that ended on another stream than it began on.
  struct Ended {
    std::optional<cuda::Event> event;
    bool any = false;
    std::uint64_t capture = 0;  // as Arrived::capture
  };
  std::uint32_t rank = 0;
  std::uint32_t begun = 0;               // forwards that have not ended
  const cuda::Stream* stream = nullptr;  // null on the CPU
  std::optional<cuda::Event> ready;      // the caller's stream has come to the call
  std::vector<Arrived> arrived;
  Ended ended[2];                      // outside captures, and in one
  std::optional<cuda::Event> dropped;  // behind dispatches that were never ended
  bool any_dropped = false;            // and no later dispatch follows them yet
  std::uint64_t dropped_capture = 0;   // as Arrived::capture
};

}  // namespace crossdock::ep
