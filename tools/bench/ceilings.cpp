// The ceilings of the machine, measured by the plainest code that does the work: what an engine
// that cost nothing would reach. Same memory footprint as the engine's cases, two processes where
// the engine has two.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <memory>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/child_process.hpp"
#include "base/clock.hpp"
#include "base/socket.hpp"
#include "bench/statistics.hpp"
#include "bench/transfer.hpp"

namespace crossdock::tools::bench {
namespace {

using base::ChildProcess;

constexpr std::uint64_t kPiece = 1 << 20;  // of a socket stream, as large as pays
constexpr std::size_t kMessage = 64;       // of a ping-pong
constexpr std::uint64_t kPage = 4096;

double gb_per_s(std::uint64_t bytes, std::uint64_t ns) {
  return static_cast<double>(bytes) / static_cast<double>(ns);
}

// Anonymous memory with every page present.
class Pages {
 public:
  explicit Pages(std::uint64_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data_ == MAP_FAILED) data_ = nullptr;
    if (data_ != nullptr) std::memset(data_, 0x5a, bytes);
  }
  ~Pages() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  Pages(const Pages&) = delete;
  [[nodiscard]] bool valid() const { return data_ != nullptr; }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  std::uint64_t bytes_;
};

Error no_memory(std::uint64_t bytes) {
  return make_error(Code::kNoMemory, fmt::format("cannot map {} MiB for the bench", bytes >> 20));
}

}  // namespace

Error not_started(std::uint64_t bytes) {
  return make_error(Code::kPeerLost,
                    fmt::format("the bench's other process ended, or did not have its {} MiB ready "
                                "within {} s; see what it said above, or lower --bytes",
                                bytes >> 20, start_patience(bytes).count() / 1000));
}

namespace {

Result<> write_all_to(pid_t pid, std::uint64_t remote, const Pages& pages, std::uint64_t bytes,
                      std::uint64_t block) {
  constexpr std::size_t kMaxBatch = 64;
  iovec local[kMaxBatch], there[kMaxBatch];
  for (std::uint64_t offset = 0; offset < bytes;) {
    std::size_t n = 0;
    std::uint64_t sum = 0;
    for (; n < kMaxBatch && offset + sum < bytes; ++n) {
      const std::uint64_t length = std::min(block, bytes - offset - sum);
      local[n] = {pages.data() + offset + sum, length};
      there[n] = {reinterpret_cast<void*>(remote + offset + sum), length};
      sum += length;
    }
    const auto done = ::process_vm_writev(pid, local, n, there, n, 0);
    if (done != static_cast<ssize_t>(sum)) return errno_error(errno, "process_vm_writev");
    offset += sum;
  }
  return {};
}

// Medians of `copy`, which copies all bytes once.
template <class Copy>
Measurement time_copies(const Scratch& scratch, Copy&& copy) {
  std::vector<double> rates, cpu;
  for (std::uint32_t i = 0; i <= scratch.repeat; ++i) {
    const auto begin = base::now_ns();
    const auto cpu_begin = base::process_cpu_ns();
    copy();
    if (i == 0) continue;
    rates.push_back(gb_per_s(scratch.bytes, base::now_ns() - begin));
    cpu.push_back(static_cast<double>(base::process_cpu_ns() - cpu_begin) /
                  static_cast<double>(scratch.bytes));
  }
  return {.gb_per_s = median(rates), .cpu_s_per_gb = median(cpu)};
}

}  // namespace

Result<Measurement> measure_memcpy(const Scratch& scratch) {
  const Pages from(scratch.bytes), to(scratch.bytes);
  if (!from.valid() || !to.valid()) return no_memory(scratch.bytes);
  Measurement best;
  for (const std::uint64_t piece : {kPiece, scratch.bytes}) {
    Measurement m = time_copies(scratch, [&] {
      for (std::uint64_t offset = 0; offset < scratch.bytes; offset += piece)
        std::memcpy(to.data() + offset, from.data() + offset,
                    std::min(piece, scratch.bytes - offset));
    });
    if (m.gb_per_s > best.gb_per_s) best = std::move(m);
  }
  best.name = "memcpy, one thread";
  return best;
}

Result<Measurement> measure_page_memcpy(const Scratch& scratch) {
  const Pages from(scratch.bytes), to(scratch.bytes);
  if (!from.valid() || !to.valid()) return no_memory(scratch.bytes);
  std::vector<std::uint32_t> source(scratch.bytes / kPage);
  std::iota(source.begin(), source.end(), 0u);
  std::vector<std::uint32_t> target = source;
  std::shuffle(source.begin(), source.end(), std::mt19937_64(1));
  std::shuffle(target.begin(), target.end(), std::mt19937_64(2));
  Measurement m = time_copies(scratch, [&] {
    for (std::size_t i = 0; i < source.size(); ++i)
      std::memcpy(to.data() + target[i] * kPage, from.data() + source[i] * kPage, kPage);
  });
  m.name = "memcpy, one thread, 4 KiB scattered";
  return m;
}

