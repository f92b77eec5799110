// Data of `crossdock bench moe` and the comparison of results with the product in fp64. Large
// matrices repeat a random pattern of odd length, so that the host knows every value. See moe.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <random>

#include <crossdock/layout/fp4_weights.cuh>
#include <crossdock/layout/probe.cuh>
#include <crossdock/ptx/minifloat.cuh>

#include "bench/moe.hpp"
#include "cuda/memory.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr u64 kPatternBytes = 16'000'016;  // no multiple of a row or of an expert's weights
constexpr u64 kPatternBlocks = 1847;       // of fp4: a prime, no multiple of a row of blocks
constexpr u32 kSamples = 1024;
constexpr u32 kAlignment = 128;
// Of samples: rounding to bf16 alone gives 1.7e-3, quantising to e4m3 2.6e-2.
constexpr double kBf16Error = 3e-3;
constexpr double kE4m3Error = 4e-2;

template <class T>
Result<symm::LocalMemory> put(symm::Rank& rank, const std::vector<T>& values, Deadline deadline) {
  CROSSDOCK_TRY(memory, rank.allocate(std::max<u64>(values.size() * sizeof(T), 16)));
  CROSSDOCK_CHECK_OK(symm::upload(rank, memory.template as<T>(), values, deadline));
  return memory;
}

// The number of a code of e2m1.
float e2m1_value(u32 code) {
  return std::bit_cast<float>(device::minifloat::decode(device::minifloat::kE2m1, code));
}

}  // namespace

std::vector<u8> make_fp4_pattern(u32 seed) {
  std::mt19937 random(seed);
  std::vector<u8> pattern(kPatternBlocks * device::kFp4BlockBytes);
  for (u64 i = 0; i < pattern.size(); ++i) {
    const bool code = i % device::kFp4BlockBytes < device::kFp4CodeBytes;
    pattern[i] = static_cast<u8>(code ? random() & 0xff : random() % device::kFp4Shifts * 8);
  }
  return pattern;
}

std::vector<float> fp4_row(const std::vector<u8>& pattern, u64 first_block, u32 row, u32 count) {
  static const auto numbers = [] {
    std::array<float, 16> all{};
    for (u32 code = 0; code < 16; ++code)
      all[code] = e2m1_value(code);
    return all;
  }();
  std::vector<float> values(count);
  for (u32 k = 0; k < count; ++k) {
    const u64 number = (first_block + k / device::kFp4BlockRows) % kPatternBlocks;
    const u8* block = &pattern[number * device::kFp4BlockBytes];
    const u32 step = k % device::kFp4BlockRows / device::kFp4Group;
    const u32 in_step = k % device::kFp4Group;
    u32 word;
    std::memcpy(&word, block + device::fp4_word_offset(row, step, in_step % 16 / 4), 4);
    const u32 code = device::fp4_from_word(in_step / 16 * 4 + in_step % 4, word);
    const int shift = block[device::fp4_shift_offset(row, step)] / 8 + device::kFp4SmallestShift;
    values[k] = numbers[code] * std::bit_cast<float>(static_cast<u32>(127 + shift) << 23);
  }
  return values;
}

u32 ue8m0_code(float scale) {
  return device::minifloat::encode_ue8m0(std::bit_cast<u32>(scale));
}
void round_to_powers(std::vector<float>& scales) {
  for (float& scale : scales)
    scale = std::bit_cast<float>(device::minifloat::decode_ue8m0(ue8m0_code(scale)));
}

// Codes of a normal distribution that fills the format, as quantised tensors do.
std::vector<u8> make_pattern(bool fp8, u32 seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, fp8 ? 110.0f : 1.0f);
  std::vector<std::uint16_t> codes(1 << 16);
  for (std::uint16_t& code : codes) {
    const u32 bits = std::bit_cast<u32>(normal(random));
    code =
        static_cast<std::uint16_t>(fp8 ? device::minifloat::encode(device::minifloat::kE4m3, bits)
                                       : device::minifloat::encode_bf16(bits));
  }
  const u32 width = fp8 ? 1 : 2;
  std::vector<u8> pattern(kPatternBytes);
  for (u64 i = 0; i < kPatternBytes / width; ++i)
    std::memcpy(&pattern[i * width], &codes[random() & 0xffff], width);
  return pattern;
}

