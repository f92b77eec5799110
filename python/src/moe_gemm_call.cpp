// See moe_gemm_call.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe_gemm_call.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <nanobind/stl/string.h>
#include <optional>
#include <string>

#include <crossdock/layout/fp4_weights.cuh>

#include "ep_checks.hpp"
#include "errors.hpp"
#include "fields.hpp"
#include "moe_gemm_arguments.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

// A number of rows or columns as the library counts them, which refuses what is too many.
uint32_t count_of(int64_t count) {
  return static_cast<uint32_t>(std::min<int64_t>(count, std::numeric_limits<uint32_t>::max()));
}

void need_count(const char* name, int64_t count, int64_t wanted) {
  if (count != wanted)
    refuse(fmt::format("{}: {} has {} numbers: it must have {}", kGemm, name, count, wanted));
}

constexpr int64_t kFp4Block = crossdock::device::kFp4BlockBytes;  // of 128 x 128 weights

moe::Format format_of_rows(const Tensor& t) {
  if (t.is_bf16()) return moe::Format::kBf16;
  if (t.is(dlpack::kFloat8E4m3fn, 1) ||
      (t.framework != Framework::kTorch && t.is(dlpack::kUint, 1)))
    return moe::Format::kE4m3;
  refuse(
      fmt::format("{}: {} is {}: it must be bfloat16 or float8_e4m3fn (with NumPy also codes, as "
                  "uint16 and uint8)",
                  kGemm, t.name, t.describe()));
}

// By column, of `groups` of 128 values; ue8m0 in words of four.
Tensor scale_rows_of(const Tensor& t, moe::ScaleType type, int64_t groups) {
  const bool words = type == moe::ScaleType::kUe8m0;
  const int64_t rows = words ? (groups + 3) / 4 : groups;
  if (!t.is(words ? dlpack::kInt : dlpack::kFloat, 4) || t.dims != 2 || t.shape[0] != rows)
    refuse(fmt::format("{}: {} is {}: it must be {} [{}, columns]", kGemm, t.name, t.describe(),
                       words ? "int32, four ue8m0 in each," : "float32", rows));
  need_rows(kGemm, t);
  return t;
}

void read_weights(moe::GemmCall& call, const Arguments& a, uint32_t experts) {
  Tensor rows = a.need("weights");
  need_matrix(kGemm, rows, rows.shape[0], rows.shape[1]);
  moe::GemmWeights& w = call.weights;
  const std::string name = text_of(a.of("format"));
  w.format = name == "e2m1" ? moe::Format::kE2m1 : format_of_rows(rows);
  if (name != "auto" && format_of(a.of("format")) != w.format)
    refuse(fmt::format("{}: weights is {}, which is not {}", kGemm, rows.describe(), name));
  const bool blocks = w.format == moe::Format::kE2m1;
  if (blocks && (!rows.is_byte() || rows.shape[1] % kFp4Block != 0))
    refuse(fmt::format("{}: weights is {}: in e2m1 its rows are blocks of {} bytes, as uint8",
                       kGemm, rows.describe(), kFp4Block));
  w.experts = experts;
  const int64_t n = blocks ? rows.shape[0] * 128 : rows.shape[0];
  const int64_t k = blocks ? rows.shape[1] / kFp4Block * 128 : rows.shape[1];
  w.n = count_of(n / std::max<int64_t>(experts, 1));
  w.k = count_of(k);
  w.rows = a.read(rows);
  auto scales = a.find("weight_scales");
  if (!scales) return;
  if (!scales->is(dlpack::kFloat, 4) && !scales->is_byte())
    refuse(
        fmt::format("{}: weight_scales is {}: it must be float32, or ue8m0 as uint8 or "
                    "float8_e8m0fnu",
                    kGemm, scales->describe()));
  need_matrix(kGemm, *scales, n / 128, k / 128);
  call.scale_type = scales->is_byte() ? moe::ScaleType::kUe8m0 : moe::ScaleType::kF32;
  w.scales = a.read(*scales);
}
// What such weights multiply.
moe::Format input_format(const moe::GemmCall& call) {
  return call.weights.format == moe::Format::kBf16 ? moe::Format::kBf16 : moe::Format::kE4m3;
}

