// Weights of Python: prepared ones, made here or arrays of the caller, which are kept alive. Plain
// values; changed by nobody once made. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include <crossdock/moe/weights.hpp>

#include "array.hpp"

namespace crossdock::python {

struct LayerWeights {
  std::shared_ptr<const moe::Weights> made;  // null: arrays of the caller
  moe::WeightsView view;
  std::vector<nb::object> held;
  int device = kHost;
};

}  // namespace crossdock::python
