// Modules of machine code, their functions, and launches. Module is single-owner; Function is a
// view that its module outlives. Launching is thread-safe and never compiles.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <crossdock/core/result.hpp>

#include "cuda/stream.hpp"

namespace crossdock::cuda {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchOptions {
  Dim3 grid = {};
  Dim3 block = {};
  Dim3 cluster = {};  // 1,1,1: no cluster
  unsigned dynamic_shared_bytes = 0;
  bool cooperative = false;  // all blocks resident at once, or the launch fails
  // The kernel may start while the one before it drains, and must order itself against it.
  bool programmatic_serialization = false;
};

struct FunctionInfo {
  int num_registers = 0;
  int static_shared_bytes = 0;
  int local_bytes = 0;  // per thread: spills and local arrays
  int max_threads_per_block = 0;
  int binary_version = 0;  // 90: machine code for sm_90
};

class Function {
 public:
  Function(const Context& context, FunctionHandle handle, std::string name)
      : context_(context), handle_(handle), name_(std::move(name)) {}

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] FunctionHandle handle() const { return handle_; }
  [[nodiscard]] const Context& context() const { return context_; }
  Result<FunctionInfo> info() const;
  // Before the first launch with more than 48 KiB.
  Result<void> set_max_dynamic_shared(std::size_t bytes) const;
  Result<int> max_blocks_per_sm(int block_size, std::size_t dynamic_shared_bytes) const;

  // `parameters` holds one pointer per kernel parameter; they are copied before this returns.
  Result<void> launch(const Stream& stream, const LaunchOptions& options,
                      std::span<void*> parameters) const;
  // For kernels with one parameter struct, the rule of this library.
  template <class Params>
  Result<void> launch(const Stream& stream, const LaunchOptions& options,
                      const Params& params) const {
    void* pointers[] = {const_cast<Params*>(&params)};
    return launch(stream, options, std::span<void*>(pointers));
  }

 private:
  Context context_;
  FunctionHandle handle_;
  std::string name_;
};

class Module {
 public:
  // `image`: a cubin (or a fatbin, or PTX ended by a zero byte). `name` is for error texts only.
  static Result<Module> load(const Context& context, std::span<const std::byte> image,
                             std::string name);
  Module(Module&& other) noexcept
      : context_(other.context_),
        handle_(std::exchange(other.handle_, nullptr)),
        name_(std::move(other.name_)) {}
  Module& operator=(Module&& other) noexcept;
  ~Module() { unload(); }

  Result<Function> function(const std::string& entry) const;
  struct Global {
    DevicePtr address;
    std::size_t bytes;
  };
  Result<Global> global(const std::string& symbol) const;

 private:
  Module(Context context, ModuleHandle handle, std::string name)
      : context_(std::move(context)), handle_(handle), name_(std::move(name)) {}
  void unload() noexcept;
  Context context_;
  ModuleHandle handle_;
  std::string name_;
};

}  // namespace crossdock::cuda
