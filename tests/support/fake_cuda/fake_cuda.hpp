// Control of the fake CUDA driver (tests only). The fake has every function of driver_table.def.
// Its "device memory" is host memory, so tests read it through the device address; allocations of
// the virtual memory management are memfds and travel between processes; work on a stream runs at
// once on the calling thread, unless work is held back or something before it waits for a word or
// an event: then in a later call of the driver. It is strict where the real driver is: a
// call without a current context, with a dead handle, or a double free fails. Thread-safe; the
// state is per process. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <dlfcn.h>
#include <functional>
#include <string>

#include "cuda/driver_types.hpp"

namespace crossdock::testing {

// The `after`-th next call of `function` (0: the next one) and the `times - 1` following ones
// return `status` and do nothing.
struct FakeFailure {
  std::string function;
  cuda::Status status = cuda::Status::kUnknown;
  int after = 0;
  int times = 1;
};

// Objects that exist now. All zero when everything was released.
struct FakeLive {
  int contexts = 0;
  int streams = 0;
  int events = 0;
  int blocks = 0;       // cuMemAlloc
  int pinned = 0;       // cuMemHostAlloc, cuMemHostRegister
  int allocations = 0;  // cuMemCreate and imports
  int ranges = 0;       // reserved address ranges
  int mappings = 0;
  int modules = 0;
  int graphs = 0;  // graphs and their executables
  std::size_t device_bytes = 0;
  friend bool operator==(const FakeLive&, const FakeLive&) = default;
};

struct FakeLaunch {
  std::string kernel;
  cuda::LaunchConfig config{};
  bool cooperative = false;
  bool programmatic = false;
  unsigned cluster_x = 1;
};

using FakeKernel = std::function<void(const cuda::LaunchConfig& config, void** parameters)>;

class FakeCuda {
 public:
  // Back to the default machine: 4 GPUs of sm_90 with 1 GiB each, all peers, CUDA 13.0, no fabric
  // handles, nothing failing. Objects that exist stay.
  virtual void reset() = 0;
  virtual void set_version(int version) = 0;
  virtual void set_device_count(int count) = 0;
  virtual void set_device_bytes(int device, std::size_t bytes) = 0;
  virtual void set_attribute(cuda::DeviceAttribute attribute, int value) = 0;
  virtual void set_peer_access(int from, int to, bool can) = 0;
  // Peer access stays; atomics over it do not work.
  virtual void set_peer_atomics(int from, int to, bool can) = 0;
  virtual void hide(const std::string& function) = 0;  // as if the driver had no such function
  virtual void fail(const FakeFailure& failure) = 0;
  // While held, streams and events report work as unfinished, and nothing that is put on a stream
  // runs; it does when it is let go.
  virtual void hold_work(bool held) = 0;
  // The block at `address` is managed memory until it is freed.
  virtual void set_managed(const void* address) = 0;
  // Kernels of the GPU cannot reach the block, or pinned memory, at `address`.
  virtual void set_unmapped(int device, const void* address) = 0;
  // What a launch of `kernel` does; without it a launch is only recorded.
  virtual void set_kernel(const std::string& kernel, FakeKernel body) = 0;

  [[nodiscard]] virtual int calls(const std::string& function) const = 0;
  [[nodiscard]] virtual FakeLive live() const = 0;
  [[nodiscard]] virtual FakeLaunch last_launch() const = 0;

 protected:
  ~FakeCuda() = default;
};

// The control of the fake at `library`; null when it cannot be opened.
inline FakeCuda* open_fake_cuda(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return nullptr;
  using Instance = FakeCuda* (*)();
  const auto instance = reinterpret_cast<Instance>(::dlsym(handle, "fake_cuda_instance"));
  return instance ? instance() : nullptr;
}

}  // namespace crossdock::testing
