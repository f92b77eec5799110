// Times of dispatch and combine on GPUs by EpTimer. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <span>

#include "bench/ep_known.hpp"
#include "bench/ep_timer.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;

constexpr u32 kLoadGraphs = 8;  // of a product alone, to know its rate

// A dispatch or a combine, and what is known of it.
struct Call {
  std::string name;
  std::string suffix;
  EpPayload payload;
  EpCall call;
};

// What aims and other libraries' figures are about.
bool is_known_case(EpBenchRig& rig, const EpBench& options) {
  return rig.group().world() == 4 && rig.shape().wire != nullptr && !options.skewed &&
         options.hidden == 7168 && options.top_k == 8 && options.experts == 256;
}

// Time of all bytes at the rate of the link; of one rank alone at that of copies by as many SMs.
Result<> refer_to_wire(EpBenchRig& rig, const EpTimed& of, Figure& time) {
  EpWire* wire = rig.shape().wire;
  if (wire == nullptr || !of.payload) return {};
  const EpPayload payload = *of.payload;
  const bool pulls = of.operation.starts_with("combine_bf16");
  const auto direction = pulls ? symm::Direction::kPull : symm::Direction::kPush;
  if (!wire->local()) {
    CROSSDOCK_TRY(rate, wire->gb_per_s(direction, 0));
    time.references.push_back({pulls ? "wire, all ranks pull" : "wire, all ranks push",
                               rig.received_bytes(payload, true) / rate / 1e3});
    return {};
  }
  if (rig.shape().small) return {};  // few tokens are no matter of bytes there
  const u32 asked = rig.shape().sms;
  const u32 sms = asked != 0 ? asked
                  : pulls    ? ep::default_combine_sms(1)
                             : ep::default_dispatch_sms(1);
  CROSSDOCK_TRY(rate, wire->gb_per_s(direction, sms));
  time.references.push_back(
      {fmt::format("local copies, {} SMs", sms), rig.received_bytes(payload, false) / rate / 1e3});
  return {};
}

void add_rates(EpBenchRig& rig, const Call& of, double us, std::vector<Figure>& figures) {
  figures.push_back({.name = of.name + "_logical" + of.suffix,
                     .value = rig.received_bytes(of.payload, false) / us / 1e3,
                     .unit = "GB/s"});
  figures.push_back({.name = of.name + "_off_rank" + of.suffix,
                     .value = rig.received_bytes(of.payload, true) / us / 1e3,
                     .unit = "GB/s"});
}

Result<> measure_call(EpBenchRig& rig, const EpBench& options, const Call& of,
                      std::vector<Figure>& figures, Deadline deadline) {
  EpTimer timer(rig, options, deadline);
  CROSSDOCK_TRY(us, timer.period_us(of.call));
  CROSSDOCK_TRY(time, ep_time(rig, options, {of.name, of.suffix, of.payload}, us));
  figures.push_back(std::move(time));
  CROSSDOCK_TRY(kernel, timer.kernel_us(of.call));
  figures.push_back({.name = of.name + "_kernel_us" + of.suffix, .value = kernel, .unit = "us"});
  add_rates(rig, of, us, figures);
  return {};
}

EpCall dispatching(EpBenchRig& rig, EpPayload payload) {
  return [&rig, payload](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, payload)));
    return {};
  };
}

}  // namespace

Result<Figure> ep_time(EpBenchRig& rig, const EpBench& options, const EpTimed& of, double us) {
  const std::string name = of.operation + "_us";
  Figure time{.name = name + of.suffix, .value = us, .unit = "us"};
  CROSSDOCK_CHECK_OK(refer_to_wire(rig, of, time));
  const bool few = rig.shape().small;
  if (!is_known_case(rig, options) || (!few && !of.suffix.empty())) return time;
  const bool aimed = !few || (options.overlap && !options.host_counts);
  for (const EpKnown& known :
       few ? std::span<const EpKnown>(kEpKnownFew) : std::span<const EpKnown>(kEpKnown)) {
    if (known.name != name || known.tokens != rig.count()) continue;
    if (known.deepep_us > 0) time.references.push_back({"DeepEP", known.deepep_us});
    if (aimed) time.aim = known.aim_us;
  }
  return time;
}

Result<> measure_ep(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                    std::vector<Figure>& figures, Deadline deadline) {
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16})
    CROSSDOCK_CHECK_OK(measure_call(rig, options,
                                    {.name = fmt::format("dispatch_{}", name_of(payload)),
                                     .suffix = suffix,
                                     .payload = payload,
                                     .call = dispatching(rig, payload)},
                                    figures, deadline));
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  const EpCall combine = [&](u32 r) {
    return rig.group().combine(of_rank(handles, r), rig.combined(r));
  };
  CROSSDOCK_CHECK_OK(measure_call(
      rig, options,
      {.name = "combine_bf16", .suffix = suffix, .payload = EpPayload::kBf16, .call = combine},
      figures, deadline));
  EpTimer timer(rig, options, deadline);
  CROSSDOCK_TRY(combine_host, timer.host_us(combine));
  handles.clear();
  CROSSDOCK_TRY(dispatch_host, timer.host_us(dispatching(rig, EpPayload::kFp8)));
  figures.push_back(
      {.name = "dispatch_call_us" + suffix, .value = dispatch_host, .unit = "us", .aim = 8});
  figures.push_back({.name = "combine_call_us" + suffix, .value = combine_host, .unit = "us"});
  return {};
}

// Each call alone and beside a product on the other multiprocessors: its own period, and what the
// product still does.
Result<> measure_beside(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                        std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  const EpCall dispatch = dispatching(rig, EpPayload::kFp8);
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
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  return measure_call(
      rig, options,
      {.name = "combine_push_bf16",
       .suffix = suffix,
       .payload = EpPayload::kBf16,
       .call = [&](u32 r) { return rig.group().combine(of_rank(handles, r), rig.combined(r)); }},
      figures, deadline);
}

}  // namespace crossdock::tools::bench
