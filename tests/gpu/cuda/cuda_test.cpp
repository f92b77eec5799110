// The CUDA layer on real GPUs: devices, memory, peers, streams, mappings across processes.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>
#include <vector>

#include "cuda/fd_passing.hpp"
#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "cuda/vmm.hpp"
#include "gpu/cuda/import_child.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/stays_level.hpp"

extern char** environ;  // NOLINT: POSIX

namespace crossdock::cuda {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using CudaGpu = crossdock::testing::GpuTest;

constexpr std::size_t kMiB = std::size_t{1} << 20;

Deadline soon() {
  return Deadline::in(30s);
}

TEST_F(CudaGpu, DevicesAreDescribed) {
  std::printf("driver %s speaks CUDA %s\n", driver_->library.c_str(),
              version_text(driver_->version).c_str());
  const auto devices = query_devices(*driver_).value();
  for (const Device& d : devices) {
    std::printf(
        "GPU %d: %s sm_%d, %d SMs, %llu MiB, L2 %llu MiB, %s, %s, NUMA %d, vmm %d, fd %d, "
        "fabric %d, dma-buf %d, smem %d\n",
        d.ordinal, d.name.c_str(), d.sm(), d.num_sms,
        static_cast<unsigned long long>(d.memory_bytes >> 20),
        static_cast<unsigned long long>(d.l2_bytes >> 20), d.uuid.c_str(), d.pci_id.c_str(),
        d.numa_node, d.vmm, d.posix_fd_handles, d.fabric_handles, d.dma_buf,
        d.max_shared_bytes_per_block);
    EXPECT_GT(d.num_sms, 0);
    EXPECT_GE(d.sm(), 50);
    EXPECT_EQ(d.uuid.size(), 40u);
  }
  for (int from = 0; from < num_gpus_; ++from)
    for (int to = 0; to < num_gpus_; ++to) {
      if (from == to) continue;
      const auto access = query_peer_access(*driver_, from, to).value();
      std::printf("GPU %d -> GPU %d: access %d, atomics %d, rank %d\n", from, to, access.supported,
                  access.native_atomics, access.performance_rank);
    }
}

TEST_F(CudaGpu, MemoryIsFilledCopiedAndTold) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto device = DeviceMemory::allocate(ctx, 4 * kMiB).value();
  const auto pinned = PinnedMemory::allocate(ctx, 4 * kMiB).value();
  ASSERT_TRUE(fill_words_async(device.address(), 0xfeedbeef, kMiB, stream).ok());
  ASSERT_TRUE(copy_async(pinned.device(), device.address(), 4 * kMiB, stream).ok());
  ASSERT_TRUE(stream.synchronize(soon()).ok());
  const auto* const words = pinned.as<std::uint32_t>();
  EXPECT_EQ(std::count(words, words + kMiB, 0xfeedbeefu), static_cast<long>(kMiB));
  const auto info = query_pointer(*driver_, device.address() + 4096).value();
  EXPECT_EQ(info.type, MemoryType::kDevice);
  EXPECT_EQ(info.base, device.address());
  int local = 0;
  EXPECT_EQ(query_pointer(*driver_, device_ptr(&local))->type, MemoryType::kHost);
  EXPECT_EQ(query_pointer(*driver_, device_ptr(&local))->ordinal, -1);
}

TEST_F(CudaGpu, ValueWritesReachTheHostInOrder) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto pinned = PinnedMemory::allocate(ctx, 4096).value();
  auto* const word = pinned.as<volatile std::uint64_t>();
  // The stream waits for the host, then answers.
  ASSERT_TRUE(wait_value_async(stream, pinned.device(), 5).ok());
  ASSERT_TRUE(write_value_async(stream, pinned.device() + 64, 9).ok());
  EXPECT_FALSE(stream.idle().value());
  EXPECT_EQ(stream.synchronize(Deadline::in(20ms)).code(), Code::kDeadline);
  word[0] = 5;
  EXPECT_TRUE(stream.synchronize(soon()).ok());
  EXPECT_EQ(word[8], 9u);
}

TEST_F(CudaGpu, OutOfMemoryIsAnErrorAndTheContextLives) {
  const Context ctx = context();
  const auto result = DeviceMemory::allocate(ctx, std::size_t{1} << 50);
  EXPECT_EQ(result.code(), Code::kNoMemory);
  EXPECT_THAT(result.error().message, HasSubstr("CUDA_ERROR_OUT_OF_MEMORY: out of memory"));
  std::printf("%s\n", result.error().describe().c_str());
  EXPECT_TRUE(DeviceMemory::allocate(ctx, kMiB).ok());
}