Result<Measurement> measure_vm_writev(const Scratch& scratch, std::uint64_t block_bytes) {
  ChildProcess child(
      {"bench", "transfer-child", "--kind", "memory", "--bytes", std::to_string(scratch.bytes)});
  const auto remote = std::strtoull(child.hear(start_patience(scratch.bytes)).c_str(), nullptr, 10);
  if (remote == 0) return not_started(scratch.bytes);
  const Pages pages(scratch.bytes);
  if (!pages.valid()) return no_memory(scratch.bytes);
  std::vector<double> rates;
  for (std::uint32_t i = 0; i <= scratch.repeat; ++i) {
    const auto begin = base::now_ns();
    CROSSDOCK_CHECK_OK(write_all_to(child.pid(), remote, pages, scratch.bytes, block_bytes));
    if (i > 0) rates.push_back(gb_per_s(scratch.bytes, base::now_ns() - begin));
  }
  return Measurement{.name = "process_vm_writev", .gb_per_s = median(rates)};
}

Result<Measurement> measure_socket_stream(const Scratch& scratch) {
  ChildProcess child(
      {"bench", "transfer-child", "--kind", "sink", "--bytes", std::to_string(scratch.bytes)});
  const std::string place = child.hear(start_patience(scratch.bytes));
  if (place.empty()) return not_started(scratch.bytes);
  const auto deadline = Deadline::in(std::chrono::minutes(2));
  CROSSDOCK_TRY(address, base::parse_host_port(place));
  CROSSDOCK_TRY(fd, base::connect_tcp(address, deadline));
  const Pages pages(scratch.bytes);
  if (!pages.valid()) return no_memory(scratch.bytes);
  std::vector<double> rates, cpu;
  for (std::uint32_t i = 0; i <= scratch.repeat; ++i) {
    const auto begin = base::now_ns();
    const auto cpu_begin = base::process_cpu_ns() + base::process_cpu_ns(child.pid());
    for (std::uint64_t offset = 0; offset < scratch.bytes; offset += kPiece)
      CROSSDOCK_CHECK_OK(base::send_all(
          fd.get(), {pages.data() + offset, std::min(kPiece, scratch.bytes - offset)}, deadline));
    std::byte done{};
    CROSSDOCK_CHECK_OK(base::recv_exact(fd.get(), {&done, 1}, deadline));
    if (i == 0) continue;
    rates.push_back(gb_per_s(scratch.bytes, base::now_ns() - begin));
    cpu.push_back(static_cast<double>(base::process_cpu_ns() + base::process_cpu_ns(child.pid()) -
                                      cpu_begin) /
                  static_cast<double>(scratch.bytes));
  }
  return Measurement{
      .name = "plain socket stream", .gb_per_s = median(rates), .cpu_s_per_gb = median(cpu)};
}

Result<Measurement> measure_socket_ping_pong(std::uint32_t operations) {
  ChildProcess child({"bench", "transfer-child", "--kind", "echo", "--bytes", "64"});
  const auto deadline = Deadline::in(std::chrono::minutes(2));
  CROSSDOCK_TRY(address, base::parse_host_port(child.hear()));
  CROSSDOCK_TRY(fd, base::connect_tcp(address, deadline));
  std::byte message[kMessage]{};
  std::vector<double> us;
  us.reserve(operations);
  for (std::uint32_t i = 0; i < operations + operations / 10; ++i) {
    const auto begin = base::now_ns();
    CROSSDOCK_CHECK_OK(base::send_all(fd.get(), message, deadline));
    CROSSDOCK_CHECK_OK(base::recv_exact(fd.get(), message, deadline));
    if (i >= operations / 10) us.push_back(static_cast<double>(base::now_ns() - begin) * 1e-3);
  }
  return Measurement{.name = "plain socket, 64 B there and back",
                     .p50_us = median(us),
                     .p99_us = quantile(us, 0.99)};
}

namespace {

// The initiator's connection, once it is there. Says where it is awaited.
Result<base::UniqueFd> accept_parent(Deadline deadline) {
  CROSSDOCK_TRY(listener, base::listen_tcp(base::HostPort{"127.0.0.1", 0}, deadline));
  base::say_parent(listener.address.to_string());
  CROSSDOCK_CHECK_OK(base::wait_ready(listener.fd.get(), POLLIN, deadline));
  CROSSDOCK_TRY(fd, base::accept_tcp(listener.fd.get()));
  if (!fd.has_value()) return make_error(Code::kPeerLost, "the connection went away");
  return *std::move(fd);
}

void echo(int fd, Deadline deadline) {
  std::byte message[kMessage];
  while (base::recv_exact(fd, message, deadline).ok() &&
         base::send_all(fd, message, deadline).ok()) {
  }
}

}  // namespace

int run_ceiling_child(const std::string& kind, std::uint64_t bytes) {
  const Pages pages(bytes);
  if (!pages.valid()) return 1;
  std::string line;
  if (kind == "memory") {
    base::say_parent(std::to_string(reinterpret_cast<std::uint64_t>(pages.data())));
    while (base::hear_parent(line)) {
    }
    return 0;
  }
  const auto deadline = Deadline::in(std::chrono::minutes(5));
  const auto fd = accept_parent(deadline);
  if (!fd.ok()) return 1;
  if (kind == "echo") {
    echo(fd->get(), deadline);
    return 0;
  }
  while (true) {
    for (std::uint64_t offset = 0; offset < bytes; offset += kPiece)
      if (!base::recv_exact(fd->get(), {pages.data() + offset, std::min(kPiece, bytes - offset)},
                            deadline)
               .ok())
        return 0;
    const std::byte done{1};
    if (!base::send_all(fd->get(), {&done, 1}, deadline).ok()) return 0;
  }
}

}  // namespace crossdock::tools::bench
