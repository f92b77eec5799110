// Texts of faults. See fault.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/fault.hpp"

#include <chrono>
#include <fmt/format.h>

namespace crossdock::symm {
namespace {

using device::FaultRecord;
using device::Phase;

std::string milliseconds(device::u64 ns) {
  return fmt::format("{:.3f} ms", static_cast<double>(ns) / 1e6);
}

std::string waited_for(const FaultRecord& record) {
  if (record.phase == Phase::kGridSync) return "for its own blocks";
  if (record.peer == device::kNoPeer) return "for work of its own block";
  return fmt::format("for rank {}", record.peer);
}

}  // namespace

Result<> read_fault(const FaultRecord& record) {
  if (__atomic_load_n(&record.state, __ATOMIC_ACQUIRE) == FaultRecord::kEmpty) return {};
  const bool peer = record.peer != device::kNoPeer;
  return Error{
      .code = peer ? Code::kPeerLost : Code::kDeadline,
      .scope = Scope::kPeer,
      .retry = Retry::kAfterReconnect,
      .message = fmt::format(
          "rank {}: kernel {} (block {}) waited {} {} in phase '{}': expected {}, saw {}; every "
          "launch of the group returns at once until its ranks reset() it",
          record.rank, device::kernel_name(record.kernel), record.block,
          milliseconds(record.waited_ns), waited_for(record), device::phase_name(record.phase),
          record.expected, record.seen)};
}

}  // namespace crossdock::symm