void read_input(moe::GemmCall& call, const Arguments& a) {
  Tensor rows = a.need("rows");
  need_rows(kGemm, rows);
  if (format_of_rows(rows) != input_format(call) || rows.shape[1] != call.weights.k)
    refuse(fmt::format("{}: rows is {}: it must be {} [rows, {}], as the weights", kGemm,
                       rows.describe(), python::format_name(input_format(call)), call.weights.k));
  need_aligned(kGemm, rows);
  call.input.count = count_of(rows.shape[0]);
  call.input.rows = a.read(rows);
  call.input.row_stride = rows.row_stride();
  auto scales = a.find("scales");
  if (!scales) return;
  *scales = scale_rows_of(*scales, call.scale_type, call.weights.k / 128);
  call.input.scale_columns = static_cast<uint64_t>(scales->shape[1]);
  need_matrix(kGemm, *scales, scales->shape[0], scales->shape[1]);
  call.input.scales = a.read(*scales);
}

void read_groups(moe::GemmCall& call, const Arguments& a, uint32_t expert_rows) {
  moe::GemmGroups& g = call.groups;
  int64_t count = 0;
  g.offsets = a.numbers<uint32_t>("offsets", dlpack::kInt, count);
  if (g.offsets != nullptr) need_count("offsets", count, int64_t{call.weights.experts} + 1);
  g.counts = a.numbers<uint32_t>("counts", dlpack::kInt, count);
  if (g.counts != nullptr) need_count("counts", count, call.weights.experts);
  g.rows = a.numbers<int32_t>("places", dlpack::kInt, count);
  if (g.rows != nullptr) g.places = count_of(count);
  g.expert_rows = expert_rows;
}

void read_output(moe::GemmCall& call, const Arguments& a) {
  const int64_t places = call.groups.rows != nullptr ? call.groups.places : call.input.count;
  Tensor out = a.need("out");
  need_rows(kGemm, out);
  const int64_t columns = call.swiglu ? call.weights.n / 2 : call.weights.n;
  if (out.shape[0] != places || out.shape[1] != columns)
    refuse(
        fmt::format("{}: out is {}: it must be [{}, {}]", kGemm, out.describe(), places, columns));
  need_aligned(kGemm, out);
  call.output.format = format_of_rows(out);
  call.output.rows = a.write(out);
  call.output.row_stride = call.output.rows == out.data ? out.row_stride() : 0;
  auto scales = a.find("out_scales");
  if (!scales) return;
  *scales = scale_rows_of(*scales, call.scale_type, columns / 128);
  need_matrix(kGemm, *scales, scales->shape[0], scales->shape[1]);
  call.output.scale_columns = static_cast<uint64_t>(scales->shape[1]);
  call.output.scales = a.write(*scales);
}

// `swiglu` of Python, with clamp and fast; None: a plain product.
void read_swiglu(moe::GemmCall& call, nb::handle swiglu) {
  if (swiglu.is_none()) return;
  call.swiglu.emplace();
  call.swiglu->clamp = real_of(swiglu.attr("clamp"), "clamp");
  call.swiglu->fast = flag_of(swiglu.attr("fast"), "fast");
}

// [experts][n], in the order of the weights' columns.
void read_bias(moe::GemmCall& call, const Arguments& a) {
  auto bias = a.find("bias");
  if (!bias) return;
  need_matrix(kGemm, *bias, call.weights.experts, call.weights.n);
  const bool f32 = bias->is(dlpack::kFloat, 4);
  if (!f32 && !bias->is_bf16())
    refuse(fmt::format("{}: bias is {}: it must be float32 or bfloat16", kGemm, bias->describe()));
  call.bias = moe::Bias{a.read(*bias), f32 ? moe::Number::kF32 : moe::Number::kBf16};
}

}  // namespace

moe::GemmCall gemm_call_of(const GemmArguments& arguments, const std::shared_ptr<GemmBox>& box,
                           Copies& copies, int device) {
  const Arguments a(arguments.call, box, copies, device);
  moe::GemmCall call;
  read_weights(call, a, arguments.experts);
  read_input(call, a);
  read_groups(call, a, arguments.expert_rows);
  read_swiglu(call, a.of("swiglu"));
  read_bias(call, a);
  read_output(call, a);
  int64_t count = 0;
  const float* const weights = a.numbers<float>("row_weights", dlpack::kFloat, count);
  if (weights != nullptr && !call.swiglu)
    refuse("moe gemm: row_weights belong to swiglu: give both, or neither");
  if (weights != nullptr) {
    need_count("row_weights", count,
               call.groups.rows != nullptr ? call.groups.places : call.input.count);
    call.swiglu->row_weights = weights;
  }
  call.tile = tile_of(a.of("tile"));
  call.expected_rows = whole_number<uint32_t>(a.of("expected_rows"), "expected_rows");
  return call;
}

}  // namespace crossdock::python
