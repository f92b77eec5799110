// Weights of Python: prepared ones, made here on the host, on a rank of a layer, or arrays of the
// caller, which are kept alive. Plain values; changed by nobody once made.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <crossdock/moe/weights.hpp>

#include "array.hpp"

namespace crossdock::python {

struct LayerWeights {
  std::shared_ptr<const void> owner = {};  // of what was made here; null: arrays of the caller
  moe::WeightsView view = {};
  std::optional<moe::WeightReport> report = {};  // of what was made here
  std::vector<nb::object> held = {};
  int device = kHost;
  // The ranks that have made it, and which of them has it; null: none of them.
  const void* ranks = nullptr;
  std::uint32_t rank = 0;
};

}  // namespace crossdock::python
