// Loading machine code and launching it. See module.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/module.hpp"

#include <array>
#include <fmt/format.h>

namespace crossdock::cuda {
namespace {

bool has_cluster(const Dim3& cluster) {
  return cluster.x * cluster.y * cluster.z > 1;
}

// The attributes that differ from the default; returns how many.
unsigned fill_attributes(const LaunchOptions& options, std::array<LaunchAttribute, 3>& attributes) {
  unsigned count = 0;
  if (options.cooperative) {
    auto& attribute = attributes[count++];
    attribute.id = LaunchAttributeId::kCooperative;
    attribute.value.cooperative = 1;
  }
  if (has_cluster(options.cluster)) {
    auto& attribute = attributes[count++];
    attribute.id = LaunchAttributeId::kClusterDimension;
    attribute.value.cluster_dim = {options.cluster.x, options.cluster.y, options.cluster.z};
  }
  if (options.programmatic_serialization) {
    auto& attribute = attributes[count++];
    attribute.id = LaunchAttributeId::kProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization = 1;
  }
  return count;
}

std::string launch_text(const std::string& name, const LaunchOptions& o) {
  std::string text = fmt::format("launch {} with grid {}x{}x{}, block {}x{}x{}", name, o.grid.x,
                                 o.grid.y, o.grid.z, o.block.x, o.block.y, o.block.z);
  if (has_cluster(o.cluster))
    text += fmt::format(", cluster {}x{}x{}", o.cluster.x, o.cluster.y, o.cluster.z);
  text += fmt::format(", {} bytes of shared memory", o.dynamic_shared_bytes);
  if (o.cooperative) text += ", cooperative";
  return text;
}

}  // namespace

Result<FunctionInfo> Function::info() const {
  FunctionInfo info;
  const std::array<std::pair<FunctionAttribute, int*>, 5> fields = {{
      {FunctionAttribute::kNumRegs, &info.num_registers},
      {FunctionAttribute::kSharedBytes, &info.static_shared_bytes},
      {FunctionAttribute::kLocalBytes, &info.local_bytes},
      {FunctionAttribute::kMaxThreadsPerBlock, &info.max_threads_per_block},
      {FunctionAttribute::kBinaryVersion, &info.binary_version},
  }};
  CROSSDOCK_TRY(guard, context_.enter());
  for (const auto& [which, target] : fields)
    CROSSDOCK_CUDA(context_.driver(), cuFuncGetAttribute(target, which, handle_),
                   fmt::format("ask attribute {} of kernel {}", static_cast<int>(which), name_));
  return info;
}

Result<void> Function::set_max_dynamic_shared(std::size_t bytes) const {
  const int most = context_.device().max_shared_bytes_per_block;
  if (bytes > static_cast<std::size_t>(most))
    return invalid_argument(
        fmt::format("kernel {} wants {} bytes of shared memory per block; GPU {} has {}: choose a "
                    "configuration with fewer stages or smaller tiles",
                    name_, bytes, context_.ordinal(), most));
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(),
                 cuFuncSetAttribute(handle_, FunctionAttribute::kMaxDynamicSharedBytes,
                                    static_cast<int>(bytes)),
                 fmt::format("allow kernel {} {} bytes of shared memory", name_, bytes));
  return {};
}

Result<int> Function::max_blocks_per_sm(int block_size, std::size_t dynamic_shared_bytes) const {
  int blocks = 0;
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(),
                 cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, handle_, block_size,
                                                             dynamic_shared_bytes),
                 fmt::format("ask the occupancy of kernel {}", name_));
  return blocks;
}

Result<void> Function::launch(const Stream& stream, const LaunchOptions& options,
                              std::span<void*> parameters) const {
  std::array<LaunchAttribute, 3> attributes{};
  const unsigned count = fill_attributes(options, attributes);
  const LaunchConfig config{.grid_x = options.grid.x,
                            .grid_y = options.grid.y,
                            .grid_z = options.grid.z,
                            .block_x = options.block.x,
                            .block_y = options.block.y,
                            .block_z = options.block.z,
                            .shared_bytes = options.dynamic_shared_bytes,
                            .stream = stream.handle(),
                            .attributes = count ? attributes.data() : nullptr,
                            .num_attributes = count};
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(), cuLaunchKernelEx(&config, handle_, parameters.data(), nullptr),
                 launch_text(name_, options));
  return {};
}

Result<Module> Module::load(const Context& context, std::span<const std::byte> image,
                            std::string name) {
  if (image.empty()) return invalid_argument(fmt::format("module {} has no code", name));
  ModuleHandle handle = nullptr;
  CROSSDOCK_TRY(guard, context.enter());
  CROSSDOCK_CUDA(context.driver(), cuModuleLoadData(&handle, image.data()),
                 fmt::format("load {} bytes of machine code of {} on GPU {} (sm_{})", image.size(),
                             name, context.ordinal(), context.device().sm()));
  return Module(context, handle, std::move(name));
}

Module& Module::operator=(Module&& other) noexcept {
  if (this == &other) return *this;
  unload();
  context_ = other.context_;
  handle_ = std::exchange(other.handle_, nullptr);
  name_ = std::move(other.name_);
  return *this;
}

void Module::unload() noexcept {
  if (!handle_) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuModuleUnload(std::exchange(handle_, nullptr)));
}

Result<Function> Module::function(const std::string& entry) const {
  FunctionHandle function = nullptr;
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(), cuModuleGetFunction(&function, handle_, entry.c_str()),
                 fmt::format("find kernel {} in module {}", entry, name_));
  return Function(context_, function, entry);
}

Result<Module::Global> Module::global(const std::string& symbol) const {
  Global global{};
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(),
                 cuModuleGetGlobal(&global.address, &global.bytes, handle_, symbol.c_str()),
                 fmt::format("find variable {} in module {}", symbol, name_));
  return global;
}

}  // namespace crossdock::cuda
