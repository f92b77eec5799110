// The tcp transport between two processes on loopback, without the engine above it, beside a plain
// socket stream of the same byte count and memory footprint: GB/s, CPU seconds of both processes
// per GB, and the latency of a 64 B write. Usage:
//
//   tcp_bench [--mib 512] [--reps 5] [--lanes 2] [--threads 2] [--frame-kib 1024]
//             [--buffer-kib 0] [--window-mib 16] [--spin-us 0]
//             [--huge-pages 0] [--only NAME]
//
// The parent is the initiator, a forked child the target. Everything runs in the calling thread but
// the transport's workers. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <numeric>
#include <poll.h>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "transport/tcp/transport.hpp"

namespace {

using namespace crossdock;
using namespace crossdock::transport;

struct Settings {
  std::size_t bytes = 512u << 20;
  int reps = 5;
  bool huge_pages = false;
  tcp::TcpOptions tcp;
  std::string only;
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::byte* map_memory(std::size_t bytes, bool huge_pages) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail("mmap");
  (void)::madvise(p, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(p, 1, bytes);
  return static_cast<std::byte*>(p);
}

std::uint64_t cpu_ns(int who) {
  rusage u{};
  ::getrusage(who, &u);
  const auto ns = [](timeval t) {
    return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u +
           static_cast<std::uint64_t>(t.tv_usec) * 1000u;
  };
  return ns(u.ru_utime) + ns(u.ru_stime);
}

struct Listener {
  base::UniqueFd fd;
  sockaddr_in address{};
  Listener() : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* a = reinterpret_cast<sockaddr*>(&address);
    if (::bind(fd.get(), a, size) != 0 || ::listen(fd.get(), 64) != 0) fail("listen");
    ::getsockname(fd.get(), a, &size);
  }
  base::UniqueFd accept() const { return base::UniqueFd(::accept(fd.get(), nullptr, nullptr)); }
  base::UniqueFd connect() const {
    base::UniqueFd s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(s.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      fail("connect");
    return s;
  }
};

void set_nonblocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// What parent and child tell each other about: where the target's memory is, and its CPU time.
struct Shared {
  std::atomic<std::uint64_t> target_address{0};
  std::atomic<std::uint64_t> child_cpu_ns{0};
};

// --- the target process ---

void run_plain_target(const Listener& listener, std::byte* memory, std::size_t bytes) {
  const base::UniqueFd fd = listener.accept();
  for (std::size_t done = 0;;) {
    const std::size_t at = done % bytes;
    const ssize_t n = ::recv(fd.get(), memory + at, std::min<std::size_t>(1u << 20, bytes - at), 0);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
    if (done % bytes != 0) continue;
    const char ack = 1;
    if (::send(fd.get(), &ack, 1, MSG_NOSIGNAL) != 1) return;
  }
}

void run_target(const Listener& plain, const Listener& lanes, const Listener& cpu, Shared& shared,
                const Settings& s) {
  std::byte* memory = map_memory(s.bytes, s.huge_pages);
  mem::RegionTable regions;
  const mem::NewRegion region{memory, s.bytes, {}};
  regions.add({&region, 1}, {}).value();
  TransportContext context;
  context.regions = &regions;
  tcp::TcpTransport target(context, s.tcp);
  shared.target_address = reinterpret_cast<std::uint64_t>(memory);
  std::thread([&] { run_plain_target(plain, memory, s.bytes); }).detach();
  std::thread([&] {
    for (std::uint16_t i = 0;; ++i) {
      base::UniqueFd fd = lanes.accept();
      if (!fd) return;
      set_nonblocking(fd.get());
      target.accept({std::move(fd), "initiator", 1, i}).value();
    }
  }).detach();
  // Each byte asks for the CPU time used so far.
  const base::UniqueFd fd = cpu.accept();
  char c = 0;
  while (::recv(fd.get(), &c, 1, 0) == 1) {
    shared.child_cpu_ns = cpu_ns(RUSAGE_SELF);
    if (::send(fd.get(), &c, 1, MSG_NOSIGNAL) != 1) break;
  }
  std::_Exit(0);
}

// --- the initiator ---

class Bench {
 public:
  Bench(const Settings& s, Shared& shared, const Listener& cpu)
      : s_(s), shared_(shared), memory_(map_memory(s.bytes, s.huge_pages)), cpu_(cpu.connect()) {}

  struct Figure {
    double gb_per_s = 0;
    double cpu_s_per_gb = 0;
  };
  // Median by rate over the repetitions (the first run warms up).
  Figure measure(const std::function<void()>& run) {
    std::vector<Figure> all;
    run();
    for (int i = 0; i < s_.reps; ++i) {
      const std::uint64_t cpu0 = cpu_now(), t0 = base::now_ns();
      run();
      const auto ns = static_cast<double>(base::now_ns() - t0);
      const double gb = static_cast<double>(s_.bytes) / 1e9;
      all.push_back({gb / (ns / 1e9), static_cast<double>(cpu_now() - cpu0) / 1e9 / gb});
    }
    std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.gb_per_s < b.gb_per_s; });
    return all[all.size() / 2];
  }
  [[nodiscard]] std::byte* memory() const { return memory_; }

