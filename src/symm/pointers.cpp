// See pointers.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/pointers.hpp"

#include <fmt/format.h>
#include <string>
#include <string_view>

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

Error refusal(const Rank& rank, const GivenPointer& given, std::string_view is,
              std::string_view needed) {
  return invalid_argument(fmt::format("{} {}: {} at {} are {}: rank {} needs them {}", given.engine,
                                      given.call, given.what, given.address, is, rank.rank(),
                                      needed));
}

constexpr std::string_view kUnknown = "not memory that the driver knows";

}  // namespace

Result<> check_copied(const Rank& rank, const GivenPointer& given) {
  const cuda::Context* context = rank.device().context();
  if (context == nullptr || given.address == nullptr) return {};
  int ordinal = -1;
  if (context->driver().cuPointerGetAttribute(&ordinal, cuda::PointerAttribute::kDeviceOrdinal,
                                              cuda::device_ptr(given.address)) ==
      cuda::Status::kSuccess)
    return {};
  return refusal(rank, given, kUnknown,
                 fmt::format("on GPU {} or in pinned memory: a copy of other memory of the host "
                             "would make the call wait for the stream",
                             context->ordinal()));
}

Result<> check_pointer(const Rank& rank, const GivenPointer& given) {
  const cuda::Context* context = rank.device().context();
  if (context == nullptr || given.address == nullptr) return {};
  const cuda::DevicePtr address = cuda::device_ptr(given.address);
  int ordinal = -1;
  const cuda::Status status = context->driver().cuPointerGetAttribute(
      &ordinal, cuda::PointerAttribute::kDeviceOrdinal, address);
  if (status == cuda::Status::kSuccess && ordinal == context->ordinal()) return {};
  std::string is(kUnknown);
  if (status == cuda::Status::kSuccess) {
    CROSSDOCK_TRY(info, cuda::query_pointer(context->driver(), address));
    const bool shared = info.managed || info.type == cuda::MemoryType::kHost;
    if (shared && is_reached(*context, address)) return {};
    is = shared ? "memory of the host that this GPU does not reach there"
                : fmt::format("memory of GPU {}", ordinal);
  }
  return refusal(rank, given, is, fmt::format("on GPU {}", context->ordinal()));
}

}  // namespace crossdock::symm
