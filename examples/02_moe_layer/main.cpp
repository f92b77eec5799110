// An expert layer over two ranks in the twin, whose kernels run on the CPU inside synchronize().
// Expert e multiplies by about e + 1: its gates are large, its ups and downs the unit matrix. See
// README.md. SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <crossdock/moe/layer.hpp>

using namespace crossdock;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kWorld = 2, kExperts = 4, kTokens = 4, kHidden = 128;
constexpr float kGate = 8;  // silu(8) is 7.997

std::uint16_t to_bf16(float value) {  // of values that bf16 has
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}
float from_bf16(std::uint16_t code) {
  return std::bit_cast<float>(std::uint32_t{code} << 16);
}

// Of the experts of one rank. The first value of a token is 1, which makes every gate kGate.
Result<moe::Weights> make_weights(std::uint32_t first, std::uint32_t experts) {
  std::vector<float> gate_up(std::size_t{experts} * 2 * kHidden * kHidden);
  std::vector<float> down(std::size_t{experts} * kHidden * kHidden);
  for (std::uint32_t e = 0; e < experts; ++e)
    for (std::uint32_t i = 0; i < kHidden; ++i) {
      gate_up[(std::size_t{e} * 2 * kHidden + i) * kHidden] = kGate;
      gate_up[(std::size_t{e} * 2 * kHidden + kHidden + i) * kHidden + i] = 1;
      down[(std::size_t{e} * kHidden + i) * kHidden + i] =
          static_cast<float>(first + e + 1) / kGate;
    }
  return moe::Weights::prepare({.number = moe::Number::kF32,
                                .experts = experts,
                                .hidden = kHidden,
                                .inter = kHidden,
                                .gate_up = gate_up.data(),
                                .down = down.data()},
                               moe::Format::kBf16);
}

// Tokens, choices and outputs of a rank for two micro-batches, in memory that its kernels reach.
struct Batch {
  std::uint16_t rows[kTokens][kHidden];
  std::uint16_t output[kTokens][kHidden];
  std::int32_t ids[kTokens];

  [[nodiscard]] moe::LayerInput input() const {
    return {.count = kTokens, .rows = rows, .ids = ids};
  }
  // Token t of rank r is made of t + 1, and chooses expert (t + r) % kExperts.
  void fill(std::uint32_t rank) {
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      ids[t] = static_cast<std::int32_t>((t + rank) % kExperts);
      for (std::uint16_t& value : rows[t])
        value = to_bf16(static_cast<float>(t + 1));
      rows[t][0] = to_bf16(1);
    }
    std::memset(output, 0xff, sizeof(output));
  }
  [[nodiscard]] bool right(const char* what, std::uint32_t rank) const {
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      const float want = static_cast<float>((t + 1) * static_cast<std::uint32_t>(ids[t] + 1));
      const float got = from_bf16(output[t][1]);
      std::printf("%s, rank %u: token %u through expert %d: %g became %g\n", what, rank, t, ids[t],
                  static_cast<double>(t + 1), static_cast<double>(got));
      if (!(std::abs(got - want) <= want / 50)) return false;
    }
    return true;
  }
};
struct Memory {
  alignas(16) Batch batches[2];
};

Result<> run() {
  moe::LayerOptions options;
  options.ranks.world = kWorld;
  options.ranks.backend = symm::Backend::kCpu;
  options.experts = kExperts;
  options.top_k = 1;
  options.max_tokens = kTokens;
  options.hidden = options.inter = kHidden;
  options.format = moe::Format::kBf16;
  // A group of our own, to have memory of the ranks from it; on GPUs the caller has memory.
  ep::GroupOptions made{.ranks = options.ranks, .ep = moe::group_options(options)};
  made.ep.user_bytes = sizeof(Memory);
  CROSSDOCK_TRY(group, ep::Group::create(made));
  CROSSDOCK_TRY(layer, moe::Layer::create(group, options, Deadline::in(60s)));

  Memory* memory[kWorld];
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    const moe::WeightLayout layout = layer.weight_layout(rank);
    CROSSDOCK_TRY(weights, make_weights(rank * layout.experts, layout.experts));
    CROSSDOCK_CHECK_OK(layer.load(rank, weights.view(), Deadline::in(60s)));
    CROSSDOCK_TRY(bytes, group.user_memory(rank));
    memory[rank] = reinterpret_cast<Memory*>(bytes.data());
    for (Batch& batch : memory[rank]->batches)
      batch.fill(rank);
  }

  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    Batch& batch = memory[rank]->batches[0];
    CROSSDOCK_CHECK_OK(layer.forward(rank, batch.input(), {.rows = batch.output}));
  }
  CROSSDOCK_CHECK_OK(layer.synchronize(Deadline::in(60s)));
  for (std::uint32_t rank = 0; rank < kWorld; ++rank)
    if (!memory[rank]->batches[0].right("whole", rank))
      return make_error(Code::kInternal, "a forward gave something else");

  std::vector<moe::BegunForward> begun;
  for (std::uint32_t half = 0; half < 2; ++half)
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      Batch& batch = memory[rank]->batches[half];
      batch.fill(rank);
      CROSSDOCK_TRY(one, layer.forward_begin(rank, batch.input()));
      begun.push_back(std::move(one));
    }
  for (std::uint32_t i = 0; i < begun.size(); ++i)
    CROSSDOCK_CHECK_OK(
        layer.forward_end(begun[i], {.rows = memory[i % kWorld]->batches[i / kWorld].output}));
  CROSSDOCK_CHECK_OK(layer.synchronize(Deadline::in(60s)));
  for (std::uint32_t rank = 0; rank < kWorld; ++rank)
    for (const Batch& batch : memory[rank]->batches)
      if (!batch.right("halves", rank))
        return make_error(Code::kInternal, "halves gave something else");
  return {};
}

}  // namespace

int main() {
  const auto result = run();
  if (result.ok()) return 0;
  std::fprintf(stderr, "%s\n", result.error().describe().c_str());
  return 1;
}