std::vector<float> make_scales(u64 count, float low, float high, u32 seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> scales(count);
  for (float& s : scales)
    s = uniform(random);
  return scales;
}

float pattern_value(const std::vector<u8>& bytes, u64 index, bool fp8) {
  if (fp8)
    return std::bit_cast<float>(
        device::minifloat::decode(device::minifloat::kE4m3, bytes[index % bytes.size()]));
  std::uint16_t code;
  std::memcpy(&code, &bytes[index * 2 % bytes.size()], 2);
  return std::bit_cast<float>(u32{code} << 16);
}

Result<symm::LocalMemory> repeat_pattern(symm::Rank& rank, const std::vector<u8>& pattern,
                                         u64 bytes, Deadline deadline) {
  CROSSDOCK_TRY(memory, rank.allocate(bytes));
  u64 done = std::min<u64>(bytes, pattern.size());
  CROSSDOCK_CHECK_OK(rank.write(memory.address(), pattern.data(), done, deadline));
  while (done < bytes) {
    const u64 more = std::min(done, bytes - done);
    CROSSDOCK_CHECK_OK(rank.write(memory.as<u8>() + done, memory.address(), more, deadline));
    done += more;
  }
  return memory;
}

std::string MoeCase::name() const {
  return fmt::format("{}_{}{}_{}{}_{}{}", product.model, product.layer, swiglu ? "_swiglu" : "",
                     fp4()   ? "fp4"
                     : fp8() ? "fp8"
                             : "bf16",
                     ue8m0() ? "_ue8m0" : "", rows, layout == "contiguous" ? "" : "_" + layout);
}

Result<MoeRig> MoeRig::create(moe::Gemm& gemm, const MoeCase& c, Deadline deadline) {
  MoeRig rig(gemm, c);
  CROSSDOCK_CHECK_OK(rig.load(deadline));
  return rig;
}

u32 MoeRig::input_row(u32 place) const {
  return case_.layout == "gather" ? device::mix(place) % call_.input.count : place;
}

Result<> MoeRig::load(Deadline deadline) {
  const MoeProduct& p = case_.product;
  const bool masked = case_.layout == "masked", gather = case_.layout == "gather";
  const u32 stride = masked ? case_.rows : device::round_up(case_.rows, kAlignment);
  places_ = p.experts * stride;
  const u32 rows = gather ? std::max(places_ / 2, 4u) : places_;
  const u32 columns = case_.swiglu ? p.n / 2 : p.n;
  const bool quantised = case_.swiglu && case_.fp8();
  pattern_ = make_pattern(case_.fp8(), 7);
  const u64 width = case_.fp8() ? 1 : 2;
  CROSSDOCK_TRY(input, repeat_pattern(rank(), pattern_, u64{rows} * p.k * width, deadline));
  if (case_.fp4()) fp4_pattern_ = make_fp4_pattern(11);
  CROSSDOCK_TRY(weights, repeat_pattern(rank(), case_.fp4() ? fp4_pattern_ : pattern_,
                                        static_cast<u64>(case_.weight_bytes()), deadline));
  std::vector<u32> offsets, counts(p.experts, case_.rows);
  for (u32 e = 0; e <= p.experts; ++e)
    offsets.push_back(e * stride);
  call_.input.count = rows;
  std::vector<std::int32_t> list;
  for (u32 place = 0; place < places_; ++place)
    list.push_back(static_cast<std::int32_t>(input_row(place)));
  const u32 scale_columns = device::round_up(rows, 4u);
  if (case_.fp8()) {
    input_scales_ = make_scales(u64{p.k} / 128 * scale_columns, 0.002f, 0.02f, 1);
    weight_scales_ = make_scales(u64{p.experts} * (p.n / 128) * (p.k / 128), 1e-4f, 3e-4f, 2);
  }
  if (case_.ue8m0())
    for (std::vector<float>* scales : {&input_scales_, &weight_scales_})
      round_to_powers(*scales);
  CROSSDOCK_TRY(input_scales, put_scales(input_scales_, scale_columns, deadline));
  CROSSDOCK_TRY(weight_scales, put_scales(weight_scales_, 0, deadline));
  CROSSDOCK_TRY(offset_memory, put(rank(), offsets, deadline));
  CROSSDOCK_TRY(count_memory, put(rank(), counts, deadline));
  CROSSDOCK_TRY(list_memory, put(rank(), list, deadline));
  CROSSDOCK_TRY(output, rank().allocate(u64{places_} * columns * (quantised ? 1 : 2)));
  CROSSDOCK_TRY(output_scales, rank().allocate(u64{places_} * columns / 128 * sizeof(float) + 16));
  input_ = std::move(input);
  weights_ = std::move(weights);
  input_scale_memory_ = std::move(input_scales);
  weight_scale_memory_ = std::move(weight_scales);
  offsets_ = std::move(offset_memory);
  counts_ = std::move(count_memory);
  list_ = std::move(list_memory);
  output_ = std::move(output);
  output_scales_ = std::move(output_scales);
  describe(scale_columns);
  return gemm_->prepare(call_, deadline);
}

