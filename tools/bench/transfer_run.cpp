// The engine under measurement: an initiator here, a target in a child process.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <memory>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <thread>

#include "base/child_process.hpp"
#include "base/clock.hpp"
#include "bench/statistics.hpp"
#include "bench/transfer.hpp"

namespace crossdock::tools::bench {
namespace {

using transfer::Engine;
using transfer::Op;
using transfer::Peer;
using transfer::Region;
using transfer::Request;

constexpr auto kLimit = std::chrono::minutes(2);
constexpr auto kOrderlyEnd = std::chrono::seconds(10);  // of the target process

transfer::EngineOptions engine_options(const std::string& transport) {
  return {.config = {{"transport.enabled", transport}, {"log.level", "warn"}}};
}

// Engine memory, or memory as a framework would hand it over.
struct Memory {
  std::unique_ptr<std::byte[], decltype(&std::free)> own{nullptr, std::free};
  std::optional<Region> region;
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(region->address()); }
};

Result<Memory> make_memory(Engine& engine, std::uint64_t bytes, bool engine_memory) {
  Memory memory;
  if (engine_memory) {
    CROSSDOCK_TRY(region, engine.allocate(bytes, {.label = "bench"}));
    memory.region = std::move(region);
  } else {
    // Whole pages, as pools of pages have them, and as the ceilings do.
    constexpr std::size_t kPage = 4096;
    const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
    memory.own.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, whole)));
    if (!memory.own) return make_error(Code::kNoMemory, fmt::format("no room for {} bytes", bytes));
    CROSSDOCK_TRY(region, engine.register_memory(memory.own.get(), bytes, {.label = "bench"}));
    memory.region = std::move(region);
  }
  return memory;
}

std::vector<std::uint64_t> block_order(const Case& shape, std::uint64_t seed) {
  std::vector<std::uint64_t> order(shape.count);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  if (shape.scattered) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

}  // namespace

struct Rig::Impl {
  std::unique_ptr<base::ChildProcess> child;  // none when the target is remote
  std::optional<Engine> engine;
  Memory memory;
  std::optional<Peer> peer;
  std::uint64_t remote = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] std::uint64_t cpu_ns() const {
    return base::process_cpu_ns() + (child ? base::process_cpu_ns(child->pid()) : 0);
  }
  [[nodiscard]] std::vector<Request> requests(const Case& shape) const {
    const auto from = block_order(shape, 1), to = block_order(shape, 2);
    std::vector<Request> all(shape.count);
    for (std::size_t i = 0; i < shape.count; ++i)
      all[i] = {shape.op, memory.data() + from[i] * shape.block_bytes,
                remote + to[i] * shape.block_bytes, shape.block_bytes};
    return all;
  }
  Result<> move(std::span<const Request> share, std::uint64_t batch) {
    if (batch == 0) batch = share.size();
    for (std::size_t first = 0; first < share.size(); first += batch)
      CROSSDOCK_CHECK_OK(engine->transfer(
          *peer, share.subspan(first, std::min<std::size_t>(batch, share.size() - first)),
          {.deadline = Deadline::in(kLimit)}));
    return {};
  }
  Result<> move_all(const std::vector<Request>& all, const Case& shape) {
    if (shape.threads == 1) return move(all, shape.batch);
    std::vector<std::thread> threads;
    std::vector<Result<>> results(shape.threads);
    const std::size_t each = (all.size() + shape.threads - 1) / shape.threads;
    for (std::uint32_t t = 0; t < shape.threads; ++t) {
      const std::size_t first = std::min(all.size(), t * each);
      const auto share = std::span(all).subspan(first, std::min(each, all.size() - first));
      threads.emplace_back([&, t, share] { results[t] = move(share, shape.batch); });
    }
    for (auto& thread : threads)
      thread.join();
    for (auto& result : results)
      CROSSDOCK_CHECK_OK(std::move(result));
    return {};
  }
};

