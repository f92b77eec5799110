// Discovery from /sys and /proc. One pass on the caller's thread, read-only.
// SPDX-License-Identifier: Apache-2.0
#include "topo/topology.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <map>

#include "base/strings.hpp"
#include "topo/sysfs.hpp"

namespace crossdock::topo {
namespace {

// Linux numbers for /sys/class/net/*/type.
constexpr std::int64_t kArpLoopback = 772;
// PCI base class 03 is a display controller; vendor 10de is NVIDIA.
constexpr std::string_view kDisplayClass = "0x03";
constexpr std::string_view kNvidiaVendor = "0x10de";

Location location_of(const Sysfs& sysfs, const std::string& device) {
  Location where;
  where.pci = pci_path_of(sysfs.resolve(device));
  where.numa = static_cast<int>(sysfs.number(device + "/numa_node").value_or(-1));
  if (where.numa >= 0 || where.pci.empty()) return where;
  // A virtio or other child device has no numa_node of its own; its PCI function has.
  const auto address = where.pci.back();
  where.numa =
      static_cast<int>(sysfs.number("sys/bus/pci/devices/" + address + "/numa_node").value_or(-1));
  return where;
}

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

// "Node 0 MemTotal:  24575852 kB"
std::uint64_t memory_of(std::string_view meminfo) {
  const auto at = meminfo.find("MemTotal:");
  if (at == std::string_view::npos) return 0;
  auto rest = meminfo.substr(at + 9);
  rest = base::trim(rest.substr(0, rest.find("kB")));
  const auto kib = base::parse_int(rest);
  return kib.ok() && *kib > 0 ? static_cast<std::uint64_t>(*kib) * 1024 : 0;
}

std::vector<int> distances_of(std::string_view text) {
  std::vector<int> distances;
  for (const auto part : base::split(text, ' ')) {
    const auto value = base::parse_int(part);
    if (value.ok()) distances.push_back(static_cast<int>(*value));
  }
  return distances;
}

std::vector<NumaNode> read_nodes(const Sysfs& sysfs) {
  const std::string folder = "sys/devices/system/node";
  std::vector<NumaNode> nodes;
  for (const auto& name : sysfs.list(folder)) {
    if (!name.starts_with("node")) continue;
    const auto id = base::parse_int(std::string_view(name).substr(4));
    if (!id.ok()) continue;
    const std::string path = folder + "/" + name;
    nodes.push_back({.id = static_cast<int>(*id),
                     .cpus = parse_cpu_list(sysfs.text(path + "/cpulist").value_or("")),
                     .memory_bytes = memory_of(sysfs.text(path + "/meminfo").value_or("")),
                     .distances = distances_of(sysfs.text(path + "/distance").value_or(""))});
  }
  if (!nodes.empty()) return nodes;
  // A kernel without NUMA: one node with everything.
  const auto online = sysfs.text("sys/devices/system/cpu/online").value_or("");
  return {{.id = 0,
           .cpus = parse_cpu_list(online),
           .memory_bytes = memory_of(sysfs.text("proc/meminfo").value_or("")),
           .distances = {10}}};
}

std::vector<Nic> read_nics(const Sysfs& sysfs) {
  std::vector<Nic> nics;
  for (const auto& name : sysfs.list("sys/class/net")) {
    const std::string path = "sys/class/net/" + name;
    if (!sysfs.exists(path + "/operstate")) continue;  // as the file bonding_masters
    Nic nic;
    nic.name = name;
    nic.location = location_of(sysfs, path + "/device");
    const bool loopback = sysfs.number(path + "/type") == kArpLoopback;
    const bool has_device = sysfs.exists(path + "/device");
    nic.kind = loopback ? NicKind::kLoopback : has_device ? NicKind::kPhysical : NicKind::kVirtual;
    const auto state = sysfs.text(path + "/operstate").value_or("unknown");
    // Drivers without carrier detection, loopback among them, stay "unknown" while they work.
    const auto flags = sysfs.text(path + "/flags").value_or("0x0");
    const bool administratively_up = (std::strtoul(flags.c_str(), nullptr, 16) & 1u) != 0;
    nic.up = state == "up" || (state == "unknown" && administratively_up);
    const auto speed = sysfs.number(path + "/speed").value_or(-1);
    if (speed > 0 && speed != 0xffffffff) nic.speed_mbps = static_cast<std::uint64_t>(speed);
    nic.mtu = static_cast<std::uint32_t>(sysfs.number(path + "/mtu").value_or(0));
    nic.driver = base_name(sysfs.resolve(path + "/device/driver"));
    nics.push_back(std::move(nic));
  }
  return nics;
}

RdmaPort read_port(const Sysfs& sysfs, const std::string& path, int number) {
  RdmaPort port;
  port.number = number;
  // "4: ACTIVE" and "200 Gb/sec (4X HDR)"
  port.active = sysfs.text(path + "/state").value_or("").starts_with("4:");
  port.link_layer = sysfs.text(path + "/link_layer").value_or("");
  const auto rate = sysfs.text(path + "/rate").value_or("");
  const auto gbps = base::parse_int(std::string_view(rate).substr(0, rate.find_first_of(" .")));
  if (gbps.ok() && *gbps > 0) port.rate_gbps = static_cast<std::uint64_t>(*gbps);
  return port;
}

std::vector<RdmaDevice> read_rdma(const Sysfs& sysfs) {
  std::vector<RdmaDevice> devices;
  for (const auto& name : sysfs.list("sys/class/infiniband")) {
    const std::string path = "sys/class/infiniband/" + name;
    RdmaDevice device{.name = name,
                      .ports = {},
                      .nics = sysfs.list(path + "/device/net"),
                      .location = location_of(sysfs, path + "/device")};
    for (const auto& port : sysfs.list(path + "/ports")) {
      const auto number = base::parse_int(port);
      if (number.ok())
        device.ports.push_back(
            read_port(sysfs, path + "/ports/" + port, static_cast<int>(*number)));
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

// The driver's own names: PCI address -> "NVIDIA H200".
std::map<std::string, std::string> read_driver_names(const Sysfs& sysfs) {
  std::map<std::string, std::string> names;
  const std::string folder = "proc/driver/nvidia/gpus";
  for (const auto& address : sysfs.list(folder)) {
    const auto text = sysfs.text(folder + "/" + address + "/information").value_or("");
    std::string model;
    for (const auto line : base::split(text, '\n'))
      if (line.starts_with("Model:")) model = std::string(base::trim(line.substr(6)));
    names[address] = model;
  }
  return names;
}

std::vector<Gpu> read_gpus(const Sysfs& sysfs) {
  const auto driver_names = read_driver_names(sysfs);
  std::vector<Gpu> gpus;
  for (const auto& address : sysfs.list("sys/bus/pci/devices")) {
    const std::string path = "sys/bus/pci/devices/" + address;
    if (sysfs.text(path + "/vendor") != kNvidiaVendor) continue;
    if (!sysfs.text(path + "/class").value_or("").starts_with(kDisplayClass)) continue;
    const auto it = driver_names.find(address);
    gpus.push_back({.pci_address = address,
                    .model = it == driver_names.end() ? std::string() : it->second,
                    .has_driver = it != driver_names.end(),
                    .location = location_of(sysfs, path)});
  }
  // Containers may hide the PCI tree while the driver still names the GPUs.
  for (const auto& [address, model] : driver_names) {
    const bool known = std::any_of(gpus.begin(), gpus.end(), [&address = address](const Gpu& gpu) {
      return gpu.pci_address == address;
    });
    if (!known)
      gpus.push_back({.pci_address = address, .model = model, .has_driver = true, .location = {}});
  }
  return gpus;
}

}  // namespace

Result<Topology> discover(const std::string& root) {
  const Sysfs sysfs(root);
  if (!sysfs.exists("sys/devices/system"))
    return make_error(Code::kUnsupported,
                      fmt::format("there is no {}/sys/devices/system; mount sysfs on /sys",
                                  root == "/" ? "" : root));
  return Topology{.nodes = read_nodes(sysfs),
                  .nics = read_nics(sysfs),
                  .rdma = read_rdma(sysfs),
                  .gpus = read_gpus(sysfs)};
}

}  // namespace crossdock::topo
