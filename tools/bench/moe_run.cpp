// Times of grouped products on a GPU. See moe.cpp for what the figures are.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <thread>

#include "bench/moe.hpp"
#include "bench/statistics.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;

struct Aim {
  const char* name;
  double value;
};
// What the shapes of the largest model should reach, TFLOP/s.
constexpr Aim kAims[] = {
    {"v3_l1_fp8_1024_burst", 1400}, {"v3_l1_fp8_1024_sustained", 1200},
    {"v3_l2_fp8_1024_burst", 1290}, {"v3_l2_fp8_1024_sustained", 1100},
    {"v3_l1_bf16_1024_burst", 780}, {"v3_l2_bf16_1024_burst", 760},
};
// Share of the copy's rate at which the weights should come where they are the limit.
constexpr double kWeightShare = 0.85;
constexpr u32 kFewRows = 32;

struct Timer {
  moe::Gemm& gemm;
  const moe::GemmCall& call;
  const cuda::Stream& stream;
  cuda::Event start, end;
  cuda::PinnedMemory gate;
  Deadline deadline;
  std::uint64_t opened = 0;

  static Result<Timer> create(moe::Gemm& gemm, const moe::GemmCall& call, Deadline deadline) {
    const cuda::Stream& stream = *gemm.core().group().rank(0).device().stream();
    CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_TRY(gate, cuda::PinnedMemory::allocate(stream.context(), sizeof(std::uint64_t)));
    return Timer{gemm, call, stream, std::move(start), std::move(end), std::move(gate), deadline};
  }
  // The GPU gets all of it before it may begin: the host's time for the call does not count.
  Result<double> once_us() {
    CROSSDOCK_CHECK_OK(cuda::wait_value_async(stream, gate.device(), ++opened));
    const auto queued = queue_once();
    __atomic_store_n(gate.as<std::uint64_t>(), opened, __ATOMIC_RELEASE);  // whatever happened
    CROSSDOCK_CHECK_OK(queued);
    CROSSDOCK_CHECK_OK(end.synchronize(deadline));
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(start, end));
    return ms * 1e3;
  }
  Result<> queue_once() {
    CROSSDOCK_CHECK_OK(start.record(stream));
    CROSSDOCK_CHECK_OK(gemm.run(0, call));
    return end.record(stream);
  }
  // The chip rests before each launch: with all its power and a cool clock.
  Result<double> burst_us(u32 repeat, std::chrono::nanoseconds idle) {
    std::vector<double> times;
    for (u32 i = 0; i < repeat; ++i) {
      std::this_thread::sleep_for(idle);
      CROSSDOCK_TRY(us, once_us());
      times.push_back(us);
    }
    return median(times);
  }
  // One after the other without a pause, at the clock that the power then allows.
  Result<double> sustained_us(u32 repeat, std::chrono::nanoseconds warm_up, double guess_us) {
    const auto launches = [&](double us) {
      return static_cast<u32>(std::clamp(us / guess_us, 1.0, 20000.0));
    };
    const u32 before = launches(static_cast<double>(warm_up.count()) / 1e3);
    const u32 timed = std::max(launches(100e3), repeat);
    for (u32 i = 0; i < before; ++i)
      CROSSDOCK_CHECK_OK(gemm.run(0, call));
    CROSSDOCK_CHECK_OK(start.record(stream));
    for (u32 i = 0; i < timed; ++i)
      CROSSDOCK_CHECK_OK(gemm.run(0, call));
    CROSSDOCK_CHECK_OK(end.record(stream));
    CROSSDOCK_CHECK_OK(end.synchronize(deadline));
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(start, end));
    return ms * 1e3 / timed;
  }
};

Figure figure(std::string name, double value, const char* unit) {
  Figure f{.name = std::move(name), .value = value, .unit = unit};
  for (const Aim& aim : kAims)
    if (f.name == aim.name) f.aim = aim.value;
  return f;
}

}  // namespace

Result<double> measure_copy(symm::Rank& rank, Deadline deadline) {
  constexpr u64 kBytes = u64{2} << 30;
  const cuda::Stream& stream = *rank.device().stream();
  CROSSDOCK_TRY(from, rank.allocate(kBytes));
  CROSSDOCK_TRY(to, rank.allocate(kBytes));
  CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
  CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
  std::vector<double> rates;
  for (u32 i = 0; i < 7; ++i) {
    CROSSDOCK_CHECK_OK(start.record(stream));
    CROSSDOCK_CHECK_OK(cuda::copy_async(cuda::device_ptr(to.address()),
                                        cuda::device_ptr(from.address()), kBytes, stream));
    CROSSDOCK_CHECK_OK(end.record(stream));
    CROSSDOCK_CHECK_OK(end.synchronize(deadline));
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(start, end));
    rates.push_back(2.0 * kBytes / (ms * 1e-3));
  }
  return median(rates);
}

Result<> measure_moe(moe::Gemm& gemm, MoeRig& rig, const MoeCase& c, const MoeBench& options,
                     double copy_rate, std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(error, rig.verify(deadline));
  figures.push_back({.name = c.name() + "_error", .value = error, .unit = ""});
  CROSSDOCK_TRY(timer, Timer::create(gemm, rig.call(), deadline));
  symm::Rank& rank = rig.rank();
  const u32 sms = gemm.core().launcher().num_sms(rank);
  CROSSDOCK_TRY(burst, timer.burst_us(options.repeat, options.idle));
  CROSSDOCK_TRY(cycles, rank.allocate(u64{sms} * sizeof(u64)));
  gemm.core().count_cycles(cycles.as<u64>());
  std::this_thread::sleep_for(options.idle);
  const auto counted = timer.once_us();
  gemm.core().count_cycles(nullptr);
  CROSSDOCK_CHECK_OK(counted);
  CROSSDOCK_TRY(per_block, symm::download(rank, cycles.as<u64>(), sms, deadline));
  const auto longest = static_cast<double>(*std::max_element(per_block.begin(), per_block.end()));
  CROSSDOCK_TRY(sustained, timer.sustained_us(options.repeat, options.warm_up, burst));

  const double peak = sms * (c.fp8() ? kE4m3PerCycle : kBf16PerCycle);
  figures.push_back({.name = c.name() + "_us", .value = burst, .unit = "us"});
  figures.push_back(figure(c.name() + "_burst", c.operations() / burst / 1e6, "TFLOP/s"));
  figures.push_back(figure(c.name() + "_sustained", c.operations() / sustained / 1e6, "TFLOP/s"));
  figures.push_back(
      {.name = c.name() + "_util", .value = 100 * c.operations() / (peak * longest), .unit = "%"});
  Figure weights{.name = c.name() + "_weights",
                 .value = c.weight_bytes() / sustained / 1e3,
                 .unit = "GB/s",
                 .references = {{"copy", copy_rate / 1e9}}};
  if (c.rows <= kFewRows) weights.aim = kWeightShare * copy_rate / 1e9;
  figures.push_back(std::move(weights));
  figures.push_back({.name = c.name() + "_clock", .value = longest / *counted, .unit = "MHz"});
  return {};
}

}  // namespace crossdock::tools::bench