Rig::Rig(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Rig::Rig(Rig&&) noexcept = default;

// Both ends close their engines, which writes the traces that were asked for.
Rig::~Rig() {
  if (!impl_ || !impl_->child) return;
  if (impl_->engine) (void)impl_->engine->close(Deadline::in(kOrderlyEnd / 2));
  (void)impl_->child->finish(Deadline::in(kOrderlyEnd));
}

Result<Rig> Rig::create(const Case& shape, std::uint64_t bytes, const std::string& remote_peer) {
  auto impl = std::make_unique<Impl>();
  impl->bytes = bytes;
  std::string name = remote_peer;
  const bool itself = shape.transport == "loopback";
  if (name.empty() && !itself) {
    impl->child = std::make_unique<base::ChildProcess>(std::vector<std::string>{
        "bench", "transfer", "--role", "target", "--transport", shape.transport, "--bytes",
        std::to_string(bytes), shape.engine_memory ? "--engine-memory" : "--user-memory"});
    name = impl->child->hear(start_patience(bytes));
    if (name.empty()) return not_started(bytes);
  }
  CROSSDOCK_TRY(engine, Engine::create(engine_options(shape.transport)));
  impl->engine = std::move(engine);
  if (itself) name = impl->engine->name();
  CROSSDOCK_TRY(memory,
                make_memory(*impl->engine, itself ? 2 * bytes : bytes, shape.engine_memory));
  impl->memory = std::move(memory);
  std::memset(impl->memory.data(), 0x5a, impl->memory.region->length());
  CROSSDOCK_TRY(peer, impl->engine->open(name, Deadline::in(kLimit)));
  impl->peer = std::move(peer);
  CROSSDOCK_TRY(region, impl->peer->region("bench", Deadline::in(kLimit)));
  impl->remote = region.address + (itself ? bytes : 0);
  // Pages that nobody has written yet may all be one page of zeros to who reads them.
  const Request everything{Op::kWrite, impl->memory.data(), impl->remote, bytes};
  CROSSDOCK_CHECK_OK(impl->engine->transfer(*impl->peer, std::span(&everything, 1),
                                            {.deadline = Deadline::in(kLimit)}));
  return Rig(std::move(impl));
}

Result<std::vector<Measurement>> Rig::throughput(std::span<const Case> cases, std::uint32_t repeat,
                                                 const Ceiling& ceiling) {
  std::vector<std::vector<Request>> requests;
  std::vector<Measurement> all;
  for (const Case& shape : cases) {
    requests.push_back(impl_->requests(shape));
    all.push_back({.name = shape.name});
  }
  std::vector<std::vector<double>> cpu(cases.size()), shares(cases.size());
  // The first round touches every page for the first time, and does not count.
  for (std::uint32_t round = 0; round <= repeat; ++round) {
    double most = 0;
    if (ceiling && round > 0) {
      CROSSDOCK_TRY(measured, ceiling());
      most = measured.gb_per_s;
    }
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const auto bytes = static_cast<double>(cases[i].count * cases[i].block_bytes);
      const auto cpu_begin = impl_->cpu_ns();
      const auto begin = base::now_ns();
      CROSSDOCK_CHECK_OK(impl_->move_all(requests[i], cases[i]));
      const auto end = base::now_ns();
      if (round == 0) continue;
      all[i].rates.push_back(bytes / static_cast<double>(end - begin));
      cpu[i].push_back(static_cast<double>(impl_->cpu_ns() - cpu_begin) / bytes);
      if (most > 0) shares[i].push_back(all[i].rates.back() / most);
    }
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    all[i].gb_per_s = median(all[i].rates);
    all[i].cpu_s_per_gb = median(cpu[i]);
    if (!shares[i].empty()) all[i].ratio = median(shares[i]);
  }
  return all;
}

