// Tokens of `crossdock bench ep` and the comparison of what arrived: rows byte by byte, casts
// within the error of their format, combined rows bit by bit. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <random>

#include <crossdock/layout/probe.cuh>
#include <crossdock/ptx/convert.cuh>

#include "bench/ep.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr u32 kScaleGroup = device::kEpScaleGroup;

std::uint16_t bf16_of(float value) {
  return static_cast<std::uint16_t>(device::minifloat::encode_bf16(std::bit_cast<u32>(value)));
}
float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(u32{bits} << 16);
}

// `top_k` different experts, evenly or by a Zipf law over a shuffled order that all ranks share.
class Router {
 public:
  Router(const EpBench& options, u32 rank) : options_(options), random_(1234 + rank) {
    if (!options.skewed) return;
    double sum = 0;
    for (u32 e = 0; e < options.experts; ++e)
      cumulative_.push_back(sum += 1.0 / (e + 1.0));
  }
  void route(std::vector<std::int32_t>& ids) {
    const std::size_t first = ids.size();
    while (ids.size() < first + options_.top_k) {
      const auto expert = static_cast<std::int32_t>(pick());
      if (std::find(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), expert) ==
          ids.end())
        ids.push_back(expert);
    }
  }

 private:
  u32 pick() {
    if (!options_.skewed) return static_cast<u32>(random_() % options_.experts);
    const double at = cumulative_.back() * static_cast<double>(random_()) / 4294967296.0;
    const auto found = std::lower_bound(cumulative_.begin(), cumulative_.end(), at);
    const auto place = static_cast<u32>(found - cumulative_.begin());
    // Spread over the ranks: an odd factor is a permutation where experts are a power of two.
    return static_cast<u32>(u64{place} * 167 % options_.experts);
  }
  const EpBench& options_;
  std::mt19937 random_;
  std::vector<double> cumulative_;
};

EpTokensOfRank make_tokens(const EpBench& options, u32 rank, u32 tokens) {
  EpTokensOfRank out;
  Router router(options, rank);
  for (u32 t = 0; t < tokens; ++t)
    router.route(out.ids);
  out.weights.assign(out.ids.size(), 1.0f / static_cast<float>(options.top_k));
  out.rows.resize(u64{tokens} * options.hidden * 2);
  auto* values = reinterpret_cast<std::uint16_t*>(out.rows.data());
  for (u64 i = 0; i < out.rows.size() / 2; ++i) {
    const u32 x = device::mix(static_cast<u32>(i) * 31 + rank) % 4001;
    values[i] = bf16_of((static_cast<float>(x) - 2000.0f) / 256.0f);
  }
  out.scales.resize(u64{tokens} * options.hidden / kScaleGroup * 4);
  for (u64 i = 0; i < out.scales.size(); ++i)
    out.scales[i] = static_cast<u8>(device::mix(static_cast<u32>(i) + 77 * rank));
  return out;
}

Error wrong(const char* what, u32 rank, u64 row) {
  return make_error(Code::kInternal, fmt::format("bench ep: {} of row {} at rank {} are not what "
                                                 "was sent",
                                                 what, row, rank));
}

// Every code of e4m3 as a number.
std::array<float, 256> e4m3_values() {
  std::array<float, 256> out{};
  for (u32 code = 0; code < 256; ++code)
    out[code] = std::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, code));
  return out;
}

// A row of e4m3 with its scales against the bf16 it was made from: within half a step of e4m3.
bool cast_is_close(const u8* values, const float* scales, const std::uint16_t* sent, u32 hidden) {
  static const std::array<float, 256> kNumbers = e4m3_values();
  for (u32 i = 0; i < hidden; ++i) {
    const float scale = scales[i / kScaleGroup];
    const float got = kNumbers[values[i]] * scale;
    const float want = from_bf16(sent[i]);
    if (std::abs(got - want) > std::max(std::abs(want) / 16.0f, scale / 256.0f) * 1.01f)
      return false;
  }
  return true;
}

// With few tokens an expert has a handful of rows: padding would be most of what is written.
u32 alignment_of(const EpBench& options, bool small) {
  if (small) return options.expanded || options.compressed ? 1 : 0;
  return options.expanded ? 128 : options.compressed ? 1 : 0;
}

}  // namespace

const char* name_of(EpPayload payload) {
  switch (payload) {
    case EpPayload::kFp8:
      return "fp8";
    case EpPayload::kCast:
      return "fp8_cast";
    default:
      return "bf16";
  }
}

