// Discovery on made-up sysfs trees: a two-socket server with switches, GPUs and RDMA, a small
// virtual machine, and broken files. SPDX-License-Identifier: Apache-2.0
#include "topo/topology.hpp"

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include "support/temp_dir.hpp"
#include "topo/sysfs.hpp"

namespace crossdock::topo {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A folder that looks like / to discover().
class FakeRoot {
 public:
  void file(const std::string& path, const std::string& text) { dir_.write(path, text + "\n"); }

  void link(const std::string& from, const std::string& to) {
    const fs::path at = fs::path(dir_.path()) / from;
    fs::create_directories(at.parent_path());
    const fs::path target = fs::path(dir_.path()) / to;
    fs::create_directories(target);
    fs::create_symlink(fs::relative(target, at.parent_path()), at);
  }

  void node(int id, const std::string& cpus, const std::string& distances) {
    const std::string path = "sys/devices/system/node/node" + std::to_string(id);
    file(path + "/cpulist", cpus);
    file(path + "/distance", distances);
    file(path + "/meminfo", "Node 0 MemTotal:       1024 kB\nNode 0 MemFree:  5 kB");
  }

  // A PCI function at `path` below /sys/devices, linked from /sys/bus/pci/devices.
  std::string pci(const std::string& path, int numa) {
    const std::string device = "sys/devices/" + path;
    file(device + "/numa_node", std::to_string(numa));
    link("sys/bus/pci/devices/" + fs::path(path).filename().string(), device);
    return device;
  }

  void gpu(const std::string& path, int numa, const std::string& model) {
    const std::string device = pci(path, numa);
    file(device + "/vendor", "0x10de");
    file(device + "/class", "0x030200");
    const std::string address = fs::path(path).filename().string();
    if (!model.empty())
      file("proc/driver/nvidia/gpus/" + address + "/information",
           "Model: \t\t " + model + "\nIRQ:   \t\t 1");
  }

  void nic(const std::string& name, const std::string& device, const std::string& speed) {
    const std::string path = device + "/net/" + name;
    file(path + "/type", "1");
    file(path + "/operstate", "up");
    file(path + "/mtu", "9000");
    if (!speed.empty()) file(path + "/speed", speed);
    link(path + "/device", device);
    link("sys/class/net/" + name, path);
  }

  [[nodiscard]] const std::string& path() const { return dir_.path(); }

 private:
  support::TempDir dir_;
};

// Socket 0: a switch with GPU and NIC, and a NIC on another host bridge. Socket 1: a GPU.
void make_server(FakeRoot& root) {
  root.node(0, "0-3,8-11", "10 21");
  root.node(1, "4-7,12-15", "21 10");
  const std::string sw = "pci0000:16/0000:16:02.0/0000:17:00.0/";
  root.gpu(sw + "0000:18:01.0/0000:19:00.0", 0, "NVIDIA H200");
  const auto near = root.pci(sw + "0000:18:02.0/0000:1a:00.0", 0);
  root.nic("ens1np0", near, "400000");
  root.link(near + "/driver", "sys/bus/pci/drivers/mlx5_core");
  const std::string ib = near + "/infiniband/mlx5_0";
  root.file(ib + "/ports/1/state", "4: ACTIVE");
  root.file(ib + "/ports/1/link_layer", "InfiniBand");
  root.file(ib + "/ports/1/rate", "400 Gb/sec (4X NDR)");
  root.link(ib + "/device", near);
  root.link("sys/class/infiniband/mlx5_0", ib);
  root.nic("eno1", root.pci("pci0000:40/0000:40:01.0/0000:41:00.0", 0), "");
  root.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "");
  root.file("sys/class/net/lo/type", "772");
  root.file("sys/class/net/lo/operstate", "unknown");
  root.file("sys/class/net/lo/flags", "0x9");
  root.file("sys/class/net/bonding_masters", "");
}

class ServerTopology : public testing::Test {
 protected:
  void SetUp() override {
    make_server(root_);
    auto found = discover(root_.path());
    ASSERT_TRUE(found.ok()) << found.error().describe();
    topology_ = std::move(found).value();
  }
  const Nic& nic(const std::string& name) const {
    for (const Nic& nic : topology_.nics)
      if (nic.name == name) return nic;
    throw std::out_of_range(name);
  }
  FakeRoot root_;
  Topology topology_;
};