// Bytes one after the other where `columns` is 0, else those of four rows in a word.
Result<symm::LocalMemory> MoeRig::put_scales(const std::vector<float>& scales, u64 columns,
                                             Deadline deadline) {
  if (!case_.ue8m0()) return put(rank(), scales, deadline);
  const u64 rows = columns == 0 ? 0 : scales.size() / columns;
  std::vector<u8> bytes(columns == 0 ? scales.size() : (rows + 3) / 4 * columns * 4);
  for (u64 i = 0; i < scales.size(); ++i) {
    const u64 row = columns == 0 ? 0 : i / columns;
    const u64 at = columns == 0 ? i : (row / 4 * columns + i % columns) * 4 + row % 4;
    bytes[at] = static_cast<u8>(ue8m0_code(scales[i]));
  }
  return put(rank(), bytes, deadline);
}

// The call over what has been loaded.
void MoeRig::describe(u32 scale_columns) {
  const MoeProduct& p = case_.product;
  const bool masked = case_.layout == "masked", gather = case_.layout == "gather";
  const bool quantised = case_.swiglu && case_.fp8();
  call_.weights = {.format = case_.format,
                   .rows = weights_.address(),
                   .scales = case_.fp8() ? weight_scale_memory_.address() : nullptr,
                   .experts = p.experts,
                   .n = p.n,
                   .k = p.k};
  call_.input.rows = input_.address();
  call_.input.scales = case_.fp8() ? input_scale_memory_.address() : nullptr;
  call_.input.scale_columns = case_.fp8() ? scale_columns : 0;
  call_.groups.counts = counts_.as<u32>();
  call_.groups.offsets = masked ? nullptr : offsets_.as<u32>();
  call_.groups.expert_rows = masked ? case_.rows : 0;
  call_.groups.rows = gather ? list_.as<std::int32_t>() : nullptr;
  call_.groups.places = gather ? places_ : 0;
  call_.output = {.format = quantised ? moe::Format::kE4m3 : moe::Format::kBf16,
                  .rows = output_.address(),
                  .scales = quantised ? output_scales_.as<float>() : nullptr};
  if (case_.swiglu) call_.swiglu = moe::Swiglu{.clamp = 10.0f, .fast = true};
  call_.tile = case_.tile;
  if (case_.fp8()) call_.scale_type = case_.scale_type;
  call_.expected_rows = case_.rows;
}

std::vector<float> MoeRig::weights(u32 expert, u32 column) const {
  const MoeProduct& p = case_.product;
  if (case_.fp4()) {
    constexpr u32 kBlock = device::kFp4BlockRows;
    const u64 block = (u64{expert} * (p.n / kBlock) + column / kBlock) * (p.k / kBlock);
    return fp4_row(fp4_pattern_, block, column % kBlock, p.k);
  }
  std::vector<float> values(p.k);
  for (u32 k = 0; k < p.k; ++k)
    values[k] = pattern_value(pattern_, (u64{expert} * p.n + column) * p.k + k, case_.fp8());
  return values;
}

