// Coll of Python: a group of collectives over NVLink, and its sessions. Calls of one rank take
// turns by a mutex (in the twin those of all ranks), which is not waited for with the GIL held.
// Arrays are checked here for place, shape and strides; numbers are checked by the library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <crossdock/coll/group.hpp>

#include "array.hpp"
#include "group.hpp"

namespace crossdock::python {

// What Coll and its sessions and arrays share; the last of them ends the group.
struct CollBox {
  explicit CollBox(coll::Group made) : group(std::move(made)) {}
  coll::Group group;
  std::vector<uint32_t> ranks;
  std::vector<int> devices;  // of the ranks; kHost in the twin
  std::vector<std::unique_ptr<std::mutex>> lanes;
  // In the twin copies run later: what they read and write stays until the next synchronize().
  std::vector<nb::object> held;

  [[nodiscard]] bool twin() const { return devices.front() == kHost; }
  [[nodiscard]] int device_of(uint32_t rank) const;
  std::unique_lock<std::mutex> enter(uint32_t rank);
  // A dense array of the caller.
  Tensor dense(const char* call, const char* name, nb::handle object, uint32_t rank);
};

struct CollSession {
  std::shared_ptr<CollBox> box;
  std::optional<coll::Session> session;
  uint32_t rank = 0;
};

}  // namespace crossdock::python
