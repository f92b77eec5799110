// See moe_matrices.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe_matrices.hpp"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <optional>

#include <crossdock/layout/fp4_weights.cuh>

#include "ep_checks.hpp"
#include "errors.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

constexpr const char* kPrepare = "moe weights";
constexpr int64_t kGroup = 128;    // values with one scale, either way
constexpr int64_t kFp4Group = 32;  // of e2m1, along K

// How many rows of a matrix are in a row of its array, and columns in some items of that.
struct Packing {
  int64_t rows = 1, columns = 1, items = 1;

  [[nodiscard]] ArrayShape shape(int64_t of_rows, int64_t of_columns) const {
    return {of_rows / rows, of_columns / columns * items};
  }
};
constexpr Packing kValues{};
constexpr Packing kPairs{.columns = 2};
constexpr Packing kBlocks{
    .rows = kGroup, .columns = kGroup, .items = crossdock::device::kFp4BlockBytes};

// How scales come: one for so many rows and columns.
struct Scales {
  int64_t rows = kGroup, columns = kGroup;
  bool f32 = true, bytes = false;
};

Tensor matrix_of(const char* name, nb::handle object, std::optional<ArrayShape> shape) {
  const Tensor t = tensor_of(object, kPrepare, name);
  if (t.dims != 2 || (shape && (t.shape[0] != shape->rows || t.shape[1] != shape->columns)))
    refuse(fmt::format("{}: {} of all experts is {}: it must be [{}, {}]", kPrepare, name,
                       t.describe(), shape ? std::to_string(shape->rows) : "experts * rows",
                       shape ? std::to_string(shape->columns) : "columns"));
  need_matrix(kPrepare, t, t.shape[0], t.shape[1]);
  return t;
}
uint32_t columns_of(const Tensor& t, const Packing& packing) {
  if (t.shape[1] % packing.items != 0)
    refuse(fmt::format("{}: {} of all experts is {}: in e2m1 its rows are blocks of {} bytes",
                       kPrepare, t.name, t.describe(), packing.items));
  return static_cast<uint32_t>(t.shape[1] / packing.items * packing.columns);
}
Tensor scales_of(const char* name, nb::handle object, int64_t rows, int64_t columns,
                 const Scales& kind) {
  if (object.is_none()) return {};
  const Tensor t = matrix_of(name, object, ArrayShape{rows / kind.rows, columns / kind.columns});
  if ((kind.f32 && t.is(dlpack::kFloat, 4)) || (kind.bytes && t.is_byte())) return t;
  const char* const types = kind.f32 && kind.bytes ? "float32, or ue8m0 as uint8 or float8_e8m0fnu"
                            : kind.f32             ? "float32"
                                                   : "ue8m0 as uint8 or float8_e8m0fnu";
  refuse(fmt::format("{}: {} is {}: it must be {}", kPrepare, name, t.describe(), types));
}

FoundMatrices find(const Matrices& m, uint32_t experts, const Packing& packing,
                   const Scales& scales) {
  if (experts == 0) refuse("moe weights: experts = 0: give the matrices of at least one expert");
  FoundMatrices f;
  f.experts = experts;
  f.gate_up = matrix_of("gate_up", m.gate_up, {});
  f.down = matrix_of("down", m.down, {});
  f.hidden = columns_of(f.gate_up, packing);
  f.inter = columns_of(f.down, packing);
  const int64_t up_rows = int64_t{experts} * 2 * f.inter, down_rows = int64_t{experts} * f.hidden;
  f.gate_up = matrix_of("gate_up", m.gate_up, packing.shape(up_rows, f.hidden));
  f.down = matrix_of("down", m.down, packing.shape(down_rows, f.inter));
  f.gate_up_scales = scales_of("gate_up_scales", m.gate_up_scales, up_rows, f.hidden, scales);
  f.down_scales = scales_of("down_scales", m.down_scales, down_rows, f.inter, scales);
  return f;
}

