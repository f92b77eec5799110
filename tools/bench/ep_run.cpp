// Times of dispatch and combine on GPUs by EpTimer. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <fmt/format.h>

#include "bench/ep_timer.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;

// What a host of 4 x H200 gave, EP4, 4096 tokens x 7168, top-8 of 256: DeepEP's best, and the aim.
struct Known {
  const char* name;
  double deepep_us;
  double aim_us;
};
constexpr Known kKnown[] = {{"dispatch_fp8_us", 366, 245},
                            {"dispatch_fp8_cast_us", 0, 250},
                            {"dispatch_bf16_us", 551, 465},
                            {"combine_bf16_us", 597, 490}};
// Off-rank bytes of all ranks at once on that host, GB/s a GPU.
constexpr double kPushWire = 345;
constexpr double kPullWire = 315;
constexpr u32 kLoadGraphs = 8;  // of a product alone, to know its rate

struct Bytes {
  double received;
  double off_rank;
};
void add_period(std::vector<Figure>& figures, const std::string& operation,
                const std::string& suffix, double us, const Bytes& bytes, bool compare) {
  const bool pull = operation == "combine_bf16";
  Figure time{.name = operation + "_us" + suffix, .value = us, .unit = "us"};
  time.references.push_back({pull ? "pull of 4 x H200" : "push of 4 x H200",
                             bytes.off_rank / (pull ? kPullWire : kPushWire) / 1e3});
  for (const Known& known : kKnown) {
    if (!compare || known.name != operation + "_us") continue;
    if (known.deepep_us > 0) time.references.push_back({"DeepEP", known.deepep_us});
    time.aim = known.aim_us;
  }
  figures.push_back(std::move(time));
  figures.push_back({.name = operation + "_logical" + suffix,
                     .value = bytes.received / us / 1e3,
                     .unit = "GB/s"});
  figures.push_back({.name = operation + "_off_rank" + suffix,
                     .value = bytes.off_rank / us / 1e3,
                     .unit = "GB/s"});
}

bool is_compared(EpBenchRig& rig, const EpBench& options, const std::string& suffix) {
  return rig.group().world() == 4 && rig.count() == 4096 && !options.skewed &&
         options.hidden == 7168 && options.top_k == 8 && options.experts == 256 && suffix.empty();
}
Result<std::vector<ep::Handle>> dispatch_all(EpBenchRig& rig, EpPayload payload,
                                             Deadline deadline) {
  std::vector<ep::Handle> handles;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, payload)));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  return handles;
}
const ep::Handle& of_rank(const std::vector<ep::Handle>& handles, u32 r) {
  return *std::find_if(handles.begin(), handles.end(),
                       [&](const ep::Handle& h) { return h.rank() == r; });
}

Result<> measure_combine(EpBenchRig& rig, const EpBench& options, const std::string& name,
                         const std::string& suffix, std::vector<Figure>& figures,
                         Deadline deadline) {
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  CROSSDOCK_TRY(us, EpTimer(rig, options, deadline).period_us([&](u32 r) {
    return rig.group().combine(of_rank(handles, r), rig.combined(r));
  }));
  add_period(
      figures, name, suffix, us,
      {rig.received_bytes(EpPayload::kBf16, false), rig.received_bytes(EpPayload::kBf16, true)},
      is_compared(rig, options, suffix));
  return {};
}

// The host's time for one dispatch call, launches included, while the GPU lags behind.
Result<double> host_us(EpBenchRig& rig, Deadline deadline) {
  constexpr u32 kCalls = 64;
  const auto ranks = rig.group().local_ranks();
  const auto start = std::chrono::steady_clock::now();
  for (u32 i = 0; i < kCalls; ++i)
    for (const u32 r : ranks)
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, EpPayload::kFp8)));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  return took.count() / kCalls / static_cast<double>(ranks.size());
}

}  // namespace

Result<> measure_ep(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                    std::vector<Figure>& figures, Deadline deadline) {
  EpTimer timer(rig, options, deadline);
  const bool compare = is_compared(rig, options, suffix);
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16}) {
    CROSSDOCK_TRY(us, timer.period_us([&](u32 r) -> Result<> {
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, payload)));
      return {};
    }));
    add_period(figures, fmt::format("dispatch_{}", name_of(payload)), suffix, us,
               {rig.received_bytes(payload, false), rig.received_bytes(payload, true)}, compare);
  }
  CROSSDOCK_CHECK_OK(measure_combine(rig, options, "combine_bf16", suffix, figures, deadline));
  CROSSDOCK_TRY(host, host_us(rig, deadline));
  figures.push_back({.name = "dispatch_call_us" + suffix, .value = host, .unit = "us", .aim = 8});
  return {};
}

Result<> measure_small(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline) {
  EpTimer timer(rig, options, deadline);
  const auto add = [&](const char* name, double us) {
    figures.push_back({.name = std::string(name) + "_us" + suffix, .value = us, .unit = "us"});
  };
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16}) {
    CROSSDOCK_TRY(us, timer.period_us([&](u32 r) -> Result<> {
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, payload)));
      return {};
    }));
    add(fmt::format("dispatch_{}", name_of(payload)).c_str(), us);
  }
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  CROSSDOCK_TRY(combine, timer.period_us([&](u32 r) {
    return rig.group().combine(of_rank(handles, r), rig.combined(r));
  }));
  add("combine_bf16", combine);
  handles.clear();
  CROSSDOCK_TRY(step, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kCast)));
    return rig.group().combine(handle, rig.combined(r));
  }));
  add("dispatch_cast_and_combine", step);
  return {};
}

// Each call alone and beside a product on the other multiprocessors: its own period, and what the
// product still does.
Result<> measure_beside(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                        std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  const auto dispatch = [&](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, EpPayload::kFp8)));
    return {};
  };
  const auto combine = [&](u32 r) {
    return rig.group().combine(of_rank(handles, r), rig.combined(r));
  };
  const u32 world = rig.group().world();
  const struct {
    const char* name;
    EpCall call;
    u32 sms;
  } kCalls[] = {{"dispatch_fp8", dispatch, ep::default_dispatch_sms(world)},
                {"combine_bf16", combine, ep::default_combine_sms(world)}};
  for (const auto& c : kCalls) {
    const u32 asked = options.sms.front();
    CROSSDOCK_TRY(load, EpGemmLoad::create(rig, asked != 0 ? asked : c.sms, deadline));
    CROSSDOCK_CHECK_OK(load.start(kLoadGraphs));
    CROSSDOCK_TRY(alone, load.finish(deadline));
    EpTimer timer(rig, options, deadline);
    CROSSDOCK_TRY(plain, timer.period_us(c.call));
    // Three times as long as the calls take alone.
    const double graph_us = load.graph_operations() / alone / 1e6;
    const auto graphs = static_cast<u32>(3 * plain * timer.calls() / graph_us) + 2;
    CROSSDOCK_TRY(us, timer.period_us(c.call, &load, graphs));
    figures.push_back({.name = fmt::format("{}_beside_gemm_us{}", c.name, suffix),
                       .value = us,
                       .unit = "us",
                       .references = {{"alone", plain}}});
    figures.push_back({.name = fmt::format("gemm_beside_{}{}", c.name, suffix),
                       .value = timer.load_rate(),
                       .unit = "TFLOP/s",
                       .references = {{"alone", alone}}});
  }
  return {};
}

Result<> measure_push(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                      std::vector<Figure>& figures, Deadline deadline) {
  return measure_combine(rig, options, "combine_push_bf16", suffix, figures, deadline);
}

}  // namespace crossdock::tools::bench
