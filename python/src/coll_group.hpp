// Coll of Python: a group of collectives over NVLink, and its sessions. Calls of one rank take
// turns by its lane, as in group.hpp. Arrays are checked here for place, shape and strides; numbers
// are checked by the library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <crossdock/coll/group.hpp>

#include "array.hpp"
#include "group.hpp"

namespace crossdock::python {

// `options` is a crossdock.coll.Options. Raises InvalidArgument naming a field that is wrong.
coll::Options coll_options(nb::handle options);
nb::dict coll_sizes(nb::handle options, uint32_t world);

// What Coll and its sessions and arrays share; the last of them ends the group.
struct CollBox final : public RankBox {
  explicit CollBox(coll::Group made);
  // Without the GIL: it waits for the GPU.
  ~CollBox() override;

  [[nodiscard]] symm::Group& ranks() const override;
  // Ranks of the CPU, in one process or in several.
  [[nodiscard]] bool on_host() const { return devices.front() == kHost; }
  [[nodiscard]] int device_of(uint32_t rank) const;
  // A dense array of the caller.
  Tensor dense(const char* call, const char* name, nb::handle object, uint32_t rank);
  // The same with rows of the table; without a table the library refuses the call.
  Tensor table_rows(const char* call, const char* name, nb::handle object, uint32_t rank);

  coll::Group group;
  std::vector<int> devices;  // of the ranks; kHost on the CPU
  // On the CPU copies run later: what they read and write stays until a synchronize() that has seen
  // them end.
  std::vector<nb::object> held;
};

struct CollSession {
  std::shared_ptr<CollBox> box;
  std::optional<coll::Session> session;
  uint32_t rank = 0;
};

}  // namespace crossdock::python
