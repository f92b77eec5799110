// Data of `crossdock bench moe --chain` and the comparison of results with fp64. Weights and rows
// repeat random patterns, another one on each rank, so that the host knows every value. See
// moe_chain.hpp. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <utility>

#include <crossdock/layout/fp4_weights.cuh>
#include <crossdock/layout/probe.cuh>

#include "bench/moe_chain.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr float kClamp = 10.0f;
constexpr u32 kSamples = 64;  // values of a token that are compared
// Of samples: bf16 rounds rows, activations and sums; e4m3 quantises rows and activations.
constexpr double kBf16Error = 1e-2;
constexpr double kE4m3Error = 7e-2;

template <class T>
Result<symm::LocalMemory> put(symm::Rank& rank, const std::vector<T>& values, Deadline deadline) {
  CROSSDOCK_TRY(memory, rank.allocate(std::max<u64>(values.size() * sizeof(T), 16)));
  CROSSDOCK_CHECK_OK(symm::upload(rank, memory.template as<T>(), values, deadline));
  return memory;
}

// A row of the pattern's numbers.
std::vector<float> row_at(const std::vector<u8>& pattern, u64 first, u32 count, bool fp8) {
  static const std::vector<float> codes = [] {  // decoded, since whole layers are read
    std::vector<u8> all(256);
    for (u32 i = 0; i < 256; ++i)
      all[i] = static_cast<u8>(i);
    std::vector<float> values;
    for (u32 i = 0; i < 256; ++i)
      values.push_back(pattern_value(all, i, true));
    return values;
  }();
  std::vector<float> row(count);
  u64 at = first % pattern.size();
  for (u32 i = 0; i < count; ++i) {
    row[i] = fp8 ? codes[pattern[at]] : pattern_value(pattern, first + i, false);
    at = at + 1 == pattern.size() ? 0 : at + 1;
  }
  return row;
}
double dot(const std::vector<float>& row, const float* scales, const auto& other) {
  double sum = 0;
  for (u32 g = 0; g < row.size(); g += 128) {
    double part = 0;
    for (u32 i = g; i < g + 128; ++i)
      part += double{row[i]} * other[i];
    sum += part * (scales != nullptr ? scales[g / 128] : 1.0f);
  }
  return sum;
}

}  // namespace

std::string ChainCase::name() const {
  return fmt::format("{}_chain_{}{}_{}{}{}{}", model.name,
                     fp4()   ? "fp4"
                     : fp8() ? "fp8"
                             : "bf16",
                     ue8m0() ? "_ue8m0" : "", tokens, routing == "even" ? "" : "_" + routing,
                     expand_sms == 0 ? "" : fmt::format("_{}copy", expand_sms),
                     shared_experts() == 0 ? "" : "_shared");
}

Result<ChainRig> ChainRig::create(const ChainCase& c, Deadline deadline) {
  moe::LayerOptions options;
  options.ranks.world = c.ranks;
  options.ranks.backend = c.twin ? symm::Backend::kCpu : symm::Backend::kGpu;
  options.experts = c.model.experts;
  options.top_k = c.model.top_k;
  options.max_tokens = c.tokens;
  options.hidden = c.model.hidden;
  options.inter = c.model.inner;
  options.format = c.format;
  if (c.fp8()) options.scales = c.scale_type;
  options.clamp = kClamp;
  options.fast = true;
  options.expand_sms = c.expand_sms;
  options.shared_inter = c.shared_experts() * c.model.inner;
  CROSSDOCK_TRY(layer, moe::Layer::create(options));
  ChainRig rig(c, std::move(layer));
  for (u32 r = 0; r < c.ranks; ++r)
    CROSSDOCK_CHECK_OK(rig.load(r, deadline));
  return rig;
}

Result<> ChainRig::load(u32 r, Deadline deadline) {
  Memory memory;
  Known known;
  memory.rank = r;
  CROSSDOCK_TRY(chosen, load_weights(r, layer_.weight_layout(r), known.chosen, deadline));
  CROSSDOCK_CHECK_OK(layer_.use(r, chosen.view));
  memory.chosen = std::move(chosen);
  if (case_.shared_experts() != 0) {
    CROSSDOCK_TRY(shared, load_weights(r, layer_.shared_layout(), known.shared, deadline));
    CROSSDOCK_CHECK_OK(layer_.use_shared(r, shared.view));
    memory.shared = std::move(shared);
  }
  CROSSDOCK_CHECK_OK(load_tokens(memory, known, deadline));
  memory_.push_back(std::move(memory));
  known_.push_back(std::move(known));
  return {};
}

