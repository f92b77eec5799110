// wgmma: descriptors, layouts, product. See the header.
// SPDX-License-Identifier: Apache-2.0
#include "twin/wgmma_math.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <vector>

#include "twin/numbers.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::twin {

namespace {

using hooks::Element;

constexpr std::uint32_t kRows = 64;            // m64
constexpr std::uint32_t kStepBytes = 32;       // K of one instruction, in bytes
constexpr std::uint32_t kSharedWindow = 1024;  // see hook.cpp: addresses begin behind it
constexpr std::uint32_t kMaxN = 256;

// The fields of a matrix descriptor.
struct Descriptor {
  std::uint32_t start;           // bytes, as a 32-bit shared address
  std::uint32_t leading_stride;  // bytes
  std::uint32_t stride;          // bytes
  std::uint32_t base_offset;
  std::uint32_t swizzle_bytes;  // 16: none, else 32, 64, 128
};

Descriptor decode(std::uint64_t bits) {
  const auto field = [bits](unsigned shift) {
    return static_cast<std::uint32_t>(bits >> shift & 0x3FFF) << 4;
  };
  constexpr std::array<std::uint32_t, 4> kSwizzle{16, 128, 64, 32};
  return {field(0), field(16), field(32), static_cast<std::uint32_t>(bits >> 49 & 7),
          kSwizzle[bits >> 62]};
}

// The XOR that the swizzle applies to address bits 4-6 from bits 7-9 (as many as the width has).
std::uint32_t swizzle(std::uint32_t address, std::uint32_t width) {
  return address ^ (address >> 3 & (width - 1) & ~15u);
}

// Address of the element `line` (row of A, column of B) at byte `k_bytes` of the K step, K-major.
std::uint32_t k_major(const Descriptor& d, std::uint32_t line, std::uint32_t k_bytes) {
  if (d.swizzle_bytes == 16)  // 8x16-byte core matrices
    return d.start + line / 8 * d.stride + k_bytes / 16 * d.leading_stride + line % 8 * 16 +
           k_bytes % 16;
  const std::uint32_t linear = d.start + line / 8 * d.stride + line % 8 * d.swizzle_bytes + k_bytes;
  return swizzle(linear, d.swizzle_bytes);
}

// The same for operands that are contiguous along M or N (16-bit elements); `k` counts elements.
std::uint32_t mn_major(const Descriptor& d, std::uint32_t line, std::uint32_t k) {
  const std::uint32_t bytes = line * 2;
  if (d.swizzle_bytes == 16)
    return d.start + bytes / 16 * d.stride + k / 8 * d.leading_stride + k % 8 * 16 + bytes % 16;
  const std::uint32_t width = d.swizzle_bytes;
  const std::uint32_t linear =
      d.start + bytes / width * d.leading_stride + k / 8 * d.stride + k % 8 * width + bytes % width;
  return swizzle(linear, width);
}

std::uint32_t element_bytes(Element e) {
  return e == Element::kBf16 || e == Element::kF16 ? 2 : 1;
}

class Decoder {
 public:
  Decoder() {
    for (unsigned i = 0; i < 256; ++i) {
      e4m3_[i] = e4m3_to_float(static_cast<std::uint8_t>(i));
      e5m2_[i] = e5m2_to_float(static_cast<std::uint8_t>(i));
    }
  }
  float operator()(Element e, std::uint32_t bits) const {
    switch (e) {
      case Element::kBf16:
        return bf16_to_float(static_cast<std::uint16_t>(bits));
      case Element::kF16:
        return f16_to_float(static_cast<std::uint16_t>(bits));
      case Element::kE4m3:
        return e4m3_[bits & 255];
      case Element::kE5m2:
        return e5m2_[bits & 255];
    }
    return 0;
  }

