// The order of the calls at one site of a rank (board.hpp) whose streams differ: a later one waits
// for the one before it on the GPU, so that one stream at a time waits between the site's marks.
// Within a capture calls follow those of the same capture, outside captures those outside: when
// graphs are replayed is the caller's affair. Single-owner. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"

namespace crossdock::coll {

class SiteOrder {
 public:
  static Result<SiteOrder> create(const cuda::Context& context);
  // Before what is put on the stream at the site.
  [[nodiscard]] Result<> follow(const cuda::Stream& stream) const;
  // Behind it.
  Result<> note(const cuda::Stream& stream);

 private:
  struct Last {
    cuda::Event event;
    cuda::StreamHandle stream = nullptr;
    bool any = false;
  };
  SiteOrder(cuda::Event outside, cuda::Event captured)
      : outside_{.event = std::move(outside)}, captured_{.event = std::move(captured)} {}

  Last outside_;
  Last captured_;
  std::uint64_t capture_ = 0;  // that of captured_
};

}  // namespace crossdock::coll