// Prepared as they are: any codes and scales are weights.
Result<moe::RankWeights> ChainRig::load_weights(u32 r, const moe::WeightLayout& layout,
                                                KnownWeights& k, Deadline deadline) {
  CROSSDOCK_TRY(sizes, moe::weight_sizes(layout));
  symm::Rank& on = rank(r);
  const u32 seed = 7 + r + 1000 * layout.experts;  // others of shared experts
  k.pattern = case_.fp4() ? make_fp4_pattern(seed) : make_pattern(case_.fp8(), seed);
  k.gate_up_scales = make_scales(sizes.gate_up_scales, 1e-4f, 3e-4f, 10 + seed);
  k.down_scales = make_scales(sizes.down_scales, 1e-4f, 3e-4f, 30 + seed);
  moe::RankWeights m{.rank = r};
  CROSSDOCK_TRY(gate_up, repeat_pattern(on, k.pattern, sizes.gate_up_bytes, deadline));
  CROSSDOCK_TRY(down, repeat_pattern(on, k.pattern, sizes.down_bytes, deadline));
  CROSSDOCK_TRY(gate_up_scales, put_scales(r, k.gate_up_scales, deadline));
  CROSSDOCK_TRY(down_scales, put_scales(r, k.down_scales, deadline));
  m.gate_up = std::move(gate_up);
  m.down = std::move(down);
  m.gate_up_scales = std::move(gate_up_scales);
  m.down_scales = std::move(down_scales);
  m.view = {.layout = layout,
            .gate_up = m.gate_up.address(),
            .gate_up_scales = case_.fp8() ? m.gate_up_scales.address() : nullptr,
            .down = m.down.address(),
            .down_scales = case_.fp8() ? m.down_scales.address() : nullptr};
  return m;
}
// As the layer takes them; of ue8m0 `scales` become powers of two, which are one byte each.
Result<symm::LocalMemory> ChainRig::put_scales(u32 r, std::vector<float>& scales,
                                               Deadline deadline) {
  if (!case_.ue8m0()) return put(rank(r), scales, deadline);
  round_to_powers(scales);
  std::vector<u8> codes;
  for (const float scale : scales)
    codes.push_back(static_cast<u8>(ue8m0_code(scale)));
  return put(rank(r), codes, deadline);
}

Result<> ChainRig::load_tokens(Memory& m, Known& k, Deadline deadline) {
  symm::Rank& on = rank(m.rank);
  const u64 row_bytes = u64{case_.model.hidden} * 2;
  k.row_pattern = make_pattern(false, 70 + m.rank);
  ChainRouting routing = route(case_, m.rank, k.row_pattern);
  std::vector<u8> tokens(case_.tokens * row_bytes);
  for (u64 t = 0; t < case_.tokens; ++t)
    for (u64 i = 0, from = routing.words[t] * row_bytes % k.row_pattern.size(); i < row_bytes;) {
      const u64 bytes = std::min(row_bytes - i, k.row_pattern.size() - from);
      std::memcpy(&tokens[t * row_bytes + i], &k.row_pattern[from], bytes);
      i += bytes;
      from = 0;
    }
  CROSSDOCK_TRY(rows, put(on, tokens, deadline));
  CROSSDOCK_TRY(ids, put(on, routing.ids, deadline));
  CROSSDOCK_TRY(weights, put(on, routing.weights, deadline));
  CROSSDOCK_TRY(output, on.allocate(case_.tokens * row_bytes));
  routings_.push_back(std::move(routing));
  m.rows = std::move(rows);
  m.ids = std::move(ids);
  m.weights = std::move(weights);
  m.output = std::move(output);
  m.input = {.count = case_.tokens,
             .rows = m.rows.address(),
             .ids = m.ids.address(),
             .weights = m.weights.as<float>()};
  return {};
}

Result<> ChainRig::forward(u32 r, std::function<Result<>(moe::LayerStage)> stage_done) {
  const Memory& m = memory_[r];
  return layer_.core().forward(*layer_.weights_of(r),
                               {.input = m.input,
                                .output = {.rows = m.output.address()},
                                .shared = case_.shared_experts() != 0 ? &m.shared : nullptr,
                                .stage_done = std::move(stage_done)});
}

Result<moe::BegunForward> ChainRig::begin(u32 r) {
  return layer_.forward_begin(r, memory_[r].input);
}
Result<> ChainRig::end(u32 r, moe::BegunForward& begun) {
  return layer_.forward_end(begun, {.rows = memory_[r].output.address()});
}

