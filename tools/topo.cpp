// `crossdock topo`: the NUMA nodes, interfaces, RDMA devices and GPUs of this host and the paths
// between GPUs and NICs. Read-only.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/strings.hpp"
#include "cli.hpp"
#include "commands.hpp"
#include "topo/sysfs.hpp"
#include "topo/topology.hpp"

namespace crossdock::tools {
namespace {

using Json = nlohmann::ordered_json;
using topo::Location;
using topo::Topology;

struct TopoOptions {
  bool json = false;
  std::string root = "/";
};

struct Device {
  std::string name;
  const Location* location;
};

// What paths are shown between: GPUs, RDMA devices, and interfaces of real hardware.
std::vector<Device> devices_of(const Topology& topology) {
  std::vector<Device> devices;
  for (const auto& gpu : topology.gpus)
    devices.push_back({gpu.pci_address, &gpu.location});
  for (const auto& rdma : topology.rdma)
    devices.push_back({rdma.name, &rdma.location});
  for (const auto& nic : topology.nics)
    if (nic.kind == topo::NicKind::kPhysical) devices.push_back({nic.name, &nic.location});
  return devices;
}

Json location_json(const Location& location) {
  return {{"numa", location.numa}, {"pci", location.pci}};
}

Json nodes_json(const Topology& topology) {
  Json out = Json::array();
  for (const auto& node : topology.nodes)
    out.push_back({{"id", node.id},
                   {"cpus", node.cpus},
                   {"memory_bytes", node.memory_bytes},
                   {"distances", node.distances}});
  return out;
}

Json nics_json(const Topology& topology) {
  Json out = Json::array();
  for (const auto& nic : topology.nics) {
    Json one = {{"name", nic.name},     {"kind", topo::to_string(nic.kind)},
                {"up", nic.up},         {"mtu", nic.mtu},
                {"driver", nic.driver}, {"location", location_json(nic.location)}};
    one["speed_mbps"] = nic.speed_mbps ? Json(*nic.speed_mbps) : Json(nullptr);
    out.push_back(std::move(one));
  }
  return out;
}

Json rdma_json(const Topology& topology) {
  Json out = Json::array();
  for (const auto& rdma : topology.rdma) {
    Json ports = Json::array();
    for (const auto& port : rdma.ports)
      ports.push_back({{"number", port.number},
                       {"active", port.active},
                       {"link_layer", port.link_layer},
                       {"rate_gbps", port.rate_gbps}});
    out.push_back({{"name", rdma.name},
                   {"ports", std::move(ports)},
                   {"nics", rdma.nics},
                   {"location", location_json(rdma.location)}});
  }
  return out;
}

Json gpus_json(const Topology& topology) {
  Json out = Json::array();
  for (const auto& gpu : topology.gpus)
    out.push_back({{"pci_address", gpu.pci_address},
                   {"model", gpu.model},
                   {"has_driver", gpu.has_driver},
                   {"location", location_json(gpu.location)}});
  return out;
}

Json paths_json(const Topology& topology) {
  Json out = Json::array();
  const auto devices = devices_of(topology);
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (std::size_t j = i + 1; j < devices.size(); ++j) {
      const auto kind = topo::path_between(*devices[i].location, *devices[j].location);
      out.push_back({{"from", devices[i].name},
                     {"to", devices[j].name},
                     {"kind", topo::to_string(kind)},
                     {"score", topo::path_score(kind)}});
    }
  }
  return out;
}

void print_json(const Topology& topology) {
  const Json out = {{"nodes", nodes_json(topology)},
                    {"nics", nics_json(topology)},
                    {"rdma", rdma_json(topology)},
                    {"gpus", gpus_json(topology)},
                    {"paths", paths_json(topology)}};
  fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
}

std::string numa_text(const Location& location) {
  return location.numa < 0 ? std::string("node ?") : fmt::format("node {}", location.numa);
}

void print_devices(const Topology& topology) {
  for (const auto& node : topology.nodes)
    fmt::print("node {}  {} CPUs ({})  {:.1f} GiB\n", node.id, node.cpus.size(),
               topo::format_cpu_list(node.cpus),
               static_cast<double>(node.memory_bytes) / (1024.0 * 1024.0 * 1024.0));
  for (const auto& gpu : topology.gpus)
    fmt::print("gpu {}  {}  {}\n", gpu.pci_address, numa_text(gpu.location),
               gpu.has_driver ? gpu.model : "no driver");
  for (const auto& rdma : topology.rdma)
    for (const auto& port : rdma.ports)
      fmt::print("rdma {} port {}  {}  {}  {} Gb/s  {}\n", rdma.name, port.number,
                 numa_text(rdma.location), port.link_layer, port.rate_gbps,
                 port.active ? "active" : "down");
  for (const auto& nic : topology.nics)
    fmt::print("nic {}  {}  {}  {}  mtu {}  {}{}\n", nic.name, topo::to_string(nic.kind),
               nic.up ? "up" : "down",
               nic.speed_mbps ? fmt::format("{} Mb/s", *nic.speed_mbps) : "speed unknown", nic.mtu,
               numa_text(nic.location), nic.driver.empty() ? "" : "  " + nic.driver);
}

void print_paths(const Topology& topology) {
  const auto devices = devices_of(topology);
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (std::size_t j = i + 1; j < devices.size(); ++j) {
      const auto kind = topo::path_between(*devices[i].location, *devices[j].location);
      fmt::print("path {} to {}: {}\n", devices[i].name, devices[j].name, topo::to_string(kind));
    }
  }
}

int show(const TopoOptions& options) {
  const auto topology = topo::discover(options.root);
  if (!topology.ok()) return report(topology.error());
  if (options.json) {
    print_json(*topology);
  } else {
    print_devices(*topology);
    print_paths(*topology);
  }
  return kDone;
}

}  // namespace

void add_topo(CLI::App& app) {
  auto options = std::make_shared<TopoOptions>();
  CLI::App* sub = app.add_subcommand("topo", "Show NUMA nodes, NICs, GPUs and the paths between");
  sub->add_flag("--json", options->json, "Print JSON");
  sub->add_option("--root", options->root, "Where /sys and /proc of the host are mounted")
      ->capture_default_str();
  sub->callback(run(options, show));
}

}  // namespace crossdock::tools
