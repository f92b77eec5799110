// What an argument has to be: need_...() of tensor.hpp. SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <string>

#include "ep_checks.hpp"
#include "tensor.hpp"

namespace crossdock::python {

void need_device(const char* call, const Tensor& t, uint32_t rank, int device) {
  if (t.device == device) return;
  const auto place = [](int d) {
    return d == kHost ? std::string("the host") : fmt::format("GPU {}", d);
  };
  refuse(fmt::format("{}: {} is on {}, but rank {} runs on {}: move it there first", call, t.name,
                     place(t.device), rank, place(device)));
}

void need_rows(const char* call, const Tensor& t) {
  if (t.dims != 2)
    refuse(fmt::format("{}: {} is {}: it must have two dimensions, [tokens, values]", call, t.name,
                       t.describe()));
  if (t.shape[1] > 1 && t.shape[0] > 0 && t.strides[1] != static_cast<int64_t>(t.item_bytes))
    refuse(
        fmt::format("{}: {} has values {} bytes apart, but those of a row must be contiguous: make "
                    "it contiguous first",
                    call, t.name, t.strides[1]));
  if (t.shape[0] > 1 && t.strides[0] < static_cast<int64_t>(t.row_bytes()))
    refuse(
        fmt::format("{}: {} has a row every {} bytes, but rows of {} bytes may neither overlap nor "
                    "run backwards: make it contiguous first",
                    call, t.name, t.strides[0], t.row_bytes()));
}

void need_matrix(const char* call, const Tensor& t, int64_t count, int64_t columns) {
  if (t.dims != 2 || t.shape[0] != count || t.shape[1] != columns)
    refuse(fmt::format("{}: {} is {}: it must be [{}, {}], a row for each token", call, t.name,
                       t.describe(), count, columns));
  const bool contiguous =
      columns <= 1 || count == 0 || t.strides[1] == static_cast<int64_t>(t.item_bytes);
  if (!contiguous || !t.dense())
    refuse(
        fmt::format("{}: {} has strides of {} and {} bytes, but must be dense: make it contiguous "
                    "first",
                    call, t.name, t.strides[0], t.strides[1]));
}

}  // namespace crossdock::python
