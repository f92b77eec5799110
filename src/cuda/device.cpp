// Device properties, primary contexts, peer access. See device.hpp for threads and lifetimes.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.hpp"

#include <array>
#include <cctype>
#include <fmt/format.h>
#include <fstream>
#include <utility>

namespace crossdock::cuda {
namespace {

Result<int> attribute(const Driver& driver, int ordinal, DeviceAttribute which) {
  int value = 0;
  CROSSDOCK_CUDA(driver, cuDeviceGetAttribute(&value, which, ordinal),
                 fmt::format("ask attribute {} of GPU {}", static_cast<int>(which), ordinal));
  return value;
}

// Attributes that an older driver does not know count as "no".
bool has(const Driver& driver, int ordinal, DeviceAttribute which) {
  return attribute(driver, ordinal, which).value_or(0) != 0;
}

std::string uuid_text(const Uuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

// Drivers before CUDA 12.2 do not tell; then the kernel's view of the PCI device does.
int numa_node_of(const Driver& driver, int ordinal, const std::string& pci_id) {
  if (const auto node = attribute(driver, ordinal, DeviceAttribute::kHostNumaId);
      node.ok() && *node >= 0)
    return *node;
  std::ifstream file("/sys/bus/pci/devices/" + pci_id + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

Result<void> fill_identity(const Driver& driver, Device& device) {
  std::array<char, 256> text{};
  CROSSDOCK_CUDA(driver, cuDeviceGetName(text.data(), int(text.size()) - 1, device.ordinal),
                 fmt::format("ask the name of GPU {}", device.ordinal));
  device.name = text.data();
  text.fill('\0');
  CROSSDOCK_CUDA(driver, cuDeviceGetPCIBusId(text.data(), int(text.size()) - 1, device.ordinal),
                 fmt::format("ask the PCI address of GPU {}", device.ordinal));
  device.pci_id = text.data();
  for (char& c : device.pci_id)
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  Uuid uuid{};
  CROSSDOCK_CUDA(driver, cuDeviceGetUuid(&uuid, device.ordinal),
                 fmt::format("ask the UUID of GPU {}", device.ordinal));
  device.uuid = uuid_text(uuid);
  std::size_t bytes = 0;
  CROSSDOCK_CUDA(driver, cuDeviceTotalMem(&bytes, device.ordinal),
                 fmt::format("ask the memory size of GPU {}", device.ordinal));
  device.memory_bytes = bytes;
  return {};
}

Result<void> fill_numbers(const Driver& driver, Device& device) {
  const std::array<std::pair<DeviceAttribute, int*>, 5> numbers = {{
      {DeviceAttribute::kComputeCapabilityMajor, &device.sm_major},
      {DeviceAttribute::kComputeCapabilityMinor, &device.sm_minor},
      {DeviceAttribute::kMultiprocessorCount, &device.num_sms},
      {DeviceAttribute::kMaxSharedMemoryPerBlockOptin, &device.max_shared_bytes_per_block},
      {DeviceAttribute::kClockRateKhz, &device.clock_khz},
  }};
  for (const auto& [which, target] : numbers) {
    CROSSDOCK_TRY(value, attribute(driver, device.ordinal, which));
    *target = value;
  }
  CROSSDOCK_TRY(l2, attribute(driver, device.ordinal, DeviceAttribute::kL2CacheBytes));
  device.l2_bytes = static_cast<std::uint64_t>(l2);
  return {};
}

void fill_abilities(const Driver& driver, Device& device) {
  const int n = device.ordinal;
  device.vmm = has(driver, n, DeviceAttribute::kVirtualMemoryManagement);
  device.posix_fd_handles = has(driver, n, DeviceAttribute::kHandleTypePosixFd);
  device.fabric_handles = has(driver, n, DeviceAttribute::kHandleTypeFabric);
  device.dma_buf = has(driver, n, DeviceAttribute::kDmaBuf) && driver.cuMemGetHandleForAddressRange;
  device.gpu_direct_rdma_vmm = has(driver, n, DeviceAttribute::kGpuDirectRdmaWithVmm);
  device.cooperative_launch = has(driver, n, DeviceAttribute::kCooperativeLaunch);
  device.cluster_launch = has(driver, n, DeviceAttribute::kClusterLaunch);
}

}  // namespace

Result<int> device_count(const Driver& driver) {
  int count = 0;
  CROSSDOCK_CUDA(driver, cuDeviceGetCount(&count), "count the GPUs");
  return count;
}

Result<Device> query_device(const Driver& driver, int ordinal) {
  CROSSDOCK_TRY(count, device_count(driver));
  if (ordinal < 0 || ordinal >= count)
    return invalid_argument(
        fmt::format("GPU {} does not exist: this process sees {} GPU(s), numbered "
                    "from 0 (CUDA_VISIBLE_DEVICES may hide others)",
                    ordinal, count));
  Device device;
  device.ordinal = ordinal;
  CROSSDOCK_CHECK_OK(fill_identity(driver, device));
  CROSSDOCK_CHECK_OK(fill_numbers(driver, device));
  fill_abilities(driver, device);
  device.numa_node = numa_node_of(driver, ordinal, device.pci_id);
  return device;
}

Result<std::vector<Device>> query_devices(const Driver& driver) {
  CROSSDOCK_TRY(count, device_count(driver));
  std::vector<Device> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CROSSDOCK_TRY(device, query_device(driver, ordinal));
    devices.push_back(std::move(device));
  }
  return devices;
}

ContextGuard::ContextGuard(ContextGuard&& other) noexcept
    : pop_with_(std::exchange(other.pop_with_, nullptr)) {}

ContextGuard::~ContextGuard() {
  ContextHandle popped = nullptr;
  if (pop_with_) static_cast<void>(pop_with_->cuCtxPopCurrent(&popped));
}

Context::Core::~Core() {
  static_cast<void>(driver->cuDevicePrimaryCtxRelease(device.ordinal));
}

Result<Context> Context::primary(const Driver& driver, int ordinal) {
  CROSSDOCK_TRY(device, query_device(driver, ordinal));
  ContextHandle handle = nullptr;
  CROSSDOCK_CUDA(driver, cuDevicePrimaryCtxRetain(&handle, ordinal),
                 fmt::format("retain the primary context of GPU {} ({})", ordinal, device.name));
  return Context(std::make_shared<const Core>(&driver, std::move(device), handle));
}

Result<ContextGuard> Context::enter() const {
  ContextHandle current = nullptr;
  CROSSDOCK_CUDA(driver(), cuCtxGetCurrent(&current), "ask for the current context");
  if (current == handle()) return ContextGuard(nullptr);
  CROSSDOCK_CUDA(driver(), cuCtxPushCurrent(handle()),
                 fmt::format("make the context of GPU {} current", ordinal()));
  return ContextGuard(&driver());
}

ContextGuard Context::enter_quietly() const noexcept {
  ContextHandle current = nullptr;
  const bool known = driver().cuCtxGetCurrent(&current) == Status::kSuccess;
  if (known && current == handle()) return ContextGuard(nullptr);
  const bool pushed = known && driver().cuCtxPushCurrent(handle()) == Status::kSuccess;
  return ContextGuard(pushed ? &driver() : nullptr);
}

Result<Context::MemoryInfo> Context::memory_info() const {
  CROSSDOCK_TRY(guard, enter());
  MemoryInfo info{};
  CROSSDOCK_CUDA(driver(), cuMemGetInfo(&info.free_bytes, &info.total_bytes),
                 fmt::format("ask the free memory of GPU {}", ordinal()));
  return info;
}

Result<PeerAccess> query_peer_access(const Driver& driver, int from, int to) {
  if (from == to) return PeerAccess{.supported = true, .native_atomics = true};
  const auto ask = [&](P2pAttribute which) -> Result<int> {
    int value = 0;
    CROSSDOCK_CUDA(driver, cuDeviceGetP2PAttribute(&value, which, from, to),
                   fmt::format("ask for peer access from GPU {} to GPU {}", from, to));
    return value;
  };
  CROSSDOCK_TRY(supported, ask(P2pAttribute::kAccessSupported));
  CROSSDOCK_TRY(atomics, ask(P2pAttribute::kNativeAtomicSupported));
  CROSSDOCK_TRY(rank, ask(P2pAttribute::kPerformanceRank));
  return PeerAccess{
      .supported = supported != 0, .native_atomics = atomics != 0, .performance_rank = rank};
}

Result<void> enable_peer_access(const Context& from, const Context& to) {
  if (from == to) return {};
  const Driver& driver = from.driver();
  CROSSDOCK_TRY(access, query_peer_access(driver, from.ordinal(), to.ordinal()));
  if (!access.supported)
    return make_error(
        Code::kUnreachable,
        fmt::format(
            "GPU {} ({}) cannot reach the memory of GPU {} ({}): no NVLink or PCIe peer path; "
            "check `nvidia-smi topo -p2p r`, and PCIe access control (ACS) in a VM",
            from.ordinal(), from.device().pci_id, to.ordinal(), to.device().pci_id));
  CROSSDOCK_TRY(guard, from.enter());
  const Status status = driver.cuCtxEnablePeerAccess(to.handle(), 0);
  if (status == Status::kPeerAccessAlreadyEnabled) return {};
  return driver.check(status, fmt::format("enable peer access from GPU {} to GPU {}",
                                          from.ordinal(), to.ordinal()));
}

}  // namespace crossdock::cuda