 private:
  std::uint64_t cpu_now() {
    char c = 0;
    if (::send(cpu_.get(), &c, 1, MSG_NOSIGNAL) != 1 || ::recv(cpu_.get(), &c, 1, 0) != 1)
      fail("target");
    return shared_.child_cpu_ns.load() + cpu_ns(RUSAGE_SELF);
  }
  const Settings& s_;
  Shared& shared_;
  std::byte* memory_;
  base::UniqueFd cpu_;
};

class Latch final : public ShardSink {
 public:
  void expect(std::uint32_t n) { left_.store(n); }
  void shard_progress(Shard&, std::uint64_t) noexcept override {}
  void shard_finished(Shard&, const Error* e) noexcept override {
    if (e != nullptr) std::fprintf(stderr, "shard failed: %s\n", e->message.c_str()), std::abort();
    if (left_.fetch_sub(1) == 1) base::futex_wake_all(left_);
  }
  void wait() {
    for (std::uint32_t n = left_.load(); n != 0; n = left_.load())
      base::futex_wait(left_, n, Deadline::in(std::chrono::seconds(60)));
  }

 private:
  std::atomic<std::uint32_t> left_{0};
};

// One batch: `block`-sized pieces in random order, cut into shards of about 1 MiB, dealt to rails.
class Batch {
 public:
  Batch(const Settings& s, std::byte* local, std::uint64_t remote, std::size_t block) {
    std::vector<std::size_t> order(s.bytes / block);
    std::iota(order.begin(), order.end(), 0u);
    if (block < (256u << 10)) std::shuffle(order.begin(), order.end(), std::mt19937(5));
    const std::size_t slice = std::min<std::size_t>(block, 64u << 10);
    for (const std::size_t b : order)
      for (std::size_t at = 0; at < block; at += slice)
        slices_.push_back({local + b * block + at, remote + b * block + at, nullptr,
                           static_cast<std::uint32_t>(slice), 0});
    const std::size_t per_shard = std::max<std::size_t>(1, (1u << 20) / slice);
    for (std::size_t i = 0; i < slices_.size(); i += per_shard) {
      Shard& shard = shards_.emplace_back();
      shard.slices = std::span(slices_).subspan(i, std::min(per_shard, slices_.size() - i));
      for (const Slice& x : shard.slices)
        shard.bytes += x.length;
    }
  }
  void run(Op op, std::vector<std::unique_ptr<Endpoint>>& rails, std::size_t threads) {
    latch_.expect(static_cast<std::uint32_t>(shards_.size()));
    std::vector<std::thread> posters;
    for (std::size_t t = 1; t < threads; ++t)
      posters.emplace_back([&, t] { post(op, rails, t, threads); });
    post(op, rails, 0, threads);
    for (auto& p : posters)
      p.join();
    latch_.wait();
  }

 private:
  void post(Op op, std::vector<std::unique_ptr<Endpoint>>& rails, std::size_t t, std::size_t of) {
    for (std::size_t i = t; i < shards_.size(); i += of) {
      Shard& shard = shards_[i];
      shard.op = op;
      shard.sink = &latch_;
      shard.deadline = Deadline::in(std::chrono::seconds(60));
      auto& rail = *std::min_element(rails.begin(), rails.end(), [](auto& a, auto& b) {
        return a->queued_bytes() < b->queued_bytes();
      });
      rail->post(shard).value();
    }
  }
  std::vector<Slice> slices_;
  std::vector<Shard> shards_;
  Latch latch_;
};

void plain_stream(int fd, std::byte* memory, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n =
        ::send(fd, memory + done, std::min<std::size_t>(1u << 20, bytes - done), MSG_NOSIGNAL);
    if (n <= 0) fail("send");
    done += static_cast<std::size_t>(n);
  }
  char ack = 0;
  if (::recv(fd, &ack, 1, 0) != 1) fail("recv");
}

void latency(std::size_t bytes, std::byte* local, std::uint64_t remote, Endpoint& rail) {
  std::vector<double> us;
  Latch latch;
  const Slice slice{local, remote, nullptr, static_cast<std::uint32_t>(bytes), 0};
  for (int i = 0; i < 22000; ++i) {
    Shard shard;
    shard.slices = {&slice, 1};
    shard.bytes = bytes;
    shard.sink = &latch;
    shard.deadline = Deadline::in(std::chrono::seconds(60));
    latch.expect(1);
    const std::uint64_t t0 = base::now_ns();
    rail.post(shard).value();
    latch.wait();
    if (i >= 2000) us.push_back(static_cast<double>(base::now_ns() - t0) / 1e3);
  }
  std::sort(us.begin(), us.end());
  std::printf("%-24s p50 %6.1f us  p99 %6.1f us\n", bytes == 64 ? "write 64 B" : "write 4 KiB",
              us[us.size() / 2], us[us.size() * 99 / 100]);
}