 private:
  std::array<float, 256> e4m3_{};
  std::array<float, 256> e5m2_{};
};

const Decoder& decoder() {
  static const Decoder instance;
  return instance;
}

struct Operand {
  std::uint64_t descriptor;
  Element element;
  bool mn_major;
  bool negate;
};

std::uint32_t address_of(const Operand& operand, const Descriptor& d, std::uint32_t line,
                         std::uint32_t k) {
  const std::uint32_t bytes = element_bytes(operand.element);
  const std::uint32_t address =
      operand.mn_major ? mn_major(d, line, k) : k_major(d, line, k * bytes);
  return address - kSharedWindow;
}

// out[k * lines + line]
void fetch(const Operand& operand, std::uint32_t lines, const unsigned char* shared,
           std::size_t shared_bytes, float* out) {
  const Descriptor d = decode(operand.descriptor);
  const std::uint32_t bytes = element_bytes(operand.element);
  const std::uint32_t depth = kStepBytes / bytes;
  for (std::uint32_t line = 0; line < lines; ++line)
    for (std::uint32_t k = 0; k < depth; ++k) {
      const std::uint32_t at = address_of(operand, d, line, k);
      float value = std::numeric_limits<float>::quiet_NaN();
      if (at + bytes <= shared_bytes) {
        std::uint32_t bits = 0;
        raw_copy(&bits, shared + at, bytes);
        value = decoder()(operand.element, bits);
      }
      out[k * lines + line] = operand.negate ? -value : value;
    }
}

// A from the registers of the 128 threads, out[k * 64 + row].
void fetch_registers(const MmaOp& mma, float* out) {
  const std::uint32_t bytes = element_bytes(mma.op.a);
  const std::uint32_t per_register = 4 / bytes;
  for (std::uint32_t t = 0; t < 128; ++t)
    for (std::uint32_t r = 0; r < 4; ++r)
      for (std::uint32_t e = 0; e < per_register; ++e) {
        const std::uint32_t row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8;
        const std::uint32_t k = r / 2 * 4 * per_register + t % 4 * per_register + e;
        const std::uint32_t bits = mma.a_registers[t * 4 + r] >> (8 * bytes * e);
        const float value = decoder()(mma.op.a, bits);
        out[k * kRows + row] = mma.op.negate_a ? -value : value;
      }
}

// d[row * n + column] = sum over k of a[k][row] * b[k][column]
#if defined(__x86_64__)
#define CROSSDOCK_TWIN_AVX2 __attribute__((target("avx2,fma"), optimize("O3")))
#else
#define CROSSDOCK_TWIN_AVX2
#endif
template <bool kWide>
inline __attribute__((always_inline)) void multiply_into(const float* a, const float* b,
                                                         std::uint32_t n, std::uint32_t depth,
                                                         float* d) {
  for (std::uint32_t row = 0; row < kRows; ++row) {
    float sum[kMaxN] = {};
    for (std::uint32_t k = 0; k < depth; ++k) {
      const float x = a[k * kRows + row];
      const float* line = b + k * n;
      for (std::uint32_t column = 0; column < n; ++column)
        sum[column] += x * line[column];
    }
    for (std::uint32_t column = 0; column < n; ++column)
      d[row * n + column] = sum[column];
  }
}
CROSSDOCK_TWIN_AVX2 void multiply_wide(const float* a, const float* b, std::uint32_t n,
                                       std::uint32_t depth, float* d) {
  multiply_into<true>(a, b, n, depth, d);
}
void multiply_plain(const float* a, const float* b, std::uint32_t n, std::uint32_t depth,
                    float* d) {
  multiply_into<false>(a, b, n, depth, d);
}
void multiply(const float* a, const float* b, std::uint32_t n, std::uint32_t depth, float* d) {
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (wide) return multiply_wide(a, b, n, depth, d);
#endif
  multiply_plain(a, b, n, depth, d);
}

Operand operand_a(const MmaOp& mma) {
  return {mma.a, mma.op.a, mma.op.transpose_a, mma.op.negate_a};
}
Operand operand_b(const MmaOp& mma) {
  return {mma.b, mma.op.b, mma.op.transpose_b, mma.op.negate_b};
}

std::string check_descriptor(std::uint64_t bits, const char* name) {
  const Descriptor d = decode(bits);
  if (d.base_offset != 0)
    return fmt::format(
        "descriptor of {}: base offset {} is not modelled; align tiles to 1024 bytes", name,
        d.base_offset);
  return {};
}

}  // namespace

