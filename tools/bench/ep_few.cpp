// Times of dispatch and combine on the path for few tokens: whole, in halves, with masks, and the
// copies of rows by expert. See ep.hpp. SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "bench/ep_timer.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;

class Few {
 public:
  Few(EpBenchRig& rig, const EpBench& options, const std::string& suffix, Deadline deadline)
      : rig_(rig), options_(options), suffix_(suffix), deadline_(deadline) {}

  // Its period, and what it takes alone.
  Result<> add(const std::string& operation, EpPayload payload, const EpCall& call,
               std::vector<Figure>& figures) {
    EpTimer timer(rig_, options_, deadline_);
    CROSSDOCK_TRY(us, timer.period_us(call));
    CROSSDOCK_TRY(time, ep_time(rig_, options_, {operation, suffix_, payload}, us));
    figures.push_back(std::move(time));
    CROSSDOCK_TRY(kernel, timer.kernel_us(call));
    figures.push_back({.name = operation + "_kernel_us" + suffix_, .value = kernel, .unit = "us"});
    return {};
  }
  Result<> add_host(const char* operation, const EpCall& call, std::vector<Figure>& figures) {
    CROSSDOCK_TRY(us, EpTimer(rig_, options_, deadline_).host_us(call));
    figures.push_back(
        {.name = fmt::format("{}_call_us{}", operation, suffix_), .value = us, .unit = "us"});
    return {};
  }
  [[nodiscard]] EpCall dispatch(EpPayload payload, bool halves = false) {
    return [this, payload, halves](u32 r) -> Result<> {
      CROSSDOCK_CHECK_OK(rig_.dispatch(r, payload, halves));
      return {};
    };
  }

 private:
  EpBenchRig& rig_;
  const EpBench& options_;
  const std::string& suffix_;
  Deadline deadline_;
};

}  // namespace

Result<> measure_small(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline) {
  Few few(rig, options, suffix, deadline);
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16})
    CROSSDOCK_CHECK_OK(few.add(fmt::format("dispatch_{}", name_of(payload)), payload,
                               few.dispatch(payload), figures));
  CROSSDOCK_CHECK_OK(few.add_host("dispatch", few.dispatch(EpPayload::kFp8), figures));
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  const auto combine = [&](bool halves) -> EpCall {
    return [&, halves](u32 r) { return rig.combine(of_rank(handles, r), halves); };
  };
  CROSSDOCK_CHECK_OK(few.add("combine_bf16", EpPayload::kBf16, combine(false), figures));
  CROSSDOCK_CHECK_OK(few.add_host("combine", combine(false), figures));
  CROSSDOCK_CHECK_OK(few.add("combine_bf16_halves", EpPayload::kBf16, combine(true), figures));
  handles.clear();
  CROSSDOCK_CHECK_OK(few.add("dispatch_fp8_halves", EpPayload::kFp8,
                             few.dispatch(EpPayload::kFp8, true), figures));
  const EpCall step = [&](u32 r) -> Result<> {
    CROSSDOCK_TRY(handle, rig.dispatch(r, EpPayload::kCast, false));
    return rig.combine(handle, false);
  };
  CROSSDOCK_TRY(both, EpTimer(rig, options, deadline).period_us(step));
  CROSSDOCK_TRY(time,
                ep_time(rig, options, {"dispatch_cast_and_combine", suffix, std::nullopt}, both));
  figures.push_back(std::move(time));
  return {};
}

Result<> measure_masks(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline) {
  Few few(rig, options, suffix, deadline);
  CROSSDOCK_CHECK_OK(
      few.add("dispatch_fp8_masks", EpPayload::kFp8, few.dispatch(EpPayload::kFp8), figures));
  CROSSDOCK_TRY(handles, dispatch_all(rig, EpPayload::kBf16, deadline));
  return few.add(
      "combine_bf16_masks", EpPayload::kBf16,
      [&](u32 r) { return rig.combine(of_rank(handles, r), false); }, figures);
}

}  // namespace crossdock::tools::bench
