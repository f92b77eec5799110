// Copies on one host: memcpy and process_vm_writev as ceilings, and what the loopback and shm
// transports make of them, by block size; small-write latency; slices per second. The peer is a
// child process that holds memory and sleeps. One thread copies; take the CPU for yourself.
//   copy_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <benchmark/benchmark.h>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mem/shared_memory.hpp"
#include "transport/loopback/transport.hpp"
#include "transport/shm/identity.hpp"
#include "transport/shm/transport.hpp"

namespace {

using namespace crossdock;             // NOLINT: a program
using namespace crossdock::transport;  // NOLINT

constexpr std::size_t kBytes = std::size_t{256} << 20;  // of each buffer: no cache holds it
constexpr std::uint32_t kSliceBytes = 64u << 10;

enum class Kind { kLoopback, kMap, kVm };

HostIdentity identity(pid_t pid) {
  HostIdentity host;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), host.boot_id);
  struct stat ns{};
  ::stat("/proc/self/ns/pid", &ns);
  host.pid_namespace = ns.st_ino;
  host.pid = static_cast<std::uint32_t>(pid);
  host.start_time = shm::process_start_time(host.pid).value();
  return host;
}

std::byte* touched_memory() {
  void* const p = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED) std::abort();
  std::memset(p, 1, kBytes);
  return static_cast<std::byte*>(p);
}

// What the child tells over a pipe.
struct Told {
  std::uint64_t mapped = 0;
  std::uint64_t plain = 0;
  std::uint32_t address_size = 0;
  std::uint32_t key_size = 0;
  char address[512] = {};
  char key[64] = {};
};

[[noreturn]] void be_peer(int out) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  TransportContext context;
  context.host = identity(::getpid());
  const auto transport = make_shm(context, {}).value();
  const auto memory = mem::SharedMemory::create(kBytes, {.populate = true}).value();
  mem::RegionRecord record;
  record.address = reinterpret_cast<std::uint64_t>(memory.data());
  record.length = kBytes;
  record.backing.memfd = memory.fd();
  Told told;
  told.mapped = record.address;
  told.plain = reinterpret_cast<std::uint64_t>(touched_memory());
  const std::string address = transport->local_address();
  const std::string key = transport->export_region(record);
  told.address_size = static_cast<std::uint32_t>(address.copy(told.address, sizeof(told.address)));
  told.key_size = static_cast<std::uint32_t>(key.copy(told.key, sizeof(told.key)));
  if (::write(out, &told, sizeof(told)) != sizeof(told)) ::_exit(1);
  for (;;)
    ::pause();
}

struct Peer {
  pid_t pid = -1;
  Told told;
};
Peer peer;
std::byte* local_memory = nullptr;

class Sink final : public ShardSink {
 public:
  void shard_progress(Shard&, std::uint64_t) noexcept override {}
  void shard_finished(Shard&, const Error* error) noexcept override {
    if (error != nullptr) std::abort();
    finished_.fetch_add(1, std::memory_order_release);
    finished_.notify_one();
  }
  void wait(std::uint32_t count) {
    for (std::uint32_t seen = finished_.load(std::memory_order_acquire); seen != count;
         seen = finished_.load(std::memory_order_acquire))
      finished_.wait(seen);
  }

 private:
  std::atomic<std::uint32_t> finished_{0};
};

// One endpoint to the peer (or to this process), with one region of kBytes.
struct Route {
  explicit Route(Kind kind) {
    TransportContext context;
    context.host = identity(::getpid());
    context.instance = 1;
    PeerInfo info;
    info.name = "peer";
    info.instance = 1;
    if (kind == Kind::kLoopback) {
      transport = make_loopback(context, LoopbackOptions{});
      region.address = reinterpret_cast<std::uint64_t>(touched_memory());
    } else {
      transport = make_shm(context, {}).value();
      info.host = identity(peer.pid);
      info.address.assign(peer.told.address, peer.told.address_size);
      region.address = kind == Kind::kMap ? peer.told.mapped : peer.told.plain;
      if (kind == Kind::kMap)
        region.keys = {{"shm", std::string(peer.told.key, peer.told.key_size)}};
    }
    loopback = kind == Kind::kLoopback;
    region.length = kBytes;
    endpoint = transport->connect(info, 0, Deadline::in(std::chrono::seconds(5))).value();
    region.attached[0] = endpoint->attach(region).value();
  }
  ~Route() {
    endpoint.reset();
    if (loopback) ::munmap(reinterpret_cast<void*>(region.address), kBytes);
  }
  bool loopback = false;
  std::unique_ptr<Transport> transport;
  RemoteRegion region;
  std::unique_ptr<Endpoint> endpoint;
};