TEST_F(ServerTopology, Nodes) {
  ASSERT_EQ(topology_.nodes.size(), 2u);
  EXPECT_THAT(topology_.nodes[1].cpus, ElementsAre(4, 5, 6, 7, 12, 13, 14, 15));
  EXPECT_THAT(topology_.nodes[1].distances, ElementsAre(21, 10));
  EXPECT_EQ(topology_.nodes[0].memory_bytes, 1024u * 1024);
  EXPECT_EQ(topology_.all_cpus().size(), 16u);
}

TEST_F(ServerTopology, Nics) {
  ASSERT_EQ(topology_.nics.size(), 3u);
  const Nic& fast = nic("ens1np0");
  EXPECT_EQ(fast.kind, NicKind::kPhysical);
  EXPECT_TRUE(fast.up);
  EXPECT_EQ(fast.speed_mbps, 400000u);
  EXPECT_EQ(fast.mtu, 9000u);
  EXPECT_EQ(fast.driver, "mlx5_core");
  EXPECT_EQ(fast.location.numa, 0);
  EXPECT_THAT(fast.location.pci, ElementsAre("pci0000:16", "0000:16:02.0", "0000:17:00.0",
                                             "0000:18:02.0", "0000:1a:00.0"));
  EXPECT_EQ(nic("eno1").speed_mbps, std::nullopt);
  EXPECT_EQ(nic("lo").kind, NicKind::kLoopback);
  EXPECT_TRUE(nic("lo").up);
}

TEST_F(ServerTopology, Rdma) {
  ASSERT_EQ(topology_.rdma.size(), 1u);
  const RdmaDevice& device = topology_.rdma[0];
  EXPECT_EQ(device.name, "mlx5_0");
  EXPECT_THAT(device.nics, ElementsAre("ens1np0"));
  EXPECT_EQ(device.location, nic("ens1np0").location);
  ASSERT_EQ(device.ports.size(), 1u);
  EXPECT_TRUE(device.ports[0].active);
  EXPECT_EQ(device.ports[0].rate_gbps, 400u);
  EXPECT_EQ(device.ports[0].link_layer, "InfiniBand");
}

TEST_F(ServerTopology, GpusWithAndWithoutDriver) {
  ASSERT_EQ(topology_.gpus.size(), 2u);
  EXPECT_EQ(topology_.gpus[0].model, "NVIDIA H200");
  EXPECT_TRUE(topology_.gpus[0].has_driver);
  EXPECT_EQ(topology_.gpus[1].pci_address, "0000:81:00.0");
  EXPECT_FALSE(topology_.gpus[1].has_driver);
  EXPECT_THAT(topology_.cpus_near(topology_.gpus[1].location),
              ElementsAre(4, 5, 6, 7, 12, 13, 14, 15));
}

TEST_F(ServerTopology, PathsAreRanked) {
  const Location& gpu = topology_.gpus[0].location;
  EXPECT_EQ(path_between(gpu, gpu), PathKind::kSame);
  EXPECT_EQ(path_between(gpu, nic("ens1np0").location), PathKind::kSwitch);
  EXPECT_EQ(path_between(gpu, nic("eno1").location), PathKind::kNuma);
  EXPECT_EQ(path_between(gpu, topology_.gpus[1].location), PathKind::kCross);
  EXPECT_EQ(path_between(gpu, nic("lo").location), PathKind::kUnknown);
}

TEST(Path, OneHostBridgeIsNotASwitch) {
  const Location a{.numa = 0, .pci = {"pci0000:00", "0000:00:01.0", "0000:01:00.0"}};
  const Location b{.numa = 0, .pci = {"pci0000:00", "0000:00:02.0", "0000:02:00.0"}};
  EXPECT_EQ(path_between(a, b), PathKind::kHostBridge);
}

TEST(Path, ScoresFollowTheOrderOfKinds) {
  int last = 101;
  for (const auto kind : {PathKind::kSame, PathKind::kSwitch, PathKind::kHostBridge,
                          PathKind::kNuma, PathKind::kUnknown, PathKind::kCross}) {
    EXPECT_LT(path_score(kind), last) << to_string(kind);
    last = path_score(kind);
  }
  EXPECT_GT(last, 0);
}

