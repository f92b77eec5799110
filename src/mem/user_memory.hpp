// Touches memory that its owner registered and may have unmapped all the same, without dying of it:
// what the kernel copies gives EFAULT where a plain copy gives SIGSEGV. Stateless, any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <sys/uio.h>

namespace crossdock::mem {

// For messages.
inline constexpr std::string_view kNotMapped =
    "the memory is not mapped any more; keep it mapped until its region is released";

struct Moved {
  std::size_t bytes = 0;  // from the front, in place
  int error = 0;          // errno of the rest: EFAULT where nothing is mapped
};

// Spreads `from` over the pieces of `to`, which hold at least as much.
Moved store_bytes(std::span<const iovec> to, std::span<const std::byte> from) noexcept;

// Copies `to.size()` bytes from there.
Moved load_bytes(std::span<std::byte> to, const void* from) noexcept;

// Whether every page of the range can be read, as of now.
bool is_readable(const void* data, std::size_t length) noexcept;

}  // namespace crossdock::mem
