// The folder of compiled kernels: one file a kernel, checked when read, written beside its place
// and renamed into it, so that readers of any process see whole files only. Losing it costs
// compilations, nothing else; a folder that cannot be used is no error. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "base/log.hpp"
#include "jit/binary.hpp"

namespace crossdock::jit {

struct CacheOptions {
  std::string folder = {};      // empty: no cache
  std::uint64_t max_bytes = 0;  // pruned to this after a store; 0: never
};

// Held while one process compiles a kernel that others may want. Released by destruction, and by
// the system when the process dies.
class CacheLock {
 public:
  CacheLock() = default;
  CacheLock(base::UniqueFd fd, std::filesystem::path path)
      : fd_(std::move(fd)), path_(std::move(path)) {}
  CacheLock(CacheLock&&) = default;
  CacheLock& operator=(CacheLock&&) = delete;
  ~CacheLock();
  // Whether another had it meanwhile. If the kernel is not there now either, that one could not
  // store it, and it is of no use that the next one waits.
  [[nodiscard]] bool waited() const { return waited_; }
  void release();

 private:
  friend class Cache;
  base::UniqueFd fd_;
  std::filesystem::path path_;
  bool waited_ = false;
};

struct CacheEntry {
  std::filesystem::path path = {};
  std::uint64_t bytes = 0;
  std::filesystem::file_time_type used = {};  // last load or store
};

struct PruneLimits {
  std::uint64_t max_bytes = UINT64_MAX;
  std::chrono::seconds max_age = std::chrono::seconds::max();  // since its last use
};

struct PruneOutcome {
  std::size_t removed = 0;
  std::uint64_t removed_bytes = 0;
  std::uint64_t kept_bytes = 0;
};

class Cache {
 public:
  explicit Cache(CacheOptions options, base::Logger log = {});

  // "fill-<source key>-<compiler>.kernel": any other compiler's file of the same sources has the
  // same beginning.
  static std::string file_name(const KernelSpec& spec, const Key& source,
                               std::string_view compiler);

  // The kernel of exactly this key, or nothing. A file that is damaged or belongs to another key is
  // removed, counted and reported as absent; one that cannot be read just now is left.
  std::optional<Binary> load(const std::string& file_name, const Key& key);
  // For machines without a compiler: the kernel of these sources by whichever compiler that is not
  // newer than the driver (CompilerOptions::newest_cuda).
  std::optional<Binary> load_any(const KernelSpec& spec, const Key& source, int newest_cuda = 0);

  // Best effort; a failure warns once and is counted.
  void store(const std::string& file_name, const Binary& binary);

  // Waits for whoever compiles the same kernel. kDeadline names the lock. Where locks cannot be had
  // (read-only folder), and where this object could not store a kernel (full file system), there is
  // nothing to wait for, and the lock is empty.
  Result<CacheLock> lock(const std::string& file_name, Deadline deadline);

  // Sorted by last use, oldest first. Empty when there is no folder.
  [[nodiscard]] std::vector<CacheEntry> entries() const;
  // The content of one entry; kCorrupt or kIncompatible says what is wrong with it.
  static Result<Binary> read(const std::filesystem::path& path);
  // Removes least recently used entries beyond the limits, and what crashed writers left behind.
  PruneOutcome prune(const PruneLimits& limits);

  struct Counters {
    std::atomic<std::uint64_t> hits{0};
    std::atomic<std::uint64_t> misses{0};
    std::atomic<std::uint64_t> corrupt{0};
    std::atomic<std::uint64_t> write_failures{0};
  };
  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] bool enabled() const { return !folder_.empty(); }

 private:
  std::optional<Binary> take(const std::filesystem::path& path, const Key* key);
  [[nodiscard]] std::filesystem::path temporary_path() const;
  Result<void> write(const std::filesystem::path& target, const Binary& binary);
  void warn_unusable(const Error& error);

  std::filesystem::path folder_;
  std::uint64_t max_bytes_;
  base::Logger log_;
  Counters counters_;
  std::atomic<bool> warned_{false};
};

}  // namespace crossdock::jit
