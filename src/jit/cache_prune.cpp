// Listing and pruning the cache. See cache.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "jit/cache.hpp"

namespace crossdock::jit {
namespace {

namespace fs = std::filesystem;

// What a writer that crashed leaves; a living writer's file is seconds old.
constexpr auto kLeftoverAge = std::chrono::hours(1);

bool is_leftover(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(".tmp-") || (name.starts_with('.') && name.ends_with(".lock"));
}

void remove_leftovers(const fs::path& folder) {
  std::error_code problem;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(folder, problem), end; !problem && it != end;
       it.increment(problem)) {
    std::error_code gone;
    const auto written = it->last_write_time(gone);
    if (!gone && is_leftover(it->path()) && now - written > kLeftoverAge)
      fs::remove(it->path(), gone);
  }
}

}  // namespace

std::vector<CacheEntry> Cache::entries() const {
  std::vector<CacheEntry> found;
  std::error_code problem;
  if (!enabled()) return found;
  for (fs::directory_iterator it(folder_, problem), end; !problem && it != end;
       it.increment(problem)) {
    if (it->path().extension() != ".kernel") continue;
    std::error_code gone;  // another process may prune meanwhile
    const auto bytes = it->file_size(gone);
    const auto used = gone ? fs::file_time_type{} : it->last_write_time(gone);
    if (!gone) found.push_back({it->path(), bytes, used});
  }
  std::sort(found.begin(), found.end(), [](const CacheEntry& a, const CacheEntry& b) {
    return std::tie(a.used, a.path) < std::tie(b.used, b.path);
  });
  return found;
}

PruneOutcome Cache::prune(const PruneLimits& limits) {
  PruneOutcome outcome;
  if (!enabled()) return outcome;
  remove_leftovers(folder_);
  const auto all = entries();
  for (const auto& entry : all)
    outcome.kept_bytes += entry.bytes;
  const auto now = fs::file_time_type::clock::now();
  for (const auto& entry : all) {
    const bool old =
        std::chrono::duration_cast<std::chrono::seconds>(now - entry.used) > limits.max_age;
    if (!old && outcome.kept_bytes <= limits.max_bytes) continue;
    std::error_code problem;
    if (!fs::remove(entry.path, problem)) continue;
    ++outcome.removed;
    outcome.removed_bytes += entry.bytes;
    outcome.kept_bytes -= entry.bytes;
  }
  return outcome;
}

}  // namespace crossdock::jit
