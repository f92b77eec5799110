// Control of the fake, its function table with failure injection, and its one exported driver
// symbol. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "support/fake_cuda/state.hpp"

namespace crossdock::testing::fake {

State& state() {
  static auto* const instance = new State;
  return *instance;
}

namespace {

// Counts the call, and tells the status of an injected failure.
Status enter(const char* name) {
  State& s = state();
  ++s.calls[name];
  for (auto& failure : s.failures) {
    if (failure.function != name || failure.times == 0) continue;
    if (failure.after-- > 0) continue;
    failure.after = 0;
    --failure.times;
    return failure.status;
  }
  return Status::kSuccess;
}

template <const char* Name, auto Function>
struct Entry;
template <const char* Name, class... Arguments, Status (*Function)(Arguments...)>
struct Entry<Name, Function> {
  static Status call(Arguments... arguments) {
    const std::lock_guard lock(state().mutex);
    const Status injected = enter(Name);
    return injected == Status::kSuccess ? Function(arguments...) : injected;
  }
};

#define CROSSDOCK_CUDA_FUNCTION(name, version, need, parameters) \
  constexpr char kName_##name[] = #name;
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION

struct Symbol {
  const char* name;
  int version;
  void* function;
};
const std::vector<Symbol>& symbols() {
  static const std::vector<Symbol> table = {
#define CROSSDOCK_CUDA_FUNCTION(name, version, need, parameters) \
  {#name, version, reinterpret_cast<void*>(&Entry<kName_##name, &name>::call)},
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION
  };
  return table;
}

class Control final : public FakeCuda {
 public:
  void reset() override {
    const std::lock_guard lock(state().mutex);
    State& s = state();
    s.version = 13000;
    s.device_count = 4;
    for (auto& device : s.devices)
      device.total_bytes = std::size_t{1} << 30;
    s.attributes.clear();
    s.no_peer.clear();
    s.no_atomics.clear();
    s.hidden.clear();
    s.failures.clear();
    s.kernels.clear();
    s.held = false;
    s.unmapped.clear();
    advance();
    s.calls.clear();
    s.last_launch = {};
    s.peers_enabled.clear();
  }
  void set_version(int version) override {
    change([&](State& s) { s.version = version; });
  }
  void set_device_count(int count) override {
    change([&](State& s) { s.device_count = count; });
  }
  void set_device_bytes(int device, std::size_t bytes) override {
    change([&](State& s) { s.devices[device].total_bytes = bytes; });
  }
  void set_attribute(DeviceAttribute attribute, int value) override {
    change([&](State& s) { s.attributes[static_cast<int>(attribute)] = value; });
  }
  void set_peer_access(int from, int to, bool can) override {
    change([&](State& s) {
      if (can) {
        s.no_peer.erase({from, to});
      } else {
        s.no_peer.insert({from, to});
      }
    });
  }
  void set_peer_atomics(int from, int to, bool can) override {
    change([&](State& s) {
      if (can) {
        s.no_atomics.erase({from, to});
      } else {
        s.no_atomics.insert({from, to});
      }
    });
  }
  void hide(const std::string& function) override {
    change([&](State& s) { s.hidden.insert(function); });
  }
  void fail(const FakeFailure& failure) override {
    change([&](State& s) { s.failures.push_back(failure); });
  }
  void hold_work(bool held) override {
    change([&](State& s) { s.held = held; });
    if (!held) change([](State&) { advance(); });
  }
  void set_managed(const void* address) override {
    change([&](State& s) { s.managed.insert(reinterpret_cast<DevicePtr>(address)); });
  }
  void set_unmapped(int device, const void* address) override {
    change([&](State& s) { s.unmapped.insert({device, reinterpret_cast<DevicePtr>(address)}); });
  }
  void set_kernel(const std::string& kernel, FakeKernel body) override {
    change([&](State& s) { s.kernels[kernel] = std::move(body); });
  }
  int calls(const std::string& function) const override {
    const std::lock_guard lock(state().mutex);
    const auto found = state().calls.find(function);
    return found == state().calls.end() ? 0 : found->second;
  }
  FakeLaunch last_launch() const override {
    const std::lock_guard lock(state().mutex);
    return state().last_launch;
  }
  FakeLive live() const override;

 private:
  template <class Change>
  static void change(const Change& apply) {
    const std::lock_guard lock(state().mutex);
    apply(state());
  }
};

FakeLive Control::live() const {
  const std::lock_guard lock(state().mutex);
  const State& s = state();
  FakeLive live;
  for (const auto& device : s.devices) {
    live.contexts += device.retained > 0;
    live.device_bytes += device.used_bytes;
  }
  live.streams = static_cast<int>(s.streams.size());
  live.events = static_cast<int>(s.events.size());
  live.blocks = static_cast<int>(s.blocks.size());
  live.pinned = static_cast<int>(s.pinned.size() + s.registered.size());
  live.allocations = static_cast<int>(s.allocations.size());
  live.ranges = static_cast<int>(s.ranges.size());
  live.mappings = static_cast<int>(s.mappings.size());
  live.modules = static_cast<int>(s.modules.size());
  live.graphs = static_cast<int>(s.graphs.size() + s.execs.size());
  return live;
}

}  // namespace
}  // namespace crossdock::testing::fake

extern "C" {

[[gnu::visibility("default")]] crossdock::testing::FakeCuda* fake_cuda_instance() {
  static crossdock::testing::fake::Control control;
  return &control;
}

[[gnu::visibility("default")]] crossdock::cuda::Status cuGetProcAddress_v2(
    const char* name, void** function, int version, unsigned long long,
    crossdock::cuda::ProcAddressResult* result) {
  using namespace crossdock::testing::fake;  // NOLINT
  const std::lock_guard lock(state().mutex);
  const auto& all = symbols();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Symbol& s) { return std::strcmp(s.name, name) == 0; });
  *function = nullptr;
  if (found == all.end() || state().hidden.count(name) != 0) {
    *result = ProcAddressResult::kSymbolNotFound;
  } else if (version < found->version) {
    *result = ProcAddressResult::kVersionNotSufficient;
  } else {
    *result = ProcAddressResult::kSuccess;
    *function = found->function;
  }
  return Status::kSuccess;
}

}  // extern "C"
