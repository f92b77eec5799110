// World: memory of the ranks, checks of launches, and the hand-over to the Runtime.
// SPDX-License-Identifier: Apache-2.0
#include "twin/launch.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fmt/format.h>
#include <vector>

#include "twin/mapping.hpp"
#include "twin/runtime.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::twin {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMaxShared = 227 * 1024;  // what a block may have on sm_90
constexpr std::uint32_t kMaxThreads = 1024;
constexpr std::size_t kStackFactor = kSanitized ? 4 : 1;  // instrumented frames are larger
constexpr std::size_t kSmallReset = std::size_t{1} << 20;

std::size_t shared_pitch(std::size_t bytes) {
  return (bytes + 2047) / 1024 * 1024;
}

Result<void> check_launch(const LaunchConfig& config, int ranks) {
  if (config.rank < 0 || config.rank >= ranks)
    return invalid_argument(
        fmt::format("launch of {}: rank = {} must be 0..{}", config.name, config.rank, ranks - 1));
  if (config.grid == 0 || config.block == 0 || config.block > kMaxThreads)
    return invalid_argument(
        fmt::format("launch of {}: grid = {} and block = {} must be at least 1, and a "
                    "block has at most {} threads",
                    config.name, config.grid, config.block, kMaxThreads));
  if (config.shared_bytes > kMaxShared)
    return invalid_argument(
        fmt::format("launch of {}: {} bytes of shared memory; a block has at most {}", config.name,
                    config.shared_bytes, kMaxShared));
  return {};
}

}  // namespace

struct World::Impl {
  explicit Impl(const WorldOptions& world_options)
      : options(world_options), runtime(space, world_options) {}

  Stream& stream_of(int rank, int id) {
    for (Stream& stream : streams)
      if (stream.rank == rank && stream.id == id) return stream;
    Stream& stream = streams.emplace_back();
    stream.rank = rank;
    stream.id = id;
    return stream;
  }
  Result<void> place_streams();

  WorldOptions options;
  AddressSlot slot;
  Mapping heaps;
  Mapping shared;
  Mapping stacks;
  AddressSpace space;
  std::vector<Stream> streams;
  Runtime runtime;
};

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::~World() = default;

Result<std::unique_ptr<World>> World::create(const WorldOptions& options) {
  if (options.ranks < 1)
    return invalid_argument(fmt::format("ranks = {} must be at least 1", options.ranks));
  if (options.heap_bytes == 0 || options.heap_bytes % kPage != 0)
    return invalid_argument(fmt::format("heap_bytes = {} must be a positive multiple of {}",
                                        options.heap_bytes, kPage));
  if (options.stack_bytes < 4 * kPage || options.stack_bytes % kPage != 0)
    return invalid_argument(fmt::format("stack_bytes = {} must be a multiple of {} and at least {}",
                                        options.stack_bytes, kPage, 4 * kPage));
  const std::size_t total = options.heap_bytes * static_cast<std::size_t>(options.ranks);
  if (total > AddressSlot::max_heap_bytes())
    return invalid_argument(fmt::format("{} heaps of {} bytes exceed the {} bytes of a World",
                                        options.ranks, options.heap_bytes,
                                        AddressSlot::max_heap_bytes()));
  WorldOptions adjusted = options;
  adjusted.stack_bytes *= kStackFactor;
  auto impl = std::make_unique<Impl>(adjusted);
  if (!impl->slot.valid())
    return make_error(Code::kNoMemory, "16 Worlds exist already in this process");
  CROSSDOCK_TRY(heaps, Mapping::create(impl->slot.heaps(), total));
  impl->heaps = std::move(heaps);
  impl->space.set_heaps(impl->slot.heaps(), options.heap_bytes, options.ranks);
  return std::unique_ptr<World>(new World(std::move(impl)));
}

int World::ranks() const {
  return impl_->options.ranks;
}

int World::node_of(int rank) const {
  const int per_node = impl_->options.ranks_per_node;
  return per_node > 0 ? rank / per_node : 0;
}

unsigned char* World::heap(int rank) const {
  return impl_->heaps.base() + static_cast<std::size_t>(rank) * impl_->options.heap_bytes;
}

std::size_t World::heap_bytes() const {
  return impl_->options.heap_bytes;
}

bool World::owns(int rank, const void* address) const {
  const auto* const base = heap(rank);
  return address >= base && address < base + impl_->space.used(rank);
}

