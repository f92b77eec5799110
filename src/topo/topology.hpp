// Topology: the NUMA nodes, CPUs, network interfaces, RDMA devices and GPUs of this host, and how
// near two of them are. A plain value read once from /sys and /proc; nothing is opened or kept.
// Thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::topo {

// Where something is attached.
struct Location {
  int numa = -1;                 // -1: unknown, or the same from everywhere
  std::vector<std::string> pci;  // from host bridge to device, as pci_path_of() gives
  friend bool operator==(const Location&, const Location&) = default;
};

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;
  std::uint64_t memory_bytes = 0;
  std::vector<int> distances;  // to each node in the order of ids; 10 is local
};

enum class NicKind : std::uint8_t { kLoopback, kPhysical, kVirtual };
std::string_view to_string(NicKind kind) noexcept;

struct Nic {
  std::string name;  // "eth0"
  NicKind kind = NicKind::kVirtual;
  bool up = false;
  std::optional<std::uint64_t> speed_mbps;  // absent when the driver does not say
  std::uint32_t mtu = 0;
  std::string driver;
  Location location;
};

struct RdmaPort {
  int number = 1;
  bool active = false;
  std::string link_layer;  // "InfiniBand" or "Ethernet"
  std::uint64_t rate_gbps = 0;
};

struct RdmaDevice {
  std::string name;  // "mlx5_0"
  std::vector<RdmaPort> ports;
  std::vector<std::string> nics;  // its network interfaces
  Location location;
};

struct Gpu {
  std::string pci_address;  // "0000:18:00.0"
  std::string model;        // empty when no driver names it
  bool has_driver = false;
  Location location;
};

struct Topology {
  std::vector<NumaNode> nodes;  // at least one
  std::vector<Nic> nics;
  std::vector<RdmaDevice> rdma;
  std::vector<Gpu> gpus;

  [[nodiscard]] std::vector<int> all_cpus() const;
  // The CPUs of the node that `where` is on; all of them when the node is unknown.
  [[nodiscard]] std::vector<int> cpus_near(const Location& where) const;
};

// What lies between two devices, nearest first.
enum class PathKind : std::uint8_t {
  kSame,        // one device
  kSwitch,      // one PCIe switch: traffic does not reach the CPU
  kHostBridge,  // one host bridge (root complex)
  kNuma,        // one NUMA node, several host bridges
  kUnknown,     // the node of one of them is not known
  kCross,       // over the link between sockets
};
std::string_view to_string(PathKind kind) noexcept;  // "switch"

PathKind path_between(const Location& a, const Location& b);
// For choosing a rail: 100 for kSame down to 10 for kCross; higher is better.
int path_score(PathKind kind) noexcept;

// Reads the topology. `root` is where /sys and /proc are looked up. What is absent is left out;
// only a root without any /sys/devices/system is kUnsupported.
Result<Topology> discover(const std::string& root = "/");

}  // namespace crossdock::topo
