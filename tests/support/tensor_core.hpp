// How Hopper's tensor core adds up products of e4m3, for tests on GPUs: the summands of one
// instruction along K, what was summed before among them, are aligned to the largest and cut off
// kAlignedBits below it. So a sum of few large products and many small ones loses more than its
// magnitudes tell. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace crossdock::testing {

inline constexpr int kAlignedBits = 13;  // and the leading one

inline double add_aligned(double sum, std::span<const double> products) {
  int largest = std::numeric_limits<int>::min();
  const auto look = [&](double x) {
    if (x != 0 && std::isfinite(x)) largest = std::max(largest, std::ilogb(x));
  };
  look(sum);
  std::ranges::for_each(products, look);
  if (largest == std::numeric_limits<int>::min()) return sum;
  const double unit = std::ldexp(1.0, largest - kAlignedBits);
  double units = std::trunc(sum / unit);
  for (const double x : products)
    units += std::trunc(x / unit);
  return static_cast<float>(units * unit);
}

}  // namespace crossdock::testing