Result<void*> World::allocate(int rank, std::size_t bytes, std::size_t alignment) {
  if (rank < 0 || rank >= ranks())
    return invalid_argument(fmt::format("rank = {} must be 0..{}", rank, ranks() - 1));
  if (!std::has_single_bit(alignment))
    return invalid_argument(fmt::format("alignment = {} must be a power of two", alignment));
  const std::size_t start = (impl_->space.used(rank) + alignment - 1) & ~(alignment - 1);
  if (bytes > impl_->options.heap_bytes || start > impl_->options.heap_bytes - bytes)
    return make_error(
        Code::kNoMemory,
        fmt::format("{} bytes do not fit into the heap of rank {}: {} of {} bytes are taken; "
                    "raise WorldOptions::heap_bytes",
                    bytes, rank, impl_->space.used(rank), impl_->options.heap_bytes));
  impl_->space.set_used(rank, start + bytes);
  return static_cast<void*>(heap(rank) + start);
}

void World::reset() {
  for (int rank = 0; rank < ranks(); ++rank)
    reset(rank);
}

void World::reset(int rank) {
  const std::size_t used = impl_->space.used(rank);
  const std::size_t offset = static_cast<std::size_t>(rank) * impl_->options.heap_bytes;
  if (used <= kSmallReset)
    std::memset(impl_->heaps.base() + offset, 0, used);
  else
    impl_->heaps.discard(offset, (used + kPage - 1) & ~(kPage - 1));
  impl_->space.set_used(rank, 0);
  drop_launches(rank);
}

void World::drop_launches(int rank) {
  std::erase_if(impl_->streams, [&](const Stream& stream) { return stream.rank == rank; });
}

Result<void> World::attach(int rank, void* base, std::size_t bytes) {
  if (rank < 0 || rank >= ranks())
    return invalid_argument(fmt::format("rank = {} must be 0..{}", rank, ranks() - 1));
  if (base == nullptr || bytes == 0 || reinterpret_cast<std::uintptr_t>(base) % 16 != 0)
    return invalid_argument(
        fmt::format("attached memory ({}, {} bytes) must not be empty and must be "
                    "aligned to 16 bytes",
                    base, bytes));
  if (impl_->space.overlaps(base, bytes))
    return invalid_argument(
        fmt::format("attached memory ({}, {} bytes) overlaps memory of this World", base, bytes));
  impl_->space.attach(rank, base, bytes);
  return {};
}

Result<void> World::detach(void* base) {
  if (impl_->space.detach(base)) return {};
  return make_error(Code::kNotFound,
                    fmt::format("no memory at {} is attached to this World", base));
}

Result<void> World::launch_body(const LaunchConfig& config, std::function<void()> body) {
  CROSSDOCK_CHECK_OK(check_launch(config, ranks()));
  Kernel kernel;
  kernel.config = config;
  kernel.body = std::move(body);
  impl_->stream_of(config.rank, config.stream).kernels.push_back(std::move(kernel));
  return {};
}

// Each stream gets fibers, stacks and shared memory for the largest of its kernels, at places that
// depend on the launches only.
Result<void> World::Impl::place_streams() {
  std::size_t threads = 0;
  std::size_t shared_bytes = 0;
  struct Need {
    std::size_t threads = 0;
    std::size_t shared = 0;
  };
  std::vector<Need> needs;
  for (const Stream& stream : streams) {
    Need need;
    for (const Kernel& kernel : stream.kernels) {
      const LaunchConfig& config = kernel.config;
      need.threads = std::max(need.threads, std::size_t{config.grid} * config.block);
      need.shared = std::max(need.shared, config.grid * shared_pitch(config.shared_bytes));
    }
    threads += need.threads;
    shared_bytes += need.shared;
    needs.push_back(need);
  }
  if (shared_bytes > AddressSlot::max_shared_bytes())
    return make_error(Code::kNoMemory,
                      fmt::format("the launches need {} bytes of shared memory in all; a "
                                  "World has {}",
                                  shared_bytes, AddressSlot::max_shared_bytes()));
  if (stacks.bytes() < threads * options.stack_bytes) {
    CROSSDOCK_TRY(mapping, Mapping::create(0, threads * options.stack_bytes));
    stacks = std::move(mapping);
  }
  if (shared.bytes() < shared_bytes) {
    shared = Mapping();
    CROSSDOCK_TRY(mapping, Mapping::create(slot.shared(), shared_bytes));
    shared = std::move(mapping);
    space.set_shared(slot.shared(), shared_bytes);
  }
  std::size_t thread = 0;
  std::size_t offset = 0;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    streams[i].fibers.clear();
    streams[i].fibers.resize(needs[i].threads);
    streams[i].stacks = stacks.base() + thread * options.stack_bytes;
    streams[i].shared = shared.base() + offset;
    thread += needs[i].threads;
    offset += needs[i].shared;
  }
  return {};
}

Result<Report> World::run(const Schedule& schedule) {
  if (t_current != nullptr) return invalid_argument("World::run called from inside a kernel");
  CROSSDOCK_CHECK_OK(impl_->place_streams());
  Report report = impl_->runtime.run(schedule, impl_->streams);
  impl_->streams.clear();
  return report;
}

}  // namespace crossdock::twin