TEST_F(CudaGpu, EventsMeasure) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx, {.high_priority = true}).value();
  const auto memory = DeviceMemory::allocate(ctx, 256 * kMiB).value();
  const Event start = Event::create(ctx, Timing::kOn).value();
  const Event end = Event::create(ctx, Timing::kOn).value();
  ASSERT_TRUE(fill_bytes_async(memory.address(), 0, memory.bytes(), stream).ok());
  ASSERT_TRUE(start.record(stream).ok());
  ASSERT_TRUE(fill_bytes_async(memory.address(), 1, memory.bytes(), stream).ok());
  ASSERT_TRUE(end.record(stream).ok());
  ASSERT_TRUE(end.synchronize(soon()).ok());
  const float ms = elapsed_ms(start, end).value();
  EXPECT_GT(ms, 0);
  std::printf("memset of 256 MiB: %.3f ms, %.0f GB/s\n", ms, 268.435456 / ms);
}

TEST_F(CudaGpu, GraphReplaysMemoryWork) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto pinned = PinnedMemory::allocate(ctx, 4096).value();
  auto capture = Capture::begin(stream).value();
  EXPECT_TRUE(stream.capturing().value());
  EXPECT_EQ(stream.synchronize(soon()).code(), Code::kInvalidArgument);
  ASSERT_TRUE(fill_bytes_async(pinned.device(), 3, 4096, stream).ok());
  const auto graph = capture.finish().value();
  EXPECT_EQ(pinned.as<char>()[0], 0);
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(graph.launch(stream).ok());
  ASSERT_TRUE(stream.synchronize(soon()).ok());
  EXPECT_EQ(pinned.as<char>()[4095], 3);
  {
    const auto dropped = Capture::begin(stream).value();
  }
  EXPECT_TRUE(stream.synchronize(soon()).ok());
}

TEST_F(CudaGpu, PeersReachEachOther) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  const Context a = context(0);
  const Context b = context(1);
  ASSERT_TRUE(enable_peer_access(a, b).ok());
  ASSERT_TRUE(enable_peer_access(a, b).ok());
  const auto on_a = DeviceMemory::allocate(a, kMiB).value();
  const auto on_b = DeviceMemory::allocate(b, kMiB).value();
  const auto host = PinnedMemory::allocate(a, kMiB).value();
  const Stream stream = Stream::create(a).value();
  ASSERT_TRUE(fill_bytes_async(on_a.address(), 0x5a, kMiB, stream).ok());
  ASSERT_TRUE(copy_async(on_b.address(), on_a.address(), kMiB, stream).ok());
  ASSERT_TRUE(copy_async(host.device(), on_b.address(), kMiB, stream).ok());
  ASSERT_TRUE(stream.synchronize(soon()).ok());
  EXPECT_EQ(host.as<char>()[kMiB - 1], 0x5a);
}

// All GPUs' memory in one range at a stride, each GPU writing through it: how the heap is built.
TEST_F(CudaGpu, MemoryOfAllGpusInOneRange) {
  std::vector<Context> contexts;
  std::vector<int> ordinals;
  for (int i = 0; i < num_gpus_; ++i) {
    contexts.push_back(context(i));
    ordinals.push_back(i);
  }
  const std::size_t stride = 4 * allocation_granularity(contexts[0]).value();
  AddressRange range =
      AddressRange::reserve(contexts[0], stride * static_cast<std::size_t>(num_gpus_)).value();
  std::vector<Allocation> allocations;
  for (int i = 0; i < num_gpus_; ++i) {
    allocations.push_back(Allocation::create(contexts[i], stride).value());
    const auto mapped =
        range.map(stride * static_cast<std::size_t>(i), allocations.back(), ordinals);
    ASSERT_TRUE(mapped.ok()) << mapped.error().describe();
  }
  const auto host = PinnedMemory::allocate(contexts[0], stride).value();
  for (int writer = 0; writer < num_gpus_; ++writer) {
    const Stream stream = Stream::create(contexts[writer]).value();
    const int target = (writer + 1) % num_gpus_;
    const DevicePtr address = range.address() + stride * static_cast<std::size_t>(target);
    ASSERT_TRUE(
        fill_bytes_async(address, static_cast<std::uint8_t>(writer + 1), stride, stream).ok());
    ASSERT_TRUE(copy_async(host.device(), address, stride, stream).ok());
    ASSERT_TRUE(stream.synchronize(soon()).ok());
    EXPECT_EQ(host.as<char>()[stride - 1], writer + 1);
  }
}

