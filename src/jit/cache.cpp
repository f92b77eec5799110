// Files of the cache: load, store, lock. Listing and pruning are in cache_prune.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/cache.hpp"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "jit/compiler.hpp"

namespace crossdock::jit {
namespace {

namespace fs = std::filesystem;

// No kernel is near this; a larger file is not ours, and is not read into memory.
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{256} << 20;

std::string source_prefix(const KernelSpec& spec, const Key& source) {
  return fmt::format("{}-{}-", spec.name, source.hex());
}

// A compiler's id as part of a file name: "nvrtc 13.0 -std=c++20" -> "nvrtc13.0".
std::string compiler_tag(std::string_view compiler) {
  std::string tag;
  int blanks = 0;
  for (const char c : compiler) {
    if (c == ' ' && ++blanks == 2) break;
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.') tag += c;
  }
  return tag;
}

Result<void> write_all(int fd, std::span<const std::byte> bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno_error(errno, fmt::format("write {}", path.string()));
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  if (::fsync(fd) != 0) return errno_error(errno, fmt::format("write {}", path.string()));
  return {};
}

// Whether `fd` is still the file at `path`: its last owner may have removed it.
bool is_current(int fd, const fs::path& path) {
  struct stat open_file{};
  struct stat named{};
  return ::fstat(fd, &open_file) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

// Whether what is there can serve nobody: its content is wrong, or it is a symbolic link. What
// could not be read this time (no descriptors, no permission, a network folder) may serve the next
// one.
bool is_rubbish(const Error& why) {
  return why.code == Code::kCorrupt || why.code == Code::kIncompatible ||
         (why.native.domain == Native::Domain::kErrno && why.native.value == ELOOP);
}

}  // namespace

CacheLock::~CacheLock() {
  release();
}

void CacheLock::release() {
  // Removed while held: who waits on this file finds that it is not current any more and tries
  // anew.
  if (fd_) ::unlink(path_.c_str());
  fd_.reset();
}

Cache::Cache(CacheOptions options, base::Logger log)
    : folder_(std::move(options.folder)), max_bytes_(options.max_bytes), log_(std::move(log)) {}

std::string Cache::file_name(const KernelSpec& spec, const Key& source, std::string_view compiler) {
  return source_prefix(spec, source) + compiler_tag(compiler) + ".kernel";
}

Result<Binary> Cache::read(const fs::path& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return errno_error(errno, fmt::format("open {}", path.string()));
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0)
    return errno_error(errno, fmt::format("read {}", path.string()));
  if (!S_ISREG(info.st_mode) || static_cast<std::uint64_t>(info.st_size) > kMaxFileBytes)
    return make_error(Code::kCorrupt, fmt::format("{} is no compiled kernel", path.string()));
  std::vector<std::byte> bytes(static_cast<std::size_t>(info.st_size));
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::read(fd.get(), bytes.data() + have, bytes.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, fmt::format("read {}", path.string()));
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  return decode(std::span(bytes).first(have));
}

std::optional<Binary> Cache::take(const fs::path& path, const Key* key) {
  auto binary = read(path);
  if (binary.ok() && (!key || binary->key == *key)) {
    // The time of last use orders pruning. A read-only cache does without.
    ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
    return std::move(*binary);
  }
  if (!binary.ok() && !is_rubbish(binary.error())) {
    if (binary.code() != Code::kNotFound)
      CROSSDOCK_LOG_ONCE(log_, kWarn, path.string(),
                         "cannot read {} of the kernel cache and will compile anew: {}",
                         path.filename().string(), binary.error().message);
    return std::nullopt;
  }
  counters_.corrupt.fetch_add(1, std::memory_order_relaxed);
  const std::string why = binary.ok() ? "it holds another kernel" : binary.error().message;
  CROSSDOCK_LOG(log_, kWarn, "dropped {} from the kernel cache and will compile anew: {}",
                path.filename().string(), why);
  ::unlink(path.c_str());
  return std::nullopt;
}

std::optional<Binary> Cache::load(const std::string& file_name, const Key& key) {
  auto found = enabled() ? take(folder_ / file_name, &key) : std::nullopt;
  (found ? counters_.hits : counters_.misses).fetch_add(1, std::memory_order_relaxed);
  return found;
}

std::optional<Binary> Cache::load_any(const KernelSpec& spec, const Key& source, int newest_cuda) {
  const std::string prefix = source_prefix(spec, source);
  for (const auto& entry : entries()) {
    if (!entry.path.filename().string().starts_with(prefix)) continue;
    auto binary = take(entry.path, nullptr);
    if (!binary || binary->key != binary_key(source, binary->compiler)) continue;
    if (!is_taken(cuda_major_of(binary->compiler), newest_cuda)) continue;
    counters_.hits.fetch_add(1, std::memory_order_relaxed);
    return binary;
  }
  counters_.misses.fetch_add(1, std::memory_order_relaxed);
  return std::nullopt;
}

// By chance: containers that share a folder have the same process numbers, and who was killed has
// left its file.
fs::path Cache::temporary_path() const {
  std::uint64_t number = 0;
  static_cast<void>(!::getrandom(&number, sizeof number, 0));
  return folder_ / fmt::format(".tmp-{}-{:016x}", ::getpid(), number);
}

Result<void> Cache::write(const fs::path& target, const Binary& binary) {
  const fs::path temporary = temporary_path();
  const auto bytes = encode(binary);
  base::UniqueFd fd(
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!fd) return errno_error(errno, fmt::format("create {}", temporary.string()));
  auto written = write_all(fd.get(), bytes, temporary);
  fd.reset();
  if (written.ok() && ::rename(temporary.c_str(), target.c_str()) != 0)
    written = errno_error(errno, fmt::format("rename {}", temporary.string()));
  if (!written.ok()) ::unlink(temporary.c_str());
  return written;
}

void Cache::warn_unusable(const Error& error) {
  counters_.write_failures.fetch_add(1, std::memory_order_relaxed);
  if (warned_.exchange(true)) return;
  CROSSDOCK_LOG(log_, kWarn,
                "the kernel cache {} cannot be written, so kernels are compiled again in every "
                "process: {}; set jit.cache_dir to a writable folder",
                folder_.string(), error.message);
}

void Cache::store(const std::string& file_name, const Binary& binary) {
  if (!enabled()) return;
  std::error_code problem;
  fs::create_directories(folder_, problem);
  if (const auto written = write(folder_ / file_name, binary); !written.ok()) {
    warn_unusable(written.error());
    return;
  }
  if (max_bytes_ != 0) static_cast<void>(prune({.max_bytes = max_bytes_}));
}

Result<CacheLock> Cache::lock(const std::string& file_name, Deadline deadline) {
  if (!enabled() || counters_.write_failures.load(std::memory_order_relaxed) > 0)
    return CacheLock{};
  std::error_code problem;
  fs::create_directories(folder_, problem);
  const fs::path path = folder_ / ("." + file_name + ".lock");
  bool waited = false;
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    base::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!fd) return CacheLock{};
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      if (is_current(fd.get(), path)) {
        CacheLock lock(std::move(fd), path);
        lock.waited_ = waited;
        return lock;
      }
      waited = true;
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) return CacheLock{};
    waited = true;
    if (deadline.passed())
      return make_error(
          Code::kDeadline,
          fmt::format("another process holds {} and has not finished compiling in time",
                      path.string()));
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
}

}  // namespace crossdock::jit
