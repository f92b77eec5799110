// Typed copies between the host and memory of a rank (its window or not): the data has arrived when
// they return. No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <type_traits>
#include <vector>

#include "symm/rank.hpp"

namespace crossdock::symm {

template <class T>
Result<> upload(Rank& rank, T* to, std::span<const T> values, Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (values.empty()) return {};
  return rank.write(to, values.data(), values.size_bytes(), deadline);
}
template <class T>
Result<> upload(Rank& rank, T* to, const std::vector<T>& values, Deadline deadline) {
  return upload(rank, to, std::span<const T>(values), deadline);
}

template <class T>
Result<std::vector<T>> download(const Rank& rank, const T* from, std::size_t count,
                                Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> values(count);
  if (count == 0) return values;
  CROSSDOCK_CHECK_OK(rank.read(values.data(), from, count * sizeof(T), deadline));
  return values;
}

}  // namespace crossdock::symm
