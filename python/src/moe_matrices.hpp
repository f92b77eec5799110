// The matrices of expert layers as Python has them, those of all experts one below the other: plain
// ones from checkpoints, and prepared ones. Borrowed, like Tensor. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>

#include <crossdock/moe/weights.hpp>

#include "tensor.hpp"

namespace crossdock::python {

// None: no scales.
struct Matrices {
  nb::object gate_up, down, gate_up_scales, down_scales;
};
struct FoundMatrices {
  Tensor gate_up, down, gate_up_scales, down_scales;  // without memory: not given
  std::uint32_t experts = 0, hidden = 0, inter = 0;

  [[nodiscard]] std::array<Tensor*, 4> all() {
    return {&gate_up, &down, &gate_up_scales, &down_scales};
  }
};
// The four as a checkpoint has them; `number`: "e2m1" where two values are in a byte, "auto": by
// the type of the arrays. Raises InvalidArgument, naming the array.
struct PlainMatrices {
  FoundMatrices found;
  moe::Number number = moe::Number::kBf16;

  // Where they are now: `found` may have been moved to other memory.
  [[nodiscard]] moe::PlainWeights plain(bool up_first) const;
};
PlainMatrices plain_matrices(const Matrices& given, std::uint32_t experts,
                             const std::string& number);
// The four as Weights has them; `format`: "auto" knows all but e2m1.
struct PreparedMatrices {
  FoundMatrices found;
  moe::WeightsView view;
};
PreparedMatrices prepared_matrices(const Matrices& given, std::uint32_t experts,
                                   std::uint32_t version, const std::string& format);

// Rows and columns of the arrays that have prepared matrices of so many.
struct ArrayShape {
  int64_t rows, columns;
};
ArrayShape prepared_shape(moe::Format format, int64_t rows, int64_t columns);

}  // namespace crossdock::python
