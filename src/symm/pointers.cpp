// See pointers.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/pointers.hpp"

#include <fmt/format.h>

#include "cuda/memory.hpp"

namespace crossdock::symm {

Result<> check_pointer(const Rank& rank, const GivenPointer& given) {
  const cuda::Context* context = rank.device().context();
  if (context == nullptr || given.address == nullptr) return {};
  int ordinal = -1;
  const cuda::Status status = context->driver().cuPointerGetAttribute(
      &ordinal, cuda::PointerAttribute::kDeviceOrdinal, cuda::device_ptr(given.address));
  if (status == cuda::Status::kSuccess && ordinal == context->ordinal()) return {};
  const std::string is = status == cuda::Status::kSuccess ? fmt::format("memory of GPU {}", ordinal)
                                                          : "not memory that the driver knows";
  return invalid_argument(fmt::format("{} {}: {} at {} are {}: rank {} needs them on GPU {}",
                                      given.engine, given.call, given.what, given.address, is,
                                      rank.rank(), context->ordinal()));
}

}  // namespace crossdock::symm
