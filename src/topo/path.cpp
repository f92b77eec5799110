// How near two devices are. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "topo/topology.hpp"

namespace crossdock::topo {
namespace {

std::size_t common_prefix(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  const auto ends = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<std::size_t>(ends.first - a.begin());
}

}  // namespace

PathKind path_between(const Location& a, const Location& b) {
  const std::size_t shared = common_prefix(a.pci, b.pci);
  if (shared > 0) {
    if (a.pci == b.pci) return PathKind::kSame;
    // The first element is the host bridge, the second a root port; two devices below one root port
    // must be behind a switch, since a port has one link. Functions of one card share its bus too.
    return shared >= 2 ? PathKind::kSwitch : PathKind::kHostBridge;
  }
  if (a.numa < 0 || b.numa < 0) return PathKind::kUnknown;
  return a.numa == b.numa ? PathKind::kNuma : PathKind::kCross;
}

int path_score(PathKind kind) noexcept {
  switch (kind) {
    case PathKind::kSame:
      return 100;
    case PathKind::kSwitch:
      return 80;
    case PathKind::kHostBridge:
      return 50;
    case PathKind::kNuma:
      return 40;
    case PathKind::kUnknown:
      return 20;
    case PathKind::kCross:
      return 10;
  }
  return 0;
}

std::string_view to_string(PathKind kind) noexcept {
  switch (kind) {
    case PathKind::kSame:
      return "same";
    case PathKind::kSwitch:
      return "switch";
    case PathKind::kHostBridge:
      return "host bridge";
    case PathKind::kNuma:
      return "numa node";
    case PathKind::kUnknown:
      return "unknown";
    case PathKind::kCross:
      return "cross socket";
  }
  return "unknown";
}

std::string_view to_string(NicKind kind) noexcept {
  switch (kind) {
    case NicKind::kLoopback:
      return "loopback";
    case NicKind::kPhysical:
      return "physical";
    case NicKind::kVirtual:
      return "virtual";
  }
  return "unknown";
}

std::vector<int> Topology::all_cpus() const {
  std::vector<int> cpus;
  for (const NumaNode& node : nodes)
    cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

std::vector<int> Topology::cpus_near(const Location& where) const {
  for (const NumaNode& node : nodes)
    if (node.id == where.numa && !node.cpus.empty()) return node.cpus;
  return all_cpus();
}

}  // namespace crossdock::topo