Result<std::vector<std::vector<u8>>> ChainRig::outputs(Deadline deadline) {
  std::vector<std::vector<u8>> all;
  for (const Memory& m : memory_) {
    CROSSDOCK_TRY(one, symm::download(rank(m.rank), m.output.as<u8>(), m.output.bytes(), deadline));
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<float> ChainRig::weight_row(const KnownWeights& of, u64 row, u32 columns) const {
  if (!case_.fp4()) return row_at(of.pattern, row * columns, columns, case_.fp8());
  constexpr u32 kBlock = device::kFp4BlockRows;
  return fp4_row(of.pattern, row / kBlock * (columns / kBlock), static_cast<u32>(row % kBlock),
                 columns);
}

std::vector<double> ChainRig::activations(const KnownWeights& of, u32 expert,
                                          const std::vector<float>& row) const {
  const MoeModel& model = case_.model;
  const u64 first = u64{expert} * 2 * model.inner;
  const auto product = [&](u32 at) {
    const auto weights = weight_row(of, first + at, model.hidden);
    const u64 block = u64{expert} * 2 * model.inner / 128 + at / 256 * 2 + at / 8 % 2;
    return dot(weights, case_.fp8() ? &of.gate_up_scales[block * (model.hidden / 128)] : nullptr,
               row);
  };
  std::vector<double> values(model.inner);
  for (u32 i = 0; i < model.inner; ++i) {
    const double gate = std::min<double>(product(i / 8 * 16 + i % 8), kClamp);
    const double up = std::clamp<double>(product(i / 8 * 16 + 8 + i % 8), -kClamp, kClamp);
    values[i] = gate / (1 + std::exp(-gate)) * up;
  }
  return values;
}

void ChainRig::add_expert(const Choice& c, const std::vector<float>& row,
                          const std::vector<u32>& values, std::vector<double>& out) const {
  const MoeModel& model = case_.model;
  const auto made = activations(c.of, c.expert, row);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto weights = weight_row(c.of, u64{c.expert} * model.hidden + values[i], model.inner);
    const u64 block = u64{c.expert} * model.hidden / 128 + values[i] / 128;
    out[i] +=
        c.factor *
        dot(weights, case_.fp8() ? &c.of.down_scales[block * (model.inner / 128)] : nullptr, made);
  }
}

std::vector<double> ChainRig::exact(u32 r, u32 token, const std::vector<u32>& values) const {
  const MoeModel& model = case_.model;
  const u64 first_value = u64{routings_[r].words[token]} * model.hidden;
  const auto row = row_at(known_[r].row_pattern, first_value, model.hidden, false);
  std::vector<double> out(values.size());
  for (u32 k = 0; k < model.top_k; ++k) {
    const u64 at = u64{token} * model.top_k + k;
    const auto id = static_cast<u32>(routings_[r].ids[at]);
    const auto local = static_cast<u32>(case_.local_experts());
    add_expert({known_[id / local].chosen, id % local, routings_[r].weights[at]}, row, values, out);
  }
  if (case_.shared_experts() != 0) add_expert({known_[r].shared, 0, 1.0}, row, values, out);
  return out;
}

ChainBytes ChainRig::bytes() const {
  const bool copies = layer_.core().row_order(memory_[0].input) == moe::RowOrder::kCopy;
  ChainBytes out = bytes_moved(case_, routings_, copies);
  if (!copies || layer_.core().group().window().copy_blocks == 0) return out;
  // Lists and copies are the dispatch's.
  const auto of = [&](moe::LayerStage stage) -> double& {
    return out.hbm[static_cast<std::size_t>(stage)];
  };
  for (const auto stage : {moe::LayerStage::kGroup, moe::LayerStage::kOrder})
    of(moe::LayerStage::kDispatch) += std::exchange(of(stage), 0);
  return out;
}

Result<double> ChainRig::verify(Deadline deadline) {
  for (u32 r = 0; r < case_.ranks; ++r) {
    const std::vector<u8> nan(std::min<u64>(memory_[r].output.bytes(), 1 << 20), 0xff);
    CROSSDOCK_TRY(poisoned, repeat_pattern(rank(r), nan, memory_[r].output.bytes(), deadline));
    memory_[r].output = std::move(poisoned);
  }
  for (u32 r = 0; r < case_.ranks; ++r)
    CROSSDOCK_CHECK_OK(forward(r));
  CROSSDOCK_CHECK_OK(layer_.synchronize(deadline));
  double wrong = 0, all = 0;
  for (u32 r = 0; r < case_.ranks; ++r) {
    const u32 token = device::mix(r + 5) % case_.tokens;
    std::vector<u32> values;
    for (u32 i = 0; i < kSamples; ++i)
      values.push_back(device::mix(i + 100 * r) % case_.model.hidden);
    const auto want = exact(r, token, values);
    CROSSDOCK_TRY(
        row,
        symm::download(rank(r), memory_[r].output.as<u8>() + u64{token} * case_.model.hidden * 2,
                       u64{case_.model.hidden} * 2, deadline));
    for (u32 i = 0; i < kSamples; ++i) {
      const double got = pattern_value(row, values[i], false);
      wrong += (got - want[i]) * (got - want[i]);
      all += want[i] * want[i];
    }
  }
  const double error = std::sqrt(wrong / all);
  if (error <= (case_.fp8() ? kE4m3Error : kBf16Error)) return error;
  return make_error(Code::kInternal,
                    fmt::format("{}: the result is wrong: relative error {}", case_.name(), error));
}

}  // namespace crossdock::tools::bench
