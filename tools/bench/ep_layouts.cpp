// Times of dispatch into the expanded layout and of combine from it, everything they launch; and
// whether what lies at the places is what was sent. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "bench/ep_timer.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr u32 kChecked = 512;  // places of a rank, evenly spread

struct Places {
  u32 rank = 0;
  u64 places = 0;
  symm::LocalMemory rows, scales, sources, outputs;
};

// Memory for all places; made while nothing runs, since making it waits for the rank's stream.
Result<std::vector<Places>> make_places(EpBenchRig& rig, const EpBench& options,
                                        Deadline deadline) {
  std::vector<Places> all;
  u64 scale_bytes = 0;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kFp8)));
    CROSSDOCK_TRY(grouped, rig.group().group_rows(handle));
    scale_bytes = handle.received().scale_bytes;
    Places p;
    p.rank = r;
    p.places = grouped.places;
    all.push_back(std::move(p));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  for (Places& p : all) {
    CROSSDOCK_TRY(rows, rig.rank(p.rank).allocate(p.places * options.hidden));
    CROSSDOCK_TRY(scales, rig.rank(p.rank).allocate(p.places * scale_bytes));
    CROSSDOCK_TRY(sources, rig.rank(p.rank).allocate(p.places * sizeof(ep::Source)));
    CROSSDOCK_TRY(outputs, rig.rank(p.rank).allocate(p.places * options.hidden * 2));
    p.rows = std::move(rows);
    p.scales = std::move(scales);
    p.sources = std::move(sources);
    p.outputs = std::move(outputs);
  }
  return all;
}

ep::Expanded expanded_at(const Places& p) {
  return {.places = p.places,
          .rows = p.rows.address(),
          .scales = p.scales.address(),
          .sources = p.sources.as<ep::Source>()};
}
// dispatch, lists, copies to their places: by the dispatch itself, or one after the other.
Result<ep::Handle> dispatch_expanded(EpBenchRig& rig, const Places& p, bool beside) {
  const ep::Tokens tokens = rig.tokens(p.rank, EpPayload::kFp8);
  const ep::Expanded to = expanded_at(p);
  if (beside) return rig.group().dispatch(p.rank, tokens, {.expanded = &to});
  CROSSDOCK_TRY(handle, rig.group().dispatch(p.rank, tokens));
  CROSSDOCK_CHECK_OK(rig.group().group_rows(handle));
  CROSSDOCK_CHECK_OK(rig.group().expand_rows(handle, to));
  return handle;
}

Error wrong(u32 rank, u64 place, const char* what) {
  return make_error(Code::kInternal, fmt::format("bench ep: {} of place {} at rank {} of the "
                                                 "expanded layout are not what was sent",
                                                 what, place, rank));
}

// Some places of a rank, byte by byte.
Result<> check_places(EpBenchRig& rig, const EpBench& options, const Places& p, u64 used,
                      Deadline deadline) {
  symm::Rank& on = rig.rank(p.rank);
  CROSSDOCK_TRY(sources, symm::download(on, p.sources.as<const ep::Source>(), used, deadline));
  const u64 scale_bytes = rig.tokens(p.rank, EpPayload::kFp8).scale_bytes;
  const u64 step = std::max<u64>(used / kChecked, 1);
  u64 rows = 0;
  for (u64 place = 0; place < used; place += step) {
    const ep::Source from = sources[place];
    if (from.rank < 0) continue;
    const EpTokensOfRank& sent = rig.sent(static_cast<u32>(from.rank));
    const auto token = static_cast<u64>(from.token);
    CROSSDOCK_TRY(row, symm::download(on, p.rows.as<const u8>() + place * options.hidden,
                                      options.hidden, deadline));
    CROSSDOCK_TRY(scales, symm::download(on, p.scales.as<const u8>() + place * scale_bytes,
                                         scale_bytes, deadline));
    if (std::memcmp(row.data(), &sent.rows[token * options.hidden * 2], row.size()) != 0)
      return wrong(p.rank, place, "values");
    if (std::memcmp(scales.data(), &sent.scales[token * scale_bytes], scale_bytes) != 0)
      return wrong(p.rank, place, "scales");
    ++rows;
  }
  return rows > 0 || used == 0 ? Result<>() : Result<>(wrong(p.rank, 0, "the sources"));
}