TEST(Discover, AVirtualMachineWithoutNuma) {
  FakeRoot root;
  root.file("sys/devices/system/cpu/online", "0-1");
  root.file("proc/meminfo", "MemTotal:       2048 kB");
  const auto device = root.pci("pci0000:00/0000:00:03.0", -1);
  fs::create_directories(root.path() + "/" + device + "/virtio0");
  root.nic("eth0", device + "/virtio0", "-1");
  const auto found = discover(root.path());
  ASSERT_TRUE(found.ok());
  ASSERT_EQ(found->nodes.size(), 1u);
  EXPECT_THAT(found->nodes[0].cpus, ElementsAre(0, 1));
  EXPECT_EQ(found->nodes[0].memory_bytes, 2048u * 1024);
  ASSERT_EQ(found->nics.size(), 1u);
  EXPECT_THAT(found->nics[0].location.pci, ElementsAre("pci0000:00", "0000:00:03.0"));
  EXPECT_EQ(found->nics[0].speed_mbps, std::nullopt);
  EXPECT_THAT(found->gpus, IsEmpty());
  EXPECT_THAT(found->cpus_near(found->nics[0].location), ElementsAre(0, 1));
}

TEST(Discover, ADriverWithoutPciTreeStillShowsItsGpus) {
  FakeRoot root;
  root.node(0, "0", "10");
  root.file("proc/driver/nvidia/gpus/0000:05:00.0/information", "Model: NVIDIA L4");
  const auto found = discover(root.path());
  ASSERT_EQ(found->gpus.size(), 1u);
  EXPECT_EQ(found->gpus[0].model, "NVIDIA L4");
  EXPECT_THAT(found->gpus[0].location.pci, IsEmpty());
}

TEST(Discover, RubbishInFilesIsLeftOut) {
  FakeRoot root;
  root.node(0, "rubbish,3-x,5,9-7,0-99999999", "a 10");
  root.file("sys/devices/system/node/nodeX/cpulist", "1");
  root.file("sys/class/net/odd/operstate", "");
  root.file("sys/class/net/odd/mtu", "many");
  const auto found = discover(root.path());
  ASSERT_TRUE(found.ok());
  ASSERT_EQ(found->nodes.size(), 1u);
  EXPECT_THAT(found->nodes[0].cpus, ElementsAre(5));
  EXPECT_THAT(found->nodes[0].distances, ElementsAre(10));
  EXPECT_FALSE(found->nics.at(0).up);
  EXPECT_EQ(found->nics.at(0).mtu, 0u);
}

TEST(Discover, NoSysfsIsSaid) {
  const support::TempDir dir;
  const auto found = discover(dir.path());
  ASSERT_EQ(found.code(), Code::kUnsupported);
  EXPECT_THAT(found.error().message, HasSubstr("mount sysfs"));
}

TEST(Discover, ThisMachineHasCpusAndLoopback) {
  const auto found = discover();
  ASSERT_TRUE(found.ok()) << found.error().describe();
  EXPECT_FALSE(found->all_cpus().empty());
  EXPECT_GT(found->nodes.front().memory_bytes, 0u);
}

TEST(CpuList, ParsesAndFormats) {
  EXPECT_THAT(parse_cpu_list("0-2,7"), ElementsAre(0, 1, 2, 7));
  EXPECT_THAT(parse_cpu_list(""), IsEmpty());
  EXPECT_EQ(format_cpu_list({0, 1, 2, 7, 9, 10}), "0-2,7,9-10");
  EXPECT_EQ(format_cpu_list({}), "");
}

TEST(PciPath, OnlyPciPartsCount) {
  EXPECT_THAT(pci_path_of("/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0"),
              ElementsAre("pci0000:00", "0000:00:03.0"));
  EXPECT_THAT(pci_path_of("/sys/devices/pci10000:e1/10000:e1:00.0/10000:e2:00.0"),
              ElementsAre("pci10000:e1", "10000:e1:00.0", "10000:e2:00.0"));
  EXPECT_THAT(pci_path_of("/sys/devices/virtual/net/lo"), IsEmpty());
  EXPECT_THAT(pci_path_of(""), IsEmpty());
}

}  // namespace
}  // namespace crossdock::topo