moe::Number number_of(const Tensor& t) {
  if (t.is(dlpack::kFloat, 4)) return moe::Number::kF32;
  if (t.is_bf16()) return moe::Number::kBf16;
  if (t.is(dlpack::kFloat4E2m1fnX2, 1)) return moe::Number::kE2m1;
  const bool codes = t.framework != Framework::kTorch && t.is(dlpack::kUint, 1);
  if (codes || t.is(dlpack::kFloat8E4m3fn, 1)) return moe::Number::kE4m3;
  refuse(
      fmt::format("{}: {} is {}: it must be float32, bfloat16, float8_e4m3fn (with NumPy also "
                  "codes, as uint16 and uint8), or bytes of two e2m1 with number = \"e2m1\"",
                  kPrepare, t.name, t.describe()));
}
moe::Number number_of(const Tensor& t, const std::string& name) {
  if (name == "auto") return number_of(t);
  if (name != "e2m1")
    refuse(fmt::format("{}: number = {} must be one of \"auto\", \"e2m1\"", kPrepare, name));
  if (t.is_byte() || t.is(dlpack::kFloat4E2m1fnX2, 1)) return moe::Number::kE2m1;
  refuse(fmt::format("{}: {} is {}: in e2m1 it is uint8 or float4_e2m1fn_x2, two values in a byte",
                     kPrepare, t.name, t.describe()));
}

// Of prepared matrices.
moe::Format format_of_prepared(const Tensor& t, const std::string& name) {
  if (name != "auto") {
    const moe::Format format = format_of(nb::str(name.c_str()));
    const bool bytes = t.is_byte() || t.is(dlpack::kFloat8E4m3fn, 1);
    if (format == moe::Format::kBf16 ? t.is_bf16() : bytes) return format;
    refuse(fmt::format("{}: gate_up is {}, which is not {}", kPrepare, t.describe(), name));
  }
  const moe::Number number = number_of(t);
  if (number == moe::Number::kBf16) return moe::Format::kBf16;
  if (number == moe::Number::kE4m3) return moe::Format::kE4m3;
  refuse(
      fmt::format("{}: gate_up is {}: prepared weights are bfloat16, float8_e4m3fn, or bytes "
                  "with format = \"e2m1\"",
                  kPrepare, t.describe()));
}

}  // namespace

moe::PlainWeights PlainMatrices::plain(bool up_first) const {
  return {.number = number,
          .experts = found.experts,
          .hidden = found.hidden,
          .inter = found.inter,
          .gate_up = found.gate_up.data,
          .up_first = up_first,
          .down = found.down.data,
          .gate_up_scales = found.gate_up_scales.data,
          .down_scales = found.down_scales.data};
}

PlainMatrices plain_matrices(const Matrices& given, uint32_t experts, const std::string& number) {
  PlainMatrices out;
  const Tensor gate_up = matrix_of("gate_up", given.gate_up, {});
  out.number = number_of(gate_up, number);
  const Tensor down = matrix_of("down", given.down, {});
  if (number_of(down, number) != out.number)
    refuse(fmt::format("{}: gate_up is {} and down is {}: both must be of one type", kPrepare,
                       gate_up.describe(), down.describe()));
  const bool fp4 = out.number == moe::Number::kE2m1;
  const Scales of_fp4{.rows = 1, .columns = kFp4Group, .f32 = false, .bytes = true};
  out.found = find(given, experts, fp4 ? kPairs : kValues, fp4 ? of_fp4 : Scales{});
  return out;
}

PreparedMatrices prepared_matrices(const Matrices& given, uint32_t experts, uint32_t version,
                                   const std::string& name) {
  PreparedMatrices out;
  const moe::Format format = format_of_prepared(matrix_of("gate_up", given.gate_up, {}), name);
  FoundMatrices& f = out.found;
  f = find(given, experts, format == moe::Format::kE2m1 ? kBlocks : kValues, {.bytes = true});
  const bool same = f.gate_up.kind == f.down.kind && f.gate_up.item_bytes == f.down.item_bytes;
  const bool scales = f.gate_up_scales.data == nullptr || f.down_scales.data == nullptr ||
                      f.gate_up_scales.item_bytes == f.down_scales.item_bytes;
  if (!same || !scales)
    refuse(fmt::format("{}: {} is {}: both matrices, and both scales, must be of one type",
                       kPrepare, same ? "down_scales" : "down",
                       same ? f.down_scales.describe() : f.down.describe()));
  const bool bytes = f.gate_up_scales.data != nullptr && f.gate_up_scales.item_bytes == 1;
  out.view = {.layout = {.version = version,
                         .format = format,
                         .experts = experts,
                         .hidden = f.hidden,
                         .inter = f.inter,
                         .scales = bytes ? moe::ScaleType::kUe8m0 : moe::ScaleType::kF32},
              .gate_up = f.gate_up.data,
              .gate_up_scales = f.gate_up_scales.data,
              .down = f.down.data,
              .down_scales = f.down_scales.data};
  return out;
}

ArrayShape prepared_shape(moe::Format format, int64_t rows, int64_t columns) {
  return (format == moe::Format::kE2m1 ? kBlocks : kValues).shape(rows, columns);
}

}  // namespace crossdock::python