// One dispatch of every rank, whose copies are compared with what was sent.
Result<std::vector<ep::Handle>> dispatch_and_check(EpBenchRig& rig, const EpBench& options,
                                                   const std::vector<Places>& places, bool beside,
                                                   Deadline deadline) {
  std::vector<ep::Handle> handles;
  for (const Places& p : places) {
    CROSSDOCK_TRY(handle, dispatch_expanded(rig, p, beside));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  for (std::size_t i = 0; i < places.size(); ++i) {
    const u32 r = places[i].rank;
    const auto map = device::EpExperts::make(options.experts, rig.group().world());
    CROSSDOCK_TRY(counts, symm::download(rig.rank(r), handles[i].received().expert_counts,
                                         map.count(r), deadline));
    u64 used = 0;
    for (const u32 count : counts)
      used += device::round_up(u64{count}, u64{rig.alignment()});
    CROSSDOCK_CHECK_OK(check_places(rig, options, places[i], used, deadline));
  }
  return handles;
}
const Places& places_of(const std::vector<Places>& all, u32 rank) {
  return *std::find_if(all.begin(), all.end(), [&](const Places& p) { return p.rank == rank; });
}

}  // namespace

Result<> verify_expanded(EpBenchRig& rig, const EpBench& options, bool beside, Deadline deadline) {
  CROSSDOCK_TRY(places, make_places(rig, options, deadline));
  CROSSDOCK_CHECK_OK(dispatch_and_check(rig, options, places, beside, deadline));
  return {};
}

Result<> measure_expanded(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                          std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(places, make_places(rig, options, deadline));
  CROSSDOCK_CHECK_OK(dispatch_and_check(rig, options, places, true, deadline));
  EpTimer timer(rig, options, deadline);
  CROSSDOCK_TRY(expanded_us, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(dispatch_expanded(rig, places_of(places, r), true));
    return {};
  }));
  const bool aimed = rig.group().world() == 4 && rig.count() == 4096 && suffix.empty();
  figures.push_back({.name = "dispatch_fp8_expanded_us" + suffix,
                     .value = expanded_us,
                     .unit = "us",
                     .aim = aimed ? 300.0 : 0});
  if (rig.shape().small) return {};
  CROSSDOCK_TRY(told_us, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, EpPayload::kFp8)));
    return {};
  }));
  figures.push_back({.name = "dispatch_fp8_told_us" + suffix, .value = told_us, .unit = "us"});
  return {};
}

Result<> measure_layouts(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                         std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(places, make_places(rig, options, deadline));
  EpTimer timer(rig, options, deadline);
  // No handle is held yet: slots of few tokens are used in turns.
  CROSSDOCK_TRY(dispatch_us, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(dispatch_expanded(rig, places_of(places, r), false));
    return {};
  }));
  CROSSDOCK_TRY(handles, dispatch_and_check(rig, options, places, false, deadline));
  const auto handle_of = [&](u32 r) -> const ep::Handle& {
    return *std::find_if(handles.begin(), handles.end(),
                         [&](const ep::Handle& h) { return h.rank() == r; });
  };
  CROSSDOCK_TRY(lists_us, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_CHECK_OK(rig.group().group_rows(handle_of(r)));
    return {};
  }));
  CROSSDOCK_TRY(copies_us, timer.period_us([&](u32 r) -> Result<> {
    return rig.group().expand_rows(handle_of(r), expanded_at(places_of(places, r)));
  }));
  CROSSDOCK_TRY(combine_us, timer.period_us([&](u32 r) -> Result<> {
    const ep::Handle& handle = handle_of(r);
    CROSSDOCK_CHECK_OK(rig.group().reduce_rows(
        handle, {.rows = places_of(places, r).outputs.address(), .weighted = true}));
    return rig.group().combine(handle, rig.combined(r));
  }));
  figures.push_back(
      {.name = "dispatch_fp8_then_expand_us" + suffix, .value = dispatch_us, .unit = "us"});
  figures.push_back({.name = "group_rows_us" + suffix, .value = lists_us, .unit = "us"});
  figures.push_back({.name = "expand_rows_us" + suffix, .value = copies_us, .unit = "us"});
  figures.push_back(
      {.name = "combine_bf16_expanded_us" + suffix, .value = combine_us, .unit = "us"});
  return {};
}

}  // namespace crossdock::tools::bench