pid_t start_child(const std::string& socket_name) {
  std::array<char*, 4> argv = {const_cast<char*>("/proc/self/exe"),
                               const_cast<char*>(crossdock::testing::kImportChildFlag),
                               const_cast<char*>(socket_name.c_str()), nullptr};
  pid_t pid = -1;
  return ::posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ) == 0 ? pid : -1;
}

// What another process needs to import an allocation: a descriptor, or a fabric handle.
struct Exported {
  std::vector<int> fds;
  std::vector<std::byte> payload;
};

// Another process reads a pattern of ours and writes its own.
void cross_processes(const Allocation& allocation, const Exported& exported) {
  const std::string name = "crossdock-gpu-test-" + std::to_string(::getpid());
  const auto listener = listen_local(name).value();
  const Context& ctx = allocation.context();
  AddressRange range = AddressRange::reserve(ctx, allocation.bytes()).value();
  const int device = ctx.ordinal();
  ASSERT_TRUE(range.map(0, allocation, {&device, 1}).ok());
  const Stream stream = Stream::create(ctx).value();
  const std::size_t bytes = allocation.bytes(), words = bytes / 4;
  ASSERT_TRUE(fill_words_async(range.address(), 0x11111111, words, stream).ok());
  ASSERT_TRUE(stream.synchronize(soon()).ok());

  const pid_t child = start_child(name);
  ASSERT_GT(child, 0);
  const auto socket = accept_local(listener.get(), soon());
  ASSERT_TRUE(socket.ok()) << socket.error().describe();
  ASSERT_TRUE(send_fds(socket->get(), exported.fds, exported.payload, soon()).ok());
  const auto answer = receive_fds(socket->get(), Deadline::in(60s));
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  ASSERT_TRUE(answer.ok()) << answer.error().describe();
  std::vector<std::uint32_t> host(words);
  ASSERT_TRUE(copy_async(device_ptr(host.data()), range.address(), bytes, stream).ok());
  ASSERT_TRUE(stream.synchronize(soon()).ok());
  EXPECT_EQ(std::count(host.begin(), host.end(), 0x22222222u), static_cast<long>(words));
}

TEST_F(CudaGpu, AllocationCrossesProcesses) {
  const Allocation allocation = Allocation::create(context(), 4 * kMiB).value();
  const auto fd = allocation.export_fd().value();
  cross_processes(allocation, {.fds = {fd.get()},
                               .payload = crossdock::testing::import_payload(allocation.bytes())});
}

// A driver without NVLink switches or without an IMEX channel says so at the first step.
TEST_F(CudaGpu, AllocationCrossesProcessesByFabricHandle) {
  const auto allocation = Allocation::create(context(), 4 * kMiB, {.sharing = Sharing::kFabric});
  if (allocation.code() == Code::kUnsupported || allocation.code() == Code::kDenied)
    GTEST_SKIP() << "no fabric handles here: " << allocation.error().describe();
  ASSERT_TRUE(allocation.ok()) << allocation.error().describe();
  const auto handle = allocation->export_fabric();
  ASSERT_TRUE(handle.ok()) << handle.error().describe();
  cross_processes(
      *allocation,
      {.fds = {}, .payload = crossdock::testing::import_payload(allocation->bytes(), &*handle)});
}

TEST_F(CudaGpu, ThousandCyclesDoNotGrow) {
  const Context ctx = context();
  const int device = 0;
  const auto cycle = [&] {
    const Allocation allocation = Allocation::create(ctx, 2 * kMiB).value();
    AddressRange range = AddressRange::reserve(ctx, allocation.bytes()).value();
    ASSERT_TRUE(range.map(0, allocation, {&device, 1}).ok());
    const auto fd = allocation.export_fd();
    ASSERT_TRUE(fd.ok()) << fd.error().describe();
    const Stream stream = Stream::create(ctx).value();
    const Event event = Event::create(ctx).value();
    const auto memory = DeviceMemory::allocate(ctx, kMiB).value();
  };
  for (int i = 0; i < 20; ++i)
    cycle();  // first-time allocations of the driver
  EXPECT_TRUE(crossdock::testing::stays_level(
      [&] { return std::vector{crossdock::testing::used_bytes(ctx)}; },
      [&] {
        for (int i = 0; i < 1000; ++i)
          ASSERT_NO_FATAL_FAILURE(cycle());
      }));
}

}  // namespace
}  // namespace crossdock::cuda