double MoeRig::exact(u32 expert, u32 place, u32 column) const {
  const MoeProduct& p = case_.product;
  const u64 row = input_row(place);
  const u32 block = case_.swiglu ? column / 256 * 2 + column / 8 % 2 : column / 128;
  const std::vector<float> other = weights(expert, column);
  double sum = 0;
  for (u32 group = 0; group < p.k / 128; ++group) {
    double part = 0;
    for (u32 k = group * 128; k < (group + 1) * 128; ++k)
      part += double{pattern_value(pattern_, row * p.k + k, case_.fp8())} * other[k];
    const double scale =
        case_.fp8() ? double{input_scales_[group * call_.input.scale_columns + row]} *
                          weight_scales_[(u64{expert} * (p.n / 128) + block) * (p.k / 128) + group]
                    : 1.0;
    sum += part * scale;
  }
  return sum;
}

Result<float> MoeRig::output_scale(u32 place, u32 group, Deadline deadline) {
  if (case_.ue8m0()) {
    const u64 at = (u64{group} / 4 * places_ + place) * 4 + group % 4;
    CROSSDOCK_TRY(code, symm::download(rank(), output_scales_.as<u8>() + at, 1, deadline));
    return std::bit_cast<float>(device::minifloat::decode_ue8m0(code[0]));
  }
  CROSSDOCK_TRY(scale,
                symm::download(rank(), output_scales_.as<float>() + u64{group} * places_ + place, 1,
                               deadline));
  return scale[0];
}

Result<double> MoeRig::verify(Deadline deadline) {
  const std::vector<u8> nan(std::min<u64>(output_.bytes(), kPatternBytes), 0xff);
  CROSSDOCK_TRY(poisoned, repeat_pattern(rank(), nan, output_.bytes(), deadline));
  output_ = std::move(poisoned);
  call_.output.rows = output_.address();
  CROSSDOCK_CHECK_OK(gemm_->run(0, call_));
  CROSSDOCK_CHECK_OK(gemm_->synchronize(deadline));
  const u32 columns = case_.swiglu ? case_.product.n / 2 : case_.product.n;
  const u32 stride = places_ / case_.product.experts;
  const bool quantised = call_.output.format == moe::Format::kE4m3;
  const double clamp = case_.swiglu ? call_.swiglu->clamp : 0;
  double wrong = 0, all = 0;
  for (u32 i = 0; i < kSamples; ++i) {
    const u32 expert = device::mix(i) % case_.product.experts;
    const u32 place = expert * stride + device::mix(i + 7777) % case_.rows;
    const u32 column = device::mix(i + 99999) % columns;
    double want;
    if (case_.swiglu) {
      const u32 gate_at = column / 8 * 16 + column % 8;
      const double gate = std::min(exact(expert, place, gate_at), clamp);
      const double up = std::clamp(exact(expert, place, gate_at + 8), -clamp, clamp);
      want = gate / (1 + std::exp(-gate)) * up;
    } else {
      want = exact(expert, place, column);
    }
    const u64 at = u64{place} * columns + column;
    CROSSDOCK_TRY(code, symm::download(rank(), output_.as<u8>() + at * (quantised ? 1 : 2),
                                       quantised ? 1 : 2, deadline));
    double got = pattern_value(code, 0, quantised);
    if (quantised) {
      CROSSDOCK_TRY(scale, output_scale(place, column / 128, deadline));
      got *= scale;
    }
    wrong += (got - want) * (got - want);
    all += want * want;
  }
  const double error = std::sqrt(wrong / all);
  if (error <= (quantised ? kE4m3Error : kBf16Error)) return error;
  return make_error(Code::kInternal,
                    fmt::format("{}: the result is wrong: relative error {} of {} samples",
                                case_.name(), error, kSamples));
}

}  // namespace crossdock::tools::bench
