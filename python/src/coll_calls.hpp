// What calls of Coll and of its sessions have in common. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "coll_group.hpp"
#include "errors.hpp"

namespace crossdock::python {

// Runs a call of the library on a stream, without the GIL: it may wait for a full queue.
template <class Run>
auto launch(CollBox& box, uint32_t rank, const Run& run) {
  const auto lock = box.enter(rank);
  auto result = [&] {
    const nb::gil_scoped_release release;
    return run();
  }();
  return value_or_raise(std::move(result));
}
inline ep::StreamPtr stream_for(const CollBox& box, nb::handle stream, const Tensor& like,
                                uint32_t rank) {
  return stream_of(stream, like.framework, box.device_of(rank));
}
// The same for a call without an array: torch's current one where the process has torch.
inline ep::StreamPtr stream_for(const CollBox& box, nb::handle stream, uint32_t rank) {
  const bool torch = !box.on_host() && loaded_module("torch").is_valid();
  return stream_of(stream, torch ? Framework::kTorch : Framework::kNone, box.device_of(rank));
}
inline uint64_t bytes_of(const Tensor& t) {
  return t.row_bytes() * static_cast<uint64_t>(t.shape[0]);
}

void add_coll_session(nb::module_& m);

}  // namespace crossdock::python