Result<EpBenchRig> EpBenchRig::create(const EpBench& options, const symm::GroupOptions& ranks,
                                      const Shape& shape) {
  const u32 tokens = shape.tokens;
  ep::GroupOptions group_options{.ranks = ranks};
  group_options.ep.experts = options.experts;
  group_options.ep.top_k = options.top_k;
  group_options.ep.max_tokens = tokens;
  group_options.ep.hidden = options.hidden;
  group_options.ep.scale_bytes = options.hidden / kScaleGroup * 4;
  group_options.ep.dispatch_sms = shape.sms;
  group_options.ep.combine_sms = shape.sms;
  group_options.ep.combine = shape.push ? ep::CombineBy::kPush : ep::CombineBy::kPull;
  group_options.ep.overlap_launches = options.overlap;
  group_options.ep.host_counts = options.host_counts;
  if (shape.small) {
    group_options.ep.small_tokens = tokens;
    group_options.ep.small_sms = shape.sms;
    group_options.ep.slots = 0;
    group_options.ep.fall_back = false;
    group_options.ep.dispatch_sms = 0;
    group_options.ep.combine_sms = options.small_combine_sms;
    group_options.ep.small_packets = options.small_packets;
    group_options.ep.compressed = options.compressed;
    group_options.ep.small_expand_sms = shape.expand_sms;
  } else {
    group_options.ep.expand_sms = shape.expand_sms;
  }
  group_options.ep.expert_alignment = alignment_of(options, shape.small);
  group_options.ep.masks = shape.masks;
  group_options.ep.wait = std::chrono::seconds(20);  // a peer may still be loading its kernels
  CROSSDOCK_TRY(group, ep::Group::create(group_options));
  EpBenchRig rig(options, std::move(group), shape);
  for (u32 r = 0; r < rig.group_.world(); ++r)
    rig.all_.push_back(make_tokens(options, r, tokens));
  CROSSDOCK_CHECK_OK(rig.upload_all(Deadline::in(options.timeout)));
  return rig;
}

u32 EpBenchRig::alignment() const {
  return alignment_of(options_, shape_.small);
}

Result<ep::Handle> EpBenchRig::dispatch(u32 r, EpPayload payload, bool halves) {
  if (!halves) return group_.dispatch(r, tokens(r, payload));
  CROSSDOCK_TRY(handle, group_.dispatch_send(r, tokens(r, payload)));
  CROSSDOCK_CHECK_OK(group_.dispatch_receive(handle));
  return handle;
}
Result<> EpBenchRig::combine(const ep::Handle& handle, bool halves) {
  if (!halves) return group_.combine(handle, combined(handle.rank()));
  CROSSDOCK_CHECK_OK(group_.combine_send(handle));
  return group_.combine_receive(handle, combined(handle.rank()));
}

EpBenchRig::Memory& EpBenchRig::of(u32 r) {
  return *std::find_if(memory_.begin(), memory_.end(),
                       [&](const Memory& memory) { return memory.rank == r; });
}

Result<> EpBenchRig::upload_all(Deadline deadline) {
  for (const u32 r : group_.local_ranks()) {
    symm::Rank& on = rank(r);
    const EpTokensOfRank& in = all_[r];
    Memory m;
    m.rank = r;
    CROSSDOCK_TRY(rows, on.allocate(in.rows.size()));
    CROSSDOCK_TRY(scales, on.allocate(in.scales.size()));
    CROSSDOCK_TRY(ids, on.allocate(in.ids.size() * 4));
    CROSSDOCK_TRY(weights, on.allocate(in.weights.size() * 4));
    CROSSDOCK_TRY(combined, on.allocate(in.rows.size()));
    CROSSDOCK_CHECK_OK(symm::upload(on, rows.as<u8>(), in.rows, deadline));
    CROSSDOCK_CHECK_OK(symm::upload(on, scales.as<u8>(), in.scales, deadline));
    CROSSDOCK_CHECK_OK(symm::upload(on, ids.as<std::int32_t>(), in.ids, deadline));
    CROSSDOCK_CHECK_OK(symm::upload(on, weights.as<float>(), in.weights, deadline));
    m.rows = std::move(rows);
    m.scales = std::move(scales);
    m.ids = std::move(ids);
    m.weights = std::move(weights);
    m.combined = std::move(combined);
    memory_.push_back(std::move(m));
  }
  return {};
}

ep::Tokens EpBenchRig::tokens(u32 r, EpPayload payload) {
  const Memory& m = of(r);
  const u32 bf16 = options_.hidden * 2;
  ep::Tokens out{.count = count_,
                 .rows = m.rows.address(),
                 .row_bytes = payload == EpPayload::kFp8 ? options_.hidden : bf16,
                 .row_stride = bf16,
                 .cast = payload == EpPayload::kCast,
                 .ids = m.ids.address(),
                 .weights = m.weights.as<float>()};
  if (payload == EpPayload::kFp8) {
    out.scales = m.scales.address();
    out.scale_bytes = options_.hidden / kScaleGroup * 4;
  }
  return out;
}
ep::Combined EpBenchRig::combined(u32 r) {
  return {.rows = of(r).combined.address()};
}

bool EpBenchRig::goes_to(u32 source, u32 token, u32 destination) const {
  const auto map = device::EpExperts::make(options_.experts, static_cast<u32>(all_.size()));
  for (u32 k = 0; k < options_.top_k; ++k)
    if (map.owner(static_cast<u32>(all_[source].ids[u64{token} * options_.top_k + k])) ==
        destination)
      return true;
  return false;
}

