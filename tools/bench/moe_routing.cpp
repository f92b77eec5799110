// Choices of `crossdock bench moe --chain`, and what they make the stages move. Drawn: experts as
// they come, evenly or by a Zipf law over an order that all ranks share. By a gate: words of a
// vocabulary, drawn evenly or by a Zipf law as in texts, become hidden states; a matrix of random
// numbers makes a logit for each expert of them, and the largest logits are the choices.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <unordered_map>

#include "bench/moe_chain.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr u32 kWords = 32768;
constexpr double kOfAll = 4294967296.0;  // numbers that mt19937 makes

// Numbers below `count`, the n-th with a weight of 1 or 1 / (n + 1).
class Draw {
 public:
  Draw(u32 count, bool zipf) {
    double sum = 0;
    for (u32 n = 0; n < count; ++n)
      cumulative_.push_back(sum += zipf ? 1.0 / (n + 1.0) : 1.0);
  }
  u32 operator()(std::mt19937& random) const {
    const double at = cumulative_.back() * static_cast<double>(random()) / kOfAll;
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), at);
    return static_cast<u32>(std::min<std::ptrdiff_t>(
        found - cumulative_.begin(), static_cast<std::ptrdiff_t>(cumulative_.size()) - 1));
  }

 private:
  std::vector<double> cumulative_;
};

// `top_k` different experts of each token.
ChainRouting draw_experts(const ChainCase& c, std::mt19937& random, bool zipf) {
  ChainRouting out;
  const Draw draw(c.model.experts, zipf);
  std::vector<u32> order(c.model.experts);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(99));
  for (u32 t = 0; t < c.tokens; ++t) {
    const auto first = static_cast<std::ptrdiff_t>(out.ids.size());
    while (out.ids.size() < static_cast<std::size_t>(first) + c.model.top_k) {
      const auto id = static_cast<std::int32_t>(order[draw(random)]);
      if (std::find(out.ids.begin() + first, out.ids.end(), id) == out.ids.end())
        out.ids.push_back(id);
    }
    out.words.push_back(t);
    for (u32 k = 0; k < c.model.top_k; ++k)
      out.weights.push_back(static_cast<float>(random() % 1000 + 1) / 4000.0f);
  }
  return out;
}

class Gate {
 public:
  explicit Gate(const ChainCase& c) : case_(c), matrix_(u64{c.model.experts} * c.model.hidden) {
    std::mt19937 random(2024);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(c.model.hidden)));
    for (float& value : matrix_)
      value = normal(random);
  }
  // Experts and their shares of softmax, the largest first; the shares of a token add up to 1.
  [[nodiscard]] std::vector<std::pair<u32, float>> choose(const std::vector<float>& state) const {
    std::vector<std::pair<u32, float>> logits;
    for (u32 e = 0; e < case_.model.experts; ++e) {
      const float* row = &matrix_[u64{e} * case_.model.hidden];
      logits.emplace_back(e, std::inner_product(state.begin(), state.end(), row, 0.0f));
    }
    const auto top = logits.begin() + case_.model.top_k;
    std::partial_sort(logits.begin(), top, logits.end(),
                      [](const auto& a, const auto& b) { return a.second > b.second; });
    logits.erase(top, logits.end());
    const float largest = logits.front().second;
    float sum = 0;
    for (auto& [expert, logit] : logits)
      sum += logit = std::exp(logit - largest);
    for (auto& [expert, share] : logits)
      share /= sum;
    return logits;
  }

 private:
  const ChainCase& case_;
  std::vector<float> matrix_;  // [experts][hidden]
};