std::string check_mma(const hooks::Wgmma& op, std::uint64_t a, std::uint64_t b,
                      bool a_in_registers) {
  if (op.n % 8 != 0 || op.n < 8 || op.n > kMaxN)
    return fmt::format("n = {} must be a multiple of 8 from 8 to 256", op.n);
  if (element_bytes(op.a) != element_bytes(op.b)) return "operands of different widths";
  if (element_bytes(op.a) == 2 && op.a != op.b) return "16-bit operands of different types";
  if ((op.transpose_a || op.transpose_b) && element_bytes(op.a) == 1)
    return "8-bit operands must be K-major";
  if (op.transpose_a && a_in_registers) return "an operand in registers cannot be transposed";
  if (!a_in_registers)
    if (std::string wrong = check_descriptor(a, "A"); !wrong.empty()) return wrong;
  return check_descriptor(b, "B");
}

static OperandRange operand_range(const MmaOp& mma, bool is_a) {
  const Operand operand = is_a ? operand_a(mma) : operand_b(mma);
  const std::uint32_t lines = is_a ? kRows : mma.op.n;
  const Descriptor d = decode(operand.descriptor);
  const std::uint32_t bytes = element_bytes(operand.element);
  const std::uint32_t chunk = 16 / bytes;
  std::uint32_t low = ~0u;
  std::uint32_t high = 0;
  const auto visit = [&](std::uint32_t line, std::uint32_t k) {
    const std::uint32_t at = address_of(operand, d, line, k) & ~15u;
    low = std::min(low, at);
    high = std::max(high, at + 16);
  };
  const std::uint32_t depth = kStepBytes / bytes;
  for (std::uint32_t line = 0; line < lines; line += operand.mn_major ? chunk : 1)
    for (std::uint32_t k = 0; k < depth; k += operand.mn_major ? 1 : chunk)
      visit(line, k);
  return {low, high - low};
}

OperandRanges operand_ranges(const MmaOp& mma) {
  OperandRanges ranges;
  if (!mma.a_in_registers) ranges.range[ranges.count++] = operand_range(mma, true);
  ranges.range[ranges.count++] = operand_range(mma, false);
  return ranges;
}

void execute_mma(MmaOp& mma, const unsigned char* shared, std::size_t shared_bytes) {
  const std::uint32_t n = mma.op.n;
  const std::uint32_t depth = kStepBytes / element_bytes(mma.op.a);
  thread_local std::vector<float> a;
  thread_local std::vector<float> b;
  thread_local std::vector<float> d;
  a.resize(std::size_t{kStepBytes} * kRows);
  b.resize(std::size_t{kStepBytes} * kMaxN);
  d.resize(std::size_t{kRows} * kMaxN);
  if (mma.a_in_registers)
    fetch_registers(mma, a.data());
  else
    fetch(operand_a(mma), kRows, shared, shared_bytes, a.data());
  fetch(operand_b(mma), n, shared, shared_bytes, b.data());
  multiply(a.data(), b.data(), n, depth, d.data());
  const std::uint32_t registers = n / 2;
  for (std::uint32_t t = 0; t < 128; ++t) {
    float* out = mma.accumulators[t];
    const float* input = mma.chained[t] ? out : mma.inputs.data() + t * registers;
    for (std::uint32_t i = 0; i < registers; ++i) {
      const std::uint32_t row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      const std::uint32_t column = i / 4 * 8 + t % 4 * 2 + i % 2;
      out[i] = (mma.op.accumulate ? input[i] : 0.0f) + d[row * n + column];
    }
  }
}

}  // namespace crossdock::twin
