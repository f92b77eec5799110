// What this process uses up: descriptors, threads, mappings, memory; to see that nothing grows.
// Reads /proc/self. No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

// First in a test that takes all descriptors: UBSan looks at objects through a pipe, and where it
// can open none it takes them for broken.
#ifdef CROSSDOCK_SANITIZE_UNDEFINED
#define CROSSDOCK_SKIP_WITHOUT_DESCRIPTORS() GTEST_SKIP() << "UBSan itself needs descriptors"
#else
#define CROSSDOCK_SKIP_WITHOUT_DESCRIPTORS() static_cast<void>(0)
#endif

namespace crossdock::testing {

inline std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder))
    ++count;
  return count;
}
inline std::size_t open_descriptors() {
  return entries_of("/proc/self/fd");
}
inline std::size_t open_sockets() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own descriptor, or one of another thread
    count += std::filesystem::read_symlink(entry.path(), gone).string().starts_with("socket:");
  }
  return count;
}
inline std::size_t running_threads() {
  return entries_of("/proc/self/task");
}
// Lines of /proc/self/maps that hold `needle`; all of them when it is empty.
inline std::size_t mappings_of(std::string_view needle) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find(needle) != std::string::npos;
  return count;
}
inline std::size_t resident_kib() {
  std::ifstream status("/proc/self/status");
  std::size_t kib = 0;
  for (std::string line; std::getline(status, line);)
    (void)std::sscanf(line.c_str(), "VmRSS: %zu kB", &kib);
  return kib;
}

struct ProcessUse {
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  std::size_t mappings = 0;
  std::size_t resident_kib = 0;
};
inline ProcessUse process_use() {
  return {open_descriptors(), running_threads(), mappings_of(""), resident_kib()};
}

}  // namespace crossdock::testing
