// Times of combines of few tokens whose rows travel compressed, beside plain ones: of rows that the
// experts have left as bf16, and of sums by expert that are written in the format; and whether what
// comes back is as close as the format promises. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <fmt/format.h>

#include "bench/ep_timer.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;

struct Format {
  ep::Payload payload;
  const char* name;
  double error;  // of a value, of the magnitudes that the bench sends
};
// docs/design/ep.md; at most 13 octaves are in a group.
constexpr Format kFormats[] = {{ep::Payload::kBf16, "bf16", 0},
                               {ep::Payload::kFp8, "fp8", 1.0 / 16},
                               {ep::Payload::kLogFmt10, "logfmt10", 13.0 / 900}};

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(u32{bits} << 16);
}

struct Outputs {
  u32 rank = 0;
  u32 rows_per_expert = 0;
  symm::LocalMemory rows;
};
// What experts have made, in a masked layout; zeros.
Result<std::vector<Outputs>> make_outputs(EpBenchRig& rig, const EpBench& options) {
  const u32 world = rig.group().world();
  const auto map = device::EpExperts::make(options.experts, world);
  std::vector<Outputs> all;
  for (const u32 r : rig.group().local_ranks()) {
    Outputs out;
    out.rank = r;
    out.rows_per_expert = world * rig.count();
    CROSSDOCK_TRY(rows, rig.rank(r).allocate_state(u64{map.count(r)} * out.rows_per_expert *
                                                   options.hidden * 2));
    out.rows = std::move(rows);
    all.push_back(std::move(out));
  }
  return all;
}

}  // namespace

Result<> EpBenchRig::verify_payload(ep::Payload payload, double error, Deadline deadline) {
  std::vector<ep::Handle> handles;
  for (const u32 r : group_.local_ranks()) {
    CROSSDOCK_TRY(handle, group_.dispatch(r, tokens(r, EpPayload::kBf16)));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(group_.synchronize(deadline));
  for (const auto& handle : handles)
    CROSSDOCK_CHECK_OK(give_back(handle, deadline));
  for (const auto& handle : handles)
    CROSSDOCK_CHECK_OK(group_.combine(handle, combined(handle.rank()), {.payload = payload}));
  CROSSDOCK_CHECK_OK(group_.synchronize(deadline));
  const u64 hidden = options_.hidden;
  for (const u32 r : group_.local_ranks()) {
    CROSSDOCK_TRY(sums, symm::download(rank(r), of(r).combined.as<std::uint16_t>(),
                                       u64{count_} * hidden, deadline));
    const auto* sent = reinterpret_cast<const std::uint16_t*>(all_[r].rows.data());
    for (u64 i = 0; i < sums.size(); ++i) {
      u32 copies = 0;
      for (u32 d = 0; d < all_.size(); ++d)
        copies += goes_to(r, static_cast<u32>(i / hidden), d);
      const double want = copies * double{from_bf16(sent[i])};
      // The sum is rounded to bf16; e4m3 has steps of its own near zero.
      const double most = std::abs(want) * (error + 1.0 / 256) + copies * 8.0 / (1 << 18);
      if (!(std::abs(from_bf16(sums[i]) - want) <= most))
        return make_error(
            Code::kInternal,
            fmt::format("bench ep: value {} of token {} at rank {} came back from a compressed "
                        "combine as {}, and is {}",
                        i % hidden, i / hidden, r, from_bf16(sums[i]), want));
    }
  }
  return {};
}

Result<> measure_compressed(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                            std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(outputs, make_outputs(rig, options));
  for (const Format& format : kFormats)
    CROSSDOCK_CHECK_OK(rig.verify_payload(format.payload, format.error, deadline));
  std::vector<ep::Handle> handles;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kBf16)));
    CROSSDOCK_CHECK_OK(rig.group().group_rows(handle));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  const auto index_of = [&](u32 r) {
    return static_cast<std::size_t>(
        std::find_if(handles.begin(), handles.end(),
                     [&](const ep::Handle& h) { return h.rank() == r; }) -
        handles.begin());
  };
  EpTimer timer(rig, options, deadline);
  for (const Format& format : kFormats) {
    CROSSDOCK_TRY(plain, timer.period_us([&](u32 r) {
      return rig.group().combine(handles[index_of(r)], rig.combined(r),
                                 {.payload = format.payload});
    }));
    CROSSDOCK_TRY(sums, timer.period_us([&](u32 r) -> Result<> {
      const Outputs& from = outputs[index_of(r)];
      const ep::Handle& handle = handles[index_of(r)];
      CROSSDOCK_CHECK_OK(rig.group().reduce_rows(handle, {.rows = from.rows.address(),
                                                          .rows_per_expert = from.rows_per_expert,
                                                          .weighted = true,
                                                          .payload = format.payload}));
      return rig.group().combine(
          handle, rig.combined(r),
          {.payload = format.payload, .packed = format.payload != ep::Payload::kBf16});
    }));
    const std::string name = format.name;
    if (format.payload != ep::Payload::kBf16)
      figures.push_back({.name = "combine_" + name + "_us" + suffix, .value = plain, .unit = "us"});
    figures.push_back(
        {.name = "sums_and_combine_" + name + "_us" + suffix, .value = sums, .unit = "us"});
  }
  return {};
}

}  // namespace crossdock::tools::bench