Result<Measurement> Rig::latency(const Case& shape, std::uint32_t operations) {
  std::vector<double> us;
  us.reserve(operations);
  const std::uint64_t slots = std::clamp<std::uint64_t>(impl_->bytes / shape.block_bytes, 1, 1024);
  for (std::uint32_t i = 0; i < operations + operations / 10; ++i) {
    const std::uint64_t slot = i * 977 % slots * shape.block_bytes;
    const Request request{shape.op, impl_->memory.data() + slot, impl_->remote + slot,
                          shape.block_bytes};
    const auto begin = base::now_ns();
    CROSSDOCK_CHECK_OK(impl_->engine->transfer(*impl_->peer, std::span(&request, 1),
                                               {.deadline = Deadline::in(kLimit)}));
    if (i >= operations / 10) us.push_back(seconds(base::now_ns() - begin) * 1e6);
  }
  return Measurement{.name = shape.name, .p50_us = median(us), .p99_us = quantile(us, 0.99)};
}

// Slices a second that one thread hands over and sees completed, 64 bytes each, none adjacent.
Result<Measurement> measure_submission(std::uint32_t repeat) {
  const Case shape{.name = "submission, 64 B slices",
                   .transport = "loopback",
                   .block_bytes = 128,
                   .count = 65536};
  CROSSDOCK_TRY(rig, Rig::create(shape, shape.count * shape.block_bytes, {}));
  // Blocks of 128 bytes apart, 64 of each moved: nothing can be merged.
  CROSSDOCK_TRY(result, rig.submission(shape, repeat));
  return result;
}

Result<Measurement> Rig::submission(const Case& shape, std::uint32_t repeat) {
  auto all = impl_->requests(shape);
  for (auto& request : all)
    request.length = 64;
  std::vector<double> rates;
  for (std::uint32_t i = 0; i <= repeat; ++i) {
    const auto begin = base::now_ns();
    CROSSDOCK_CHECK_OK(impl_->move(all, 4096));
    if (i > 0)
      rates.push_back(static_cast<double>(shape.count) / seconds(base::now_ns() - begin) * 1e-6);
  }
  return Measurement{.name = shape.name, .value = median(rates), .unit = "M slices/s"};
}

Result<Measurement> measure_registration(std::uint32_t repeat) {
  constexpr std::size_t kBuffers = 5000, kBytes = 4096;
  std::vector<std::byte> memory(kBuffers * 2 * kBytes);
  std::vector<transfer::MemoryRange> ranges;
  for (std::size_t i = 0; i < kBuffers; ++i)
    ranges.push_back({memory.data() + 2 * i * kBytes, kBytes});
  std::vector<double> ms;
  for (std::uint32_t i = 0; i < repeat; ++i) {
    CROSSDOCK_TRY(engine, Engine::create(engine_options("auto")));
    const auto begin = base::now_ns();
    CROSSDOCK_TRY(regions, engine.register_memory(ranges));
    ms.push_back(seconds(base::now_ns() - begin) * 1e3);
  }
  return Measurement{
      .name = "register 5,000 buffers as a batch", .value = median(ms), .unit = "ms"};
}

Result<Measurement> measure_creation(std::uint32_t repeat) {
  std::vector<double> ms;
  for (std::uint32_t i = 0; i < repeat * 4; ++i) {
    const auto begin = base::now_ns();
    CROSSDOCK_TRY(engine, Engine::create(engine_options("auto")));
    ms.push_back(seconds(base::now_ns() - begin) * 1e3);
  }
  return Measurement{.name = "create an engine", .value = median(ms), .unit = "ms"};
}

int run_target(const TransferBench& options) {
  auto settings = engine_options(options.transport);
  settings.listen = options.listen;
  auto engine = Engine::create(std::move(settings));
  if (!engine.ok()) {
    std::fprintf(stderr, "%s\n", engine.error().describe().c_str());
    return 1;
  }
  auto memory = make_memory(*engine, options.bytes, options.engine_memory);
  if (!memory.ok()) {
    std::fprintf(stderr, "%s\n", memory.error().describe().c_str());
    return 1;
  }
  base::say_parent(engine->name());
  if (!options.listen.empty())
    std::fprintf(stderr,
                 "crossdock: serving until stdin ends; keep it open (`sleep inf |`) where "
                 "there is no terminal\n");
  std::string line;
  while (base::hear_parent(line)) {
  }
  return engine->close(Deadline::in(std::chrono::seconds(5))).ok() ? 0 : 1;
}

}  // namespace crossdock::tools::bench
