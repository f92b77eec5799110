// Medians and percentiles of a handful of measurements.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace crossdock::tools {

// The value below which a share `q` (0 to 1) of `values` lies; 0 for none.
inline double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const auto index = static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index),
                   values.end());
  return values[index];
}

inline double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}

}  // namespace crossdock::tools