ChainRouting ask_gate(const ChainCase& c, std::mt19937& random, bool zipf,
                      const std::vector<u8>& embedding) {
  ChainRouting out;
  const Gate gate(c);
  const Draw draw(kWords, zipf);
  std::unordered_map<u32, std::vector<std::pair<u32, float>>> known;
  for (u32 t = 0; t < c.tokens; ++t) {
    const u32 word = draw(random);
    auto found = known.find(word);
    if (found == known.end()) {
      std::vector<float> state(c.model.hidden);
      for (u32 i = 0; i < c.model.hidden; ++i)
        state[i] = pattern_value(embedding, u64{word} * c.model.hidden + i, false);
      found = known.emplace(word, gate.choose(state)).first;
    }
    out.words.push_back(word);
    for (const auto& [expert, share] : found->second) {
      out.ids.push_back(static_cast<std::int32_t>(expert));
      out.weights.push_back(share);
    }
  }
  return out;
}

// What a rank sends, receives and computes.
struct Counts {
  double places = 0, rows = 0, sent = 0;  // choices and tokens here; tokens to other ranks
};
std::vector<Counts> count(const ChainCase& c, const std::vector<ChainRouting>& of_ranks) {
  std::vector<Counts> out(c.ranks);
  const u64 local = c.local_experts();
  for (u32 r = 0; r < c.ranks; ++r)
    for (u32 t = 0; t < c.tokens; ++t) {
      std::vector<bool> seen(c.ranks, false);
      for (u32 k = 0; k < c.model.top_k; ++k) {
        const u64 id = static_cast<u64>(of_ranks[r].ids[u64{t} * c.model.top_k + k]);
        const u64 owner = id / local;
        out[owner].places += 1;
        if (seen[owner]) continue;
        seen[owner] = true;
        out[owner].rows += 1;
        if (owner != r) out[r].sent += 1;
      }
    }
  return out;
}

}  // namespace

ChainRouting route(const ChainCase& c, u32 rank, const std::vector<u8>& embedding) {
  std::mt19937 random(4321 + rank);
  const bool zipf = c.routing == "zipf" || c.routing == "gate-zipf";
  if (c.routing == "even" || c.routing == "zipf") return draw_experts(c, random, zipf);
  return ask_gate(c, random, zipf, embedding);
}

// The least: each byte once, whatever a cache cannot hold.
ChainBytes bytes_moved(const ChainCase& c, const std::vector<ChainRouting>& of_ranks,
                       bool copies_rows) {
  const double width = c.fp8() ? 1 : 2;
  const double hidden = c.model.hidden, inner = c.model.inner, tokens = c.tokens;
  const double scale = c.fp8() ? (c.ue8m0() ? 1.0 : 4.0) / 128 : 0;  // bytes for each value
  const double row = hidden * (width + scale), activation = inner * (width + scale);
  const double weights = static_cast<double>(c.local_experts()) * hidden * inner * c.weight_width();
  Counts sum, most;
  for (const Counts& n : count(c, of_ranks)) {
    sum.places += n.places / c.ranks;
    sum.rows += n.rows / c.ranks;
    sum.sent += n.sent / c.ranks;
    most.places = std::max(most.places, n.places);
  }
  ChainBytes b;
  b.places = sum.places;
  b.most_places = most.places;
  b.hbm = {tokens * hidden * 2 + sum.rows * row,
           sum.rows * c.model.top_k * 8,
           copies_rows ? (sum.rows + sum.places) * row : 0,
           2 * weights + (copies_rows ? sum.places : sum.rows) * row + sum.places * activation,
           weights + sum.places * (activation + hidden * 2),
           (sum.places + sum.rows) * hidden * 2,
           (sum.rows + tokens) * hidden * 2};
  // Shared experts run while the dispatch travels, and are counted with it.
  if (c.shared_experts() != 0)
    b.hbm[0] += c.shared_experts() * 3 * hidden * inner * c.weight_width() +
                tokens * (hidden * 2 + 2 * row + 2 * activation + hidden * 2);
  b.nvlink = {sum.sent * row, 0, 0, 0, 0, 0, sum.sent * hidden * 2};
  return b;
}

}  // namespace crossdock::tools::bench
