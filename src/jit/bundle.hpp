// The device sources that travel in the library, and the part of them that one kernel reaches by
// its includes. Immutable, thread-safe. Never reads the file system.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::jit {

struct SourceFile {
  std::string_view path;  // as it is included: "crossdock/kernel/fill.cuh"
  std::string_view content;
};

// Packed at build time from device/ (cmake/embed.cmake), sorted by path; kernels.json comes last.
std::span<const SourceFile> embedded_files() noexcept;

// The list of kernel variants (device/kernels.json).
std::string_view embedded_kernel_list() noexcept;

// `root` and every file of `files` it includes, directly or not, sorted by path. Includes are found
// by their text alone, whatever #if surrounds them: a file too many costs a recompile, one too few
// would reuse stale code. Includes that are not in `files` are not ours and are left out.
Result<std::vector<SourceFile>> reachable_files(std::span<const SourceFile> files,
                                                std::string_view root);

}  // namespace crossdock::jit
