// LayerCore: biases of experts, from the order of a checkpoint to that of the prepared weights. See
// layer_core.hpp. SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>

#include "moe/layer_core.hpp"

namespace crossdock::moe {
namespace {

constexpr u32 kTurn = 8;  // columns of gate, then of up

// One of the two, [experts][columns].
struct Plain {
  const char* name;
  const u8* values;
  Number number;
  u32 experts, columns;

  [[nodiscard]] u64 width() const { return number == Number::kF32 ? 4 : 2; }
  [[nodiscard]] float at(u64 index) const {
    u32 bits = 0;
    std::memcpy(&bits, values + index * width(), width());
    return std::bit_cast<float>(number == Number::kF32 ? bits : bits << 16);
  }
};

Result<> check_values(const Plain& plain) {
  for (u64 i = 0; i < u64{plain.experts} * plain.columns; ++i)
    if (!std::isfinite(plain.at(i)))
      return invalid_argument(
          fmt::format("moe bias: the value {} of {} at expert {}, column {} must be finite: repair "
                      "the checkpoint",
                      plain.at(i), plain.name, i / plain.columns, i % plain.columns));
  return {};
}

// Where a column of gate and up goes: both by turns in groups of 8.
u32 column_to(u32 column, u32 inter, bool up_first) {
  const u32 i = column % inter;
  const bool up = (column >= inter) != up_first;
  return i / kTurn * 2 * kTurn + (up ? kTurn : 0) + i % kTurn;
}

std::vector<u8> interleave(const Plain& plain, bool up_first) {
  std::vector<u8> out(u64{plain.experts} * plain.columns * plain.width());
  for (u32 e = 0; e < plain.experts; ++e)
    for (u32 c = 0; c < plain.columns; ++c) {
      const u64 row = u64{e} * plain.columns;
      std::memcpy(&out[(row + column_to(c, plain.columns / 2, up_first)) * plain.width()],
                  plain.values + (row + c) * plain.width(), plain.width());
    }
  return out;
}

}  // namespace

Result<> LayerCore::copy_bias(RankWeights& weights, const ExpertBias& bias,
                              Deadline deadline) const {
  CROSSDOCK_CHECK_OK(check_loaded(weights, "weights"));
  if (bias.number != Number::kF32 && bias.number != Number::kBf16)
    return invalid_argument(
        fmt::format("moe bias: the number type {} must be f32 ({}) or bf16 ({})",
                    static_cast<unsigned>(bias.number), static_cast<unsigned>(Number::kF32),
                    static_cast<unsigned>(Number::kBf16)));
  const u32 experts = weights.view.layout.experts;
  const Plain gate_up{"gate_up", static_cast<const u8*>(bias.gate_up), bias.number, experts,
                      2 * options_.inter};
  const Plain down{"down", static_cast<const u8*>(bias.down), bias.number, experts,
                   options_.hidden};
  symm::Rank& on = rank(weights.rank);
  const auto copy = [&](const void* from, const Plain& plain) -> Result<symm::LocalMemory> {
    const u64 bytes = u64{experts} * plain.columns * plain.width();
    CROSSDOCK_TRY(memory, on.allocate(bytes));
    CROSSDOCK_CHECK_OK(on.write(memory.address(), from, bytes, deadline));
    return memory;
  };
  symm::LocalMemory of_gate_up, of_down;
  if (gate_up.values != nullptr) {
    CROSSDOCK_CHECK_OK(check_values(gate_up));
    CROSSDOCK_TRY(memory, copy(interleave(gate_up, bias.up_first).data(), gate_up));
    of_gate_up = std::move(memory);
  }
  if (down.values != nullptr) {
    CROSSDOCK_CHECK_OK(check_values(down));
    CROSSDOCK_TRY(memory, copy(down.values, down));
    of_down = std::move(memory);
  }
  // Sums with a bias may take other kernels.
  const auto given = [&](const void* values) {
    return values != nullptr ? std::optional(Bias{values, bias.number}) : std::nullopt;
  };
  CROSSDOCK_CHECK_OK(prepare(deadline, given(bias.gate_up), given(bias.down)));
  weights.bias_number = bias.number;
  weights.gate_up_bias = std::move(of_gate_up);
  weights.down_bias = std::move(of_down);
  return {};
}

}  // namespace crossdock::moe