double EpBenchRig::received_bytes(EpPayload payload, bool off_rank) const {
  const double row = payload == EpPayload::kBf16
                         ? options_.hidden * 2.0
                         : options_.hidden + options_.hidden / kScaleGroup * 4.0;
  const auto world = static_cast<u32>(all_.size());
  u64 rows = 0;
  for (u32 source = 0; source < world; ++source)
    for (u32 token = 0; token < count_; ++token)
      for (u32 d = 0; d < world; ++d)
        rows += (!off_rank || d != source) && goes_to(source, token, d);
  return row * static_cast<double>(rows) / world;
}

Result<u32> EpBenchRig::rows_of(const ep::Handle& handle, Deadline deadline) {
  CROSSDOCK_TRY(ends, symm::download(rank(handle.rank()), handle.received().source_ends,
                                     all_.size(), deadline));
  return ends.back();
}

Result<> EpBenchRig::check_rows(const ep::Handle& handle, EpPayload payload, Deadline deadline) {
  const u32 r = handle.rank();
  const ep::Received& got = handle.received();
  CROSSDOCK_TRY(rows, rows_of(handle, deadline));
  CROSSDOCK_TRY(data, symm::download(rank(r), static_cast<const u8*>(got.rows),
                                     u64{rows} * got.row_bytes, deadline));
  CROSSDOCK_TRY(scales, symm::download(rank(r), static_cast<const u8*>(got.scales),
                                       u64{rows} * got.scale_bytes, deadline));
  CROSSDOCK_TRY(tokens, symm::download(rank(r), got.tokens, rows, deadline));
  u64 row = 0;
  for (u32 source = 0; source < all_.size(); ++source) {
    if (got.source_stride != 0) row = u64{source} * got.source_stride;
    for (u32 token = 0; token < count_; ++token) {
      if (!goes_to(source, token, r)) continue;
      if (row == rows || tokens[row] != token) return wrong("the order", r, row);
      const u8* sent = &all_[source].rows[u64{token} * options_.hidden * 2];
      const u8* here = &data[row * got.row_bytes];
      const u8* scale = scales.data() + row * got.scale_bytes;
      const bool right =
          payload == EpPayload::kCast
              ? cast_is_close(here, reinterpret_cast<const float*>(scale),
                              reinterpret_cast<const std::uint16_t*>(sent), options_.hidden)
              : std::memcmp(here, sent, got.row_bytes) == 0;
      if (!right) return wrong("values", r, row);
      if (payload == EpPayload::kFp8 &&
          std::memcmp(scale, &all_[source].scales[u64{token} * got.scale_bytes], got.scale_bytes) !=
              0)
        return wrong("scales", r, row);
      ++row;
    }
  }
  return row == rows ? Result<>() : Result<>(wrong("the number", r, row));
}

// The experts give every row back as it came: a token becomes the sum of its copies.
Result<> EpBenchRig::give_back(const ep::Handle& handle, Deadline deadline) {
  symm::Rank& on = rank(handle.rank());
  const ep::Received& got = handle.received();
  CROSSDOCK_TRY(rows, rows_of(handle, deadline));
  CROSSDOCK_TRY(data, symm::download(on, static_cast<const u8*>(got.rows),
                                     u64{rows} * got.row_bytes, deadline));
  return symm::upload(on, static_cast<u8*>(handle.expert_input().rows), data, deadline);
}

Result<> EpBenchRig::check_combined(u32 r, Deadline deadline) {
  const u32 hidden = options_.hidden;
  CROSSDOCK_TRY(sums, symm::download(rank(r), of(r).combined.as<std::uint16_t>(),
                                     u64{count_} * hidden, deadline));
  const auto* sent = reinterpret_cast<const std::uint16_t*>(all_[r].rows.data());
  for (u32 token = 0; token < count_; ++token) {
    u32 copies = 0;
    for (u32 d = 0; d < all_.size(); ++d)
      copies += goes_to(r, token, d);
    for (u64 i = u64{token} * hidden; i < u64{token + 1} * hidden; ++i)
      if (sums[i] != bf16_of(0.0f + static_cast<float>(copies) * from_bf16(sent[i])))
        return wrong("combined values", r, token);
  }
  return {};
}

Result<> EpBenchRig::verify(Deadline deadline, bool halves) {
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16}) {
    std::vector<ep::Handle> handles;
    for (const u32 r : group_.local_ranks()) {
      CROSSDOCK_TRY(handle, dispatch(r, payload, halves));
      handles.push_back(std::move(handle));
    }
    CROSSDOCK_CHECK_OK(group_.synchronize(deadline));
    for (const auto& handle : handles)
      CROSSDOCK_CHECK_OK(check_rows(handle, payload, deadline));
    if (payload != EpPayload::kBf16) continue;
    for (const auto& handle : handles)
      CROSSDOCK_CHECK_OK(give_back(handle, deadline));
    for (const auto& handle : handles)
      CROSSDOCK_CHECK_OK(combine(handle, halves));
    CROSSDOCK_CHECK_OK(group_.synchronize(deadline));
    for (const auto& handle : handles)
      CROSSDOCK_CHECK_OK(check_combined(handle.rank(), deadline));
  }
  return {};
}

}  // namespace crossdock::tools::bench
