// Regions whose last handle was dropped while somebody still used them: kept registered and mapped
// until their leases are back and every peer confirmed that it let go. Looks again on a timer only
// while there are any. Thread-safe; the work runs on the control loop.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <list>
#include <memory>
#include <optional>

#include "mem/region_table.hpp"
#include "mem/shared_memory.hpp"

namespace crossdock::transfer::detail {

class EngineCore;
class Revocation;

class Orphans {
 public:
  explicit Orphans(EngineCore& engine) : engine_(engine) {}
  // `memory` is freed when the region is.
  void adopt(std::optional<mem::SharedMemory> memory, std::shared_ptr<mem::RegionRecord> record);
  // After the control loop has ended: hands what is left to the engine.
  void abandon();

 private:
  struct Orphan {
    std::optional<mem::SharedMemory> memory;
    std::shared_ptr<mem::RegionRecord> record;
    std::shared_ptr<Revocation> revocation;
  };
  void look();
  // True when it is over.
  bool settle(Orphan& orphan);

  EngineCore& engine_;
  std::list<Orphan> orphans_;  // loop thread
};

}  // namespace crossdock::transfer::detail
