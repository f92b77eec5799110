// Layer: forwards. See moe_layer.hpp. SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <utility>

#include "ep_checks.hpp"
#include "errors.hpp"
#include "moe_layer.hpp"

namespace crossdock::python {
namespace {

constexpr const char* kForward = "moe forward";

void need_float32(const Tensor& t) {
  if (!t.is(dlpack::kFloat, 4))
    refuse(fmt::format("{}: {} is {}: it must be float32", kForward, t.name, t.describe()));
}

// Of rows in e4m3: f32, or ue8m0 as bytes or as words of four, as the layer was made.
void need_scales(const Tensor& t, const moe::LayerOptions& o, uint32_t count) {
  const int64_t groups = o.hidden / 128, words = (groups + 3) / 4;
  if (o.scales == moe::ScaleType::kF32) {
    need_float32(t);
    need_rows(kForward, t);
    if (t.shape[0] != count || t.shape[1] != groups)
      refuse(fmt::format("{}: scales is {}: it must be [{}, {}], one for 128 values", kForward,
                         t.describe(), count, groups));
    return;
  }
  const bool word = t.is(dlpack::kInt, 4);
  if (!word && !t.is(dlpack::kUint, 1) && !t.is(dlpack::kFloat8E8m0fnu, 1))
    refuse(
        fmt::format("{}: scales is {}: of a layer with scales = \"ue8m0\" they are uint8 or "
                    "float8_e8m0fnu, or int32 with four in each",
                    kForward, t.describe()));
  need_rows(kForward, t);
  if (t.shape[0] != count || t.shape[1] != (word ? words : 4 * words))
    refuse(
        fmt::format("{}: scales is {}: it must be [{}, {}], one for 128 values, padded to a "
                    "multiple of four",
                    kForward, t.describe(), count, word ? words : 4 * words));
}

bool is_e4m3(const Tensor& t) {
  return t.is(dlpack::kFloat8E4m3fn, 1) ||
         (t.framework != Framework::kTorch && t.is(dlpack::kUint, 1));
}

}  // namespace

Half::~Half() {
  if (!begun_) return;  // moved from
  begun_.reset();
  const nb::gil_scoped_acquire acquire;
  Copies copies = let_go();
  if (const auto shared = shared_.lock(); shared != nullptr && shared->twin)
    shared->copies.take_over(std::move(copies));
}

Copies Half::let_go() {
  held_.clear();
  return std::exchange(copies_, {});
}

Tensor Layer::argument(const char* name, nb::handle object, uint32_t rank) const {
  const Tensor t = tensor_of(object, kForward, name);
  need_device(kForward, t, rank, device_of(rank));
  return t;
}

moe::LayerInput Layer::input_of(uint32_t rank, const ForwardArguments& a, Copies& copies,
                                Framework& framework) const {
  const moe::LayerOptions& o = shared_->options;
  const auto& box = shared_->box;
  Tensor rows = argument("rows", a.rows, rank);
  need_rows(kForward, rows);
  const bool quantised = is_e4m3(rows);
  if (!quantised && !rows.is_bf16())
    refuse(
        fmt::format("{}: rows is {}: it must be bfloat16, or float8_e4m3fn with scales (with "
                    "NumPy also their codes, as uint16 and uint8)",
                    kForward, rows.describe()));
  if (rows.shape[1] != o.hidden)
    refuse(fmt::format("{}: rows is {}: it must be [tokens, {}]", kForward, rows.describe(),
                       o.hidden));
  need_aligned(kForward, rows);
  framework = rows.framework;
  moe::LayerInput in{.count = static_cast<uint32_t>(rows.shape[0]),
                     .format = quantised ? moe::Format::kE4m3 : moe::Format::kBf16,
                     .expected_rows = a.expected_rows};
  in.rows = copies.readable(box, rows, rank);
  in.row_stride = rows.row_stride();

  Tensor ids = argument("ids", a.ids, rank);
  if (!ids.is(dlpack::kInt, o.wide_ids ? 8 : 4))
    refuse(
        fmt::format("{}: ids is {}, but the layer was made with wide_ids = {}: convert to {}, "
                    "or make the layer with wide_ids = {}",
                    kForward, ids.describe(), o.wide_ids ? "True" : "False",
                    o.wide_ids ? "int64" : "int32", o.wide_ids ? "False" : "True"));
  need_matrix(kForward, ids, in.count, o.top_k);
  in.ids = copies.readable(box, ids, rank);
  if (!a.weights.is_none()) {
    Tensor weights = argument("weights", a.weights, rank);
    need_float32(weights);
    need_matrix(kForward, weights, in.count, o.top_k);
    in.weights = static_cast<const float*>(copies.readable(box, weights, rank));
  }
  if (!a.shared_weights.is_none()) {
    Tensor shared = argument("shared_weights", a.shared_weights, rank);
    need_float32(shared);
    if (shared.dims != 1 || shared.shape[0] != in.count || !shared.dense())
      refuse(fmt::format("{}: shared_weights is {}: it must be [{}], dense", kForward,
                         shared.describe(), in.count));
    in.shared_weights = static_cast<const float*>(copies.readable(box, shared, rank));
  }
  if (!a.scales.is_none()) {
    Tensor scales = argument("scales", a.scales, rank);
    need_scales(scales, o, in.count);
    in.scales = copies.readable(box, scales, rank);
    in.scale_stride = scales.row_stride();
  }
  return in;
}

moe::LayerOutput Layer::output_of(uint32_t rank, uint32_t tokens, const OutputArguments& a,
                                  Copies& copies) const {
  const Tensor out = argument("out", a.out, rank);
  need_bf16_rows(kForward, out, tokens, shared_->options.hidden);
  // A copy of the twin is dense, memory of the library may be anything.
  moe::LayerOutput to{.rows = copies.writable(shared_->box, out, rank)};
  to.row_stride = to.rows == out.data ? out.row_stride() : 0;
  if (a.residual.is_none()) return to;
  Tensor residual = argument("residual", a.residual, rank);
  need_bf16_rows(kForward, residual, tokens, shared_->options.hidden);
  to.residual = copies.readable(shared_->box, residual, rank);
  to.residual_stride = residual.row_stride();
  return to;
}

void Layer::forward(uint32_t rank, const ForwardArguments& arguments, const OutputArguments& output,
                    nb::handle stream) {
  const auto [layer, lock] = enter(rank);
  Framework framework = Framework::kNone;
  Copies copies;
  const moe::LayerInput in = input_of(rank, arguments, copies, framework);
  const moe::LayerOutput out = output_of(rank, in.count, output, copies);
  const moe::StreamPtr on = stream_of(stream, framework, device_of(rank));
  value_or_raise(launch([&] { return layer->forward(rank, in, out, on); }));
  shared_->framework = framework;
  shared_->copies.take_over(std::move(copies));
}

BegunForward Layer::begin(uint32_t rank, const ForwardArguments& a, nb::handle stream) {
  const auto [layer, lock] = enter(rank);
  BegunForward out;
  Copies copies;
  const moe::LayerInput in = input_of(rank, a, copies, out.framework);
  out.rank = rank;
  out.tokens = in.count;
  out.device = device_of(rank);
  const moe::StreamPtr on = stream_of(stream, out.framework, out.device);
  auto begun = value_or_raise(launch([&] { return layer->forward_begin(rank, in, on); }));
  // The dispatch runs beside the caller's stream: nobody may have this memory until that stream
  // waits for it.
  out.half = keep(shared_->box, rank,
                  Half(std::move(begun), {a.rows, a.ids, a.weights, a.scales, a.shared_weights},
                       std::move(copies), shared_));
  shared_->framework = out.framework;
  return out;
}

void Layer::end(BegunForward& begun, const OutputArguments& output, nb::handle stream) {
  const auto [layer, lock] = enter(begun.rank);
  const auto half = begun.half;
  if (half == nullptr) refuse("moe forward_end: this forward has ended: begin another one");
  Copies copies;
  const moe::LayerOutput out = output_of(begun.rank, begun.tokens, output, copies);
  const moe::StreamPtr on = stream_of(stream, begun.framework, begun.device);
  value_or_raise(launch([&] { return layer->forward_end(half->begun(), out, on); }));
  begun.half.reset();
  shared_->copies.take_over(half->let_go());
  shared_->copies.take_over(std::move(copies));
}

}  // namespace crossdock::python
