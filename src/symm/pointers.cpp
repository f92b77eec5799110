// See pointers.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/pointers.hpp"

#include <fmt/format.h>
#include <string>

#include "cuda/memory.hpp"

namespace crossdock::symm {
namespace {

// Pinned and managed memory is mapped for all GPUs of the process, whichever it was made under;
// some of it (registered memory on some machines) at another address, which is not what the kernel
// will be given.
bool is_reached(const cuda::Context& context, cuda::DevicePtr address) {
  const auto guard = context.enter_quietly();
  cuda::DevicePtr seen = 0;
  const cuda::Status status = context.driver().cuPointerGetAttribute(
      &seen, cuda::PointerAttribute::kDevicePointer, address);
  return status == cuda::Status::kSuccess && seen == address;
}

}  // namespace

Result<> check_pointer(const Rank& rank, const GivenPointer& given) {
  const cuda::Context* context = rank.device().context();
  if (context == nullptr || given.address == nullptr) return {};
  const cuda::DevicePtr address = cuda::device_ptr(given.address);
  int ordinal = -1;
  const cuda::Status status = context->driver().cuPointerGetAttribute(
      &ordinal, cuda::PointerAttribute::kDeviceOrdinal, address);
  if (status == cuda::Status::kSuccess && ordinal == context->ordinal()) return {};
  std::string is = "not memory that the driver knows";
  if (status == cuda::Status::kSuccess) {
    CROSSDOCK_TRY(info, cuda::query_pointer(context->driver(), address));
    const bool shared = info.managed || info.type == cuda::MemoryType::kHost;
    if (shared && is_reached(*context, address)) return {};
    is = shared ? "memory of the host that this GPU does not reach there"
                : fmt::format("memory of GPU {}", ordinal);
  }
  return invalid_argument(fmt::format("{} {}: {} at {} are {}: rank {} needs them on GPU {}",
                                      given.engine, given.call, given.what, given.address, is,
                                      rank.rank(), context->ordinal()));
}

}  // namespace crossdock::symm
