// Devices and their primary contexts. Device is a value (thread-compatible). Context is a shared
// handle of the device's primary context, the one every CUDA framework of the process uses; it is
// thread-safe, and everything made from it (stream, memory, module) keeps it alive, so that any
// destruction order is right. Must not create a context of its own beside the primary one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>

#include "cuda/driver.hpp"

namespace crossdock::cuda {

struct Device {
  int ordinal = -1;  // as CUDA_VISIBLE_DEVICES leaves it
  std::string name;
  std::string uuid;    // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx": the identity across processes
  std::string pci_id;  // "0000:1b:00.0", lower case, as in sysfs
  int sm_major = 0;
  int sm_minor = 0;
  int num_sms = 0;
  int numa_node = -1;  // -1: unknown, or the host has none
  std::uint64_t memory_bytes = 0;
  std::uint64_t l2_bytes = 0;
  int max_shared_bytes_per_block = 0;  // with opt-in
  int clock_khz = 0;
  bool vmm = false;
  bool posix_fd_handles = false;
  bool fabric_handles = false;
  bool dma_buf = false;
  bool gpu_direct_rdma_vmm = false;
  bool cooperative_launch = false;
  bool cluster_launch = false;

  // 90 for Hopper, 100 for Blackwell.
  [[nodiscard]] int sm() const { return sm_major * 10 + sm_minor; }
};

Result<int> device_count(const Driver& driver);
Result<Device> query_device(const Driver& driver, int ordinal);
Result<std::vector<Device>> query_devices(const Driver& driver);

// Makes a context current for a scope and restores what was current before; does nothing when it is
// current already. Bound to the thread that made it. Move-only.
class ContextGuard {
 public:
  ContextGuard(ContextGuard&& other) noexcept;
  ContextGuard& operator=(ContextGuard&&) = delete;
  ~ContextGuard();

 private:
  friend class Context;
  explicit ContextGuard(const Driver* pop_with) : pop_with_(pop_with) {}
  const Driver* pop_with_;  // null: nothing was pushed
};

class Context {
 public:
  // Retains the primary context of the device; the last handle releases it.
  static Result<Context> primary(const Driver& driver, int ordinal);

  [[nodiscard]] const Driver& driver() const { return *core_->driver; }
  [[nodiscard]] const Device& device() const { return core_->device; }
  [[nodiscard]] int ordinal() const { return core_->device.ordinal; }
  [[nodiscard]] ContextHandle handle() const { return core_->handle; }

  Result<ContextGuard> enter() const;
  // The guard for destructors, which have nobody to report to: on failure it guards nothing.
  ContextGuard enter_quietly() const noexcept;
  struct MemoryInfo {
    std::size_t free_bytes;
    std::size_t total_bytes;
  };
  Result<MemoryInfo> memory_info() const;
  friend bool operator==(const Context& a, const Context& b) { return a.handle() == b.handle(); }

 private:
  struct Core {
    const Driver* driver;
    Device device;
    ContextHandle handle;
    Core(const Driver* d, Device dev, ContextHandle h)
        : driver(d), device(std::move(dev)), handle(h) {}
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    ~Core();
  };
  explicit Context(std::shared_ptr<const Core> core) : core_(std::move(core)) {}
  std::shared_ptr<const Core> core_;
};

// --- peers ---
struct PeerAccess {
  bool supported = false;       // loads and stores reach the peer's memory
  bool native_atomics = false;  // and so do atomics (NVLink)
  int performance_rank = 0;     // lower is faster, as the driver ranks the links
};
Result<PeerAccess> query_peer_access(const Driver& driver, int from, int to);
// Lets `from`'s kernels and copies reach `to`'s memory. Repeating it is no error. Mappings of the
// virtual memory management do not need it; they name their devices themselves.
Result<void> enable_peer_access(const Context& from, const Context& to);

}  // namespace crossdock::cuda