// Writes `batch` blocks a shard, walking through the buffers; waits for each shard.
void write_blocks(benchmark::State& state, Kind kind, std::size_t block, std::size_t batch,
                  std::uint32_t slice_bytes = kSliceBytes) {
  Route route(kind);
  Sink sink;
  Shard shard;
  std::vector<Slice> slices;
  std::uint32_t posted = 0;
  std::size_t at = 0;
  for (auto _ : state) {
    slices.clear();
    for (std::size_t done = 0; done < block * batch; done += slices.back().length) {
      const std::size_t left = block - done % block;
      slices.push_back(
          {.local = local_memory + at + done,
           .remote = route.region.address + at + done,
           .region = &route.region,
           .length = static_cast<std::uint32_t>(std::min<std::size_t>(left, slice_bytes))});
    }
    shard.slices = slices;
    shard.bytes = block * batch;
    shard.deadline = Deadline::in(std::chrono::seconds(30));
    shard.sink = &sink;
    if (!route.endpoint->post(shard).ok()) std::abort();
    sink.wait(++posted);
    at = at + 2 * block * batch > kBytes ? 0 : at + block * batch;
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block * batch));
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations() * slices.size()));
}

void raw_memcpy(benchmark::State& state, std::size_t block) {
  std::byte* const to = touched_memory();
  std::size_t at = 0;
  for (auto _ : state) {
    std::memcpy(to + at, local_memory + at, block);
    benchmark::ClobberMemory();
    at = at + 2 * block > kBytes ? 0 : at + block;
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block));
  ::munmap(to, kBytes);
}

void raw_vm(benchmark::State& state, std::size_t block) {
  std::size_t at = 0;
  for (auto _ : state) {
    const iovec from{local_memory + at, block};
    const iovec to{reinterpret_cast<void*>(peer.told.plain + at), block};
    if (::process_vm_writev(peer.pid, &from, 1, &to, 1, 0) != static_cast<ssize_t>(block))
      std::abort();
    at = at + 2 * block > kBytes ? 0 : at + block;
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block));
}

void register_all() {
  using benchmark::RegisterBenchmark;
  const auto name = [](const char* what, std::size_t block) {
    return std::string(what) + "/" + std::to_string(block);
  };
  const std::pair<const char*, Kind> kinds[] = {
      {"loopback", Kind::kLoopback}, {"shm_map", Kind::kMap}, {"shm_vm", Kind::kVm}};
  for (const std::size_t block :
       {std::size_t{1} << 20, std::size_t{4} << 20, std::size_t{16} << 20}) {
    RegisterBenchmark(name("memcpy", block).c_str(), raw_memcpy, block)
        ->UseRealTime()
        ->MeasureProcessCPUTime();
    RegisterBenchmark(name("process_vm_writev", block).c_str(), raw_vm, block)
        ->UseRealTime()
        ->MeasureProcessCPUTime();
    for (const auto& [what, kind] : kinds)
      RegisterBenchmark(name(what, block).c_str(), write_blocks, kind, block, 1, kSliceBytes)
          ->UseRealTime()
          ->MeasureProcessCPUTime();
  }
  for (const auto& [what, kind] : kinds) {
    for (const std::size_t block : {std::size_t{4} << 10, std::size_t{32} << 10})
      RegisterBenchmark(name((std::string(what) + "_paged_8MiB").c_str(), block).c_str(),
                        write_blocks, kind, block, (std::size_t{8} << 20) / block, kSliceBytes)
          ->UseRealTime()
          ->MeasureProcessCPUTime();
    for (const std::size_t block : {std::size_t{64}, std::size_t{4} << 10})
      RegisterBenchmark(name((std::string(what) + "_latency").c_str(), block).c_str(), write_blocks,
                        kind, block, 1, kSliceBytes)
          ->UseRealTime()
          ->MeasureProcessCPUTime();
  }
  // 16 shards' worth of slices inside post(): the cost of a slice itself.
  RegisterBenchmark("loopback_slices/64", write_blocks, Kind::kLoopback, 64, 1000, 64u)
      ->UseRealTime()
      ->MeasureProcessCPUTime();
}

}  // namespace

int main(int argc, char** argv) {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) return 1;
  peer.pid = ::fork();
  if (peer.pid == 0) be_peer(pipe_fds[1]);
  if (::read(pipe_fds[0], &peer.told, sizeof(peer.told)) != sizeof(peer.told)) return 1;
  local_memory = touched_memory();
  register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  ::kill(peer.pid, SIGKILL);
  ::waitpid(peer.pid, nullptr, 0);
  return 0;
}
