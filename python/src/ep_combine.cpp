// Group: combine. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/core.hpp"
#include "ep_checks.hpp"
#include "ep_group.hpp"
#include "errors.hpp"

namespace crossdock::python {

ep::ExpertOutput Group::experts_of(const Handle& handle, const CombineArguments& a) {
  ep::ExpertOutput out;
  const auto need_room = [&](const Tensor& t) {
    const int64_t most = handle.open()->received().capacity;
    if (t.shape[0] > most || !t.dense())
      refuse(
          fmt::format("{}: {} is {}: it must be dense, a row for each that arrived, and at most "
                      "{} can",
                      kCombine, t.name, t.describe(), most));
  };
  if (!a.rows.is_none()) {
    Tensor rows = argument(kCombine, "rows", a.rows, handle.rank);
    need_bf16_rows(kCombine, rows, -1, options_.hidden);
    need_room(rows);
    out.rows = readable(rows, handle.rank);
  }
  if (!a.row_weights.is_none()) {
    Tensor weights = argument(kCombine, "row_weights", a.row_weights, handle.rank);
    if (!weights.is(dlpack::kFloat, 4))
      refuse(
          fmt::format("{}: row_weights is {}: it must be float32", kCombine, weights.describe()));
    need_matrix(kCombine, weights, weights.shape[0], options_.top_k);
    need_room(weights);
    out.weights = static_cast<const float*>(readable(weights, handle.rank));
  }
  return out;
}

void Group::combine(const Handle& handle, const CombineArguments& a, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const uint32_t rank = handle.rank;
  const Tensor out = argument(kCombine, "out", a.out, rank);
  need_bf16_rows(kCombine, out, handle.tokens, options_.hidden);
  if (a.bias.size() > 2)
    refuse(fmt::format("{}: {} biases: there can be two at most", kCombine, a.bias.size()));
  ep::Combined combined{.rows = writable(out, rank), .row_stride = twin_ ? 0 : out.row_stride()};
  for (std::size_t i = 0; i < a.bias.size(); ++i) {
    Tensor bias = argument(kCombine, "bias", a.bias[i], rank);
    need_bf16_rows(kCombine, bias, handle.tokens, options_.hidden);
    combined.bias[i] = readable(bias, rank);
    combined.bias_stride[i] = bias.row_stride();
  }
  if (!a.weights.is_none()) {
    const Tensor weights = argument(kCombine, "weights", a.weights, rank);
    if (!weights.is(dlpack::kFloat, 4))
      refuse(fmt::format("{}: weights is {}: it must be float32", kCombine, weights.describe()));
    need_matrix(kCombine, weights, handle.tokens, options_.top_k);
    combined.weights = static_cast<float*>(writable(weights, rank));
  }
  combined.experts = experts_of(handle, a);
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] {
    return a.receive_only ? box->group().combine_receive(*from, combined, on)
                          : box->group().combine(*from, combined, a.how, on);
  }));
}

}  // namespace crossdock::python
