// Tensor maps for kernels of either backend: the same description, encoded by the driver for the
// GPU and by the twin for itself. Stateless, thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core/result.hpp>

#include "cuda/device.hpp"
#include "twin/tensor_map.hpp"

namespace crossdock::symm {

using twin::TensorElement;
using twin::TensorMapOptions;

// For a GPU. kUnsupported when the driver cannot; kInvalidArgument with all values when it refuses
// them (strides and base must be multiples of 16, a box at most 256 a dimension).
Result<device::TensorMap> encode_for_gpu(const cuda::Context& context,
                                         const TensorMapOptions& options);

}  // namespace crossdock::symm
