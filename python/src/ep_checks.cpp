// See ep_checks.hpp. SPDX-License-Identifier: Apache-2.0
#include "ep_checks.hpp"

#include <fmt/format.h>
#include <utility>

#include "errors.hpp"

namespace crossdock::python {

void refuse(std::string text) {
  raise(invalid_argument(std::move(text)));
}

ArrayType shown_as(const Tensor& t) {
  if (t.kind == dlpack::kFloat || t.kind == dlpack::kBfloat) return {t.kind, t.item_bytes};
  return carrier(t.item_bytes);
}

void need_aligned(const char* call, const Tensor& t) {
  if (t.shape[0] == 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (address % 16 != 0 || t.row_stride() % 16 != 0)
    refuse(
        fmt::format("{}: {} begins at {} with a row every {} bytes, but rows must lie on multiples "
                    "of 16 bytes: copy them to an array of their own, padded if need be",
                    call, t.name, t.data, t.row_stride()));
}

void need_bf16_rows(const char* call, const Tensor& t, int64_t count, uint32_t hidden) {
  need_rows(call, t);
  if (!t.is_bf16())
    refuse(fmt::format("{}: {} is {}: it must be bfloat16 (with NumPy also its codes as uint16)",
                       call, t.name, t.describe()));
  if (t.shape[1] != hidden || (count >= 0 && t.shape[0] != count))
    refuse(fmt::format("{}: {} is {}: it must be [{}, {}]", call, t.name, t.describe(),
                       count >= 0 ? std::to_string(count) : "places", hidden));
  need_aligned(call, t);
}

}  // namespace crossdock::python