void run_initiator(const Listener& plain, const Listener& lanes, const Listener& cpu,
                   Shared& shared, const Settings& s) {
  Bench bench(s, shared, cpu);
  const base::UniqueFd stream = plain.connect();
  while (shared.target_address.load() == 0)
    ::poll(nullptr, 0, 1);
  const std::uint64_t remote = shared.target_address.load();
  TransportContext context;
  tcp::TcpTransport transport(context, s.tcp);
  std::vector<std::unique_ptr<Endpoint>> rails;
  PeerInfo peer;
  peer.name = "target";
  peer.dial = [&](std::uint16_t, Deadline) -> Result<base::UniqueFd> {
    base::UniqueFd fd = lanes.connect();
    set_nonblocking(fd.get());
    return fd;
  };
  for (std::uint32_t i = 0; i < s.tcp.lanes; ++i)
    rails.push_back(transport.connect(peer, i, Deadline::in(std::chrono::seconds(5))).value());

  const auto wanted = [&](const std::string& name) {
    return s.only.empty() || name.find(s.only) != std::string::npos;
  };
  const auto plain_figure =
      bench.measure([&] { plain_stream(stream.get(), bench.memory(), s.bytes); });
  std::printf("%-24s %6.2f GB/s  %5.2f CPU-s/GB\n", "plain stream", plain_figure.gb_per_s,
              plain_figure.cpu_s_per_gb);
  double large = 0;
  const auto row = [&](const std::string& name, Op op, std::size_t block, std::size_t threads) {
    if (!wanted(name)) return;
    Batch batch(s, bench.memory(), remote, block);
    const auto f = bench.measure([&] { batch.run(op, rails, threads); });
    if (large == 0) large = f.gb_per_s;
    std::printf("%-24s %6.2f GB/s  %5.2f CPU-s/GB  %4.2f x plain  %4.2f x large\n", name.c_str(),
                f.gb_per_s, f.cpu_s_per_gb, f.gb_per_s / plain_figure.gb_per_s, f.gb_per_s / large);
  };
  row("write 2 MiB", Op::kWrite, 2u << 20, 1);
  row("write 256 KiB", Op::kWrite, 256u << 10, 1);
  row("write 64 KiB", Op::kWrite, 64u << 10, 1);
  row("write 32 KiB pages", Op::kWrite, 32u << 10, 1);
  row("write 16 KiB pages", Op::kWrite, 16u << 10, 1);
  row("write 4 KiB pages", Op::kWrite, 4u << 10, 1);
  row("write 1 MiB 10 threads", Op::kWrite, 1u << 20, 10);
  row("read 2 MiB", Op::kRead, 2u << 20, 1);
  row("read 16 KiB pages", Op::kRead, 16u << 10, 1);
  row("read 4 KiB pages", Op::kRead, 4u << 10, 1);
  if (wanted("latency")) {
    latency(64, bench.memory(), remote, *rails[0]);
    latency(4096, bench.memory(), remote, *rails[0]);
  }
}

Settings parse(int argc, char** argv) {
  Settings s;
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2)
    given[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name, std::uint64_t otherwise) {
    const auto it = given.find(name);
    return it == given.end() ? otherwise : std::strtoull(it->second.c_str(), nullptr, 10);
  };
  s.bytes = number("--mib", 512) << 20;
  s.reps = static_cast<int>(number("--reps", 5));
  s.tcp.lanes = static_cast<std::uint32_t>(number("--lanes", s.tcp.lanes));
  s.tcp.threads = static_cast<std::uint32_t>(number("--threads", s.tcp.threads));
  s.tcp.frame_bytes =
      static_cast<std::uint32_t>(number("--frame-kib", s.tcp.frame_bytes >> 10) << 10);
  s.tcp.socket_buffer =
      static_cast<std::uint32_t>(number("--buffer-kib", s.tcp.socket_buffer >> 10) << 10);
  s.tcp.window_bytes = number("--window-mib", s.tcp.window_bytes >> 20) << 20;
  s.tcp.spin = std::chrono::microseconds(
      number("--spin-us", static_cast<std::uint64_t>(s.tcp.spin.count()) / 1000));
  s.huge_pages = number("--huge-pages", 0) != 0;
  s.only = given.count("--only") != 0 ? given["--only"] : "";
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  const Settings s = parse(argc, argv);
  const Listener plain, lanes, cpu;
  void* page =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail("mmap");
  auto* shared = new (page) Shared();
  const pid_t child = ::fork();
  if (child == 0) run_target(plain, lanes, cpu, *shared, s);
  run_initiator(plain, lanes, cpu, *shared, s);
  ::waitpid(child, nullptr, 0);
  return 0;
}
