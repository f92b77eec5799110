// The directory as a store. See the header for the rules that make it safe between processes.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/file_store.hpp"

#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/socket.hpp"
#include "wire/hmac.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

using base::UniqueFd;

constexpr const char* kLockName = ".lock";
constexpr const char* kSideName = ".new";  // written only under the lock
constexpr std::size_t kMaxRecordBytes = kMaxValueBytes + kMaxKeyBytes + 64;
// A file is removed so long after its lease is over: hosts that share the directory may differ in
// what time it is.
constexpr std::uint64_t kKeepExpiredMs = 3'600'000;
// For which one process removes files while the others wait for the lock.
constexpr std::chrono::milliseconds kCleanUpBound{100};
// Encoded keys beyond this get a hashed file name: names end at 255 bytes.
constexpr std::size_t kMaxPlainName = 200;

std::uint64_t unix_ms() {
  return base::wall_ns() / 1'000'000;
}

// "k-" + the percent-encoded key, or "h-" + its SHA-256 for long ones. Never begins with a dot.
std::string file_name(std::string_view key) {
  const std::string encoded = wire::percent_encode(key);
  if (encoded.size() <= kMaxPlainName) return "k-" + encoded;
  std::string name = "h-";
  for (const std::byte b : wire::sha256(wire::as_bytes(key)))
    name += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return name;
}

// One operation's view of the directory; every error names the path.
class Directory {
 public:
  static Result<Directory> open(const std::string& path) {
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd) return errno_error(errno, "open store directory " + path);
    return Directory(path, std::move(fd));
  }

  // What is in force: nothing when there is no such file, or its lease is over.
  Result<std::optional<wire::StoreRecord>> read(const std::string& name) const {
    CROSSDOCK_TRY(record, read_file(name));
    if (record && expired_by(*record, unix_ms())) record.reset();
    return record;
  }

  // Removes files whose leases have long been over, as far as this user may and time allows.
  // Precondition: the lock is held.
  void remove_expired(Deadline deadline) const {
    (void)visit([&](std::string_view item) {
      if (deadline.passed()) return false;
      const std::string name(item);
      const auto record = read_file(name);
      if (record.ok() && *record && expired_by(**record, unix_ms() - kKeepExpiredMs))
        (void)unlink(name);
      return true;
    });
  }

  [[nodiscard]] bool exists(const std::string& name) const {
    return ::faccessat(fd_.get(), name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
  }

  // Precondition: the lock is held.
  Result<> replace(const std::string& name, const wire::StoreRecord& record) const {
    CROSSDOCK_TRY(bytes, wire::encode_store_record(record));
    {
      const UniqueFd fd(::openat(fd_.get(), kSideName,
                                 O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
      if (!fd) return failure(errno, "create", kSideName);
      CROSSDOCK_CHECK_OK(write_all(fd.get(), bytes));
    }
    if (::renameat(fd_.get(), kSideName, fd_.get(), name.c_str()) != 0)
      return failure(errno, "rename to", name);
    return {};
  }

  Result<> unlink(const std::string& name) const {
    if (::unlinkat(fd_.get(), name.c_str(), 0) != 0 && errno != ENOENT)
      return failure(errno, "remove", name);
    return {};
  }

  Result<std::vector<std::string>> names() const {
    std::vector<std::string> out;
    CROSSDOCK_CHECK_OK(visit([&](std::string_view name) {
      out.emplace_back(name);
      return true;
    }));
    return out;
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] Error failure(int error_number, const char* verb, std::string_view name) const {
    return errno_error(error_number, fmt::format("{} {}/{}", verb, path_, name));
  }

 private:
  Directory(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  static bool expired_by(const wire::StoreRecord& record, std::uint64_t when_unix_ms) {
    return record.expires_unix_ms != 0 && record.expires_unix_ms <= when_unix_ms;
  }

  [[nodiscard]] Error no_entry(std::string_view name) const {
    return make_error(Code::kCorrupt, fmt::format("{}/{} is no store entry", path_, name));
  }

  // Names the files of entries to `visitor` until it returns false.
  template <class Visitor>
  Result<> visit(Visitor visitor) const {
    // A descriptor of its own: closedir() closes what fdopendir() took.
    UniqueFd copy(::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    DIR* dir = copy ? ::fdopendir(copy.get()) : nullptr;
    if (dir == nullptr) return failure(errno, "list", ".");
    (void)copy.release();
    while (const dirent* item = ::readdir(dir)) {
      const std::string_view name = item->d_name;
      if (!name.starts_with("k-") && !name.starts_with("h-")) continue;
      if (!visitor(name)) break;
    }
    ::closedir(dir);
    return {};
  }

  // The whole file, its lease over or not; nothing when there is none.
  Result<std::optional<wire::StoreRecord>> read_file(const std::string& name) const {
    // Nonblocking: to open a foreign pipe would wait for whoever writes to it.
    const UniqueFd fd(
        ::openat(fd_.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!fd && errno == ENOENT) return std::optional<wire::StoreRecord>{};
    if (!fd && (errno == ELOOP || errno == ENXIO)) return no_entry(name);  // a link, a socket
    if (!fd) return failure(errno, "open", name);
    CROSSDOCK_TRY(bytes, read_all(fd.get(), name));
    auto record = wire::decode_store_record(bytes);
    if (!record.ok()) {
      Error error = std::move(record).error();
      error.scope = Scope::kCall;
      error.retry = Retry::kNo;
      error.message = fmt::format("{}/{}: {}", path_, name, error.message);
      return error;
    }
    return std::optional<wire::StoreRecord>(std::move(*record));
  }

  Result<std::vector<std::byte>> read_all(int fd, const std::string& name) const {
    struct stat info{};
    if (::fstat(fd, &info) != 0) return failure(errno, "stat", name);
    if (!S_ISREG(info.st_mode) || static_cast<std::uint64_t>(info.st_size) > kMaxRecordBytes)
      return no_entry(name);
    std::vector<std::byte> bytes(static_cast<std::size_t>(info.st_size));
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::read(fd, bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno != EINTR) return failure(errno, "read", name);
      if (n == 0) break;
      if (n > 0) done += static_cast<std::size_t>(n);
    }
    bytes.resize(done);
    return bytes;
  }

  Result<> write_all(int fd, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd, bytes.data(), bytes.size());
      if (n < 0 && errno != EINTR) return failure(errno, "write", kSideName);
      if (n > 0) bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return {};
  }

  std::string path_;
  UniqueFd fd_;
};

// Holds the directory's lock; the kernel lets go of it when the process dies.
class Lock {
 public:
  // Said, not left to close(): a child that was forked meanwhile has the open file too, and would
  // keep the lock for its life.
  ~Lock() {
    if (fd_) (void)::flock(fd_.get(), LOCK_UN);
  }
  Lock(Lock&&) noexcept = default;
  Lock& operator=(Lock&&) = delete;

  static Result<Lock> take(const Directory& dir, Deadline deadline) {
    UniqueFd fd(::openat(dir.fd(), kLockName, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!fd) return dir.failure(errno, "open", kLockName);
    int pause_ms = 1;
    while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return dir.failure(errno, "lock", kLockName);
      if (deadline.passed())
        return make_error(Code::kDeadline,
                          "another process held the lock of the store directory too long");
      (void)::poll(nullptr, 0, deadline.remaining_ms(pause_ms));
      pause_ms = std::min(pause_ms * 2, 20);
    }
    return Lock(std::move(fd));
  }

  // Counts up the store's revision, which lies in the lock file.
  Result<std::uint64_t> next_revision(const Directory& dir) const {
    std::byte raw[8] = {};
    const ssize_t n = ::pread(fd_.get(), raw, sizeof raw, 0);
    if (n < 0) return dir.failure(errno, "read", kLockName);
    const std::uint64_t revision = wire::load_le<std::uint64_t>(raw) + 1;
    wire::store_le(raw, revision);
    if (::pwrite(fd_.get(), raw, sizeof raw, 0) != sizeof raw)
      return dir.failure(errno, "write", kLockName);
    return revision;
  }

 private:
  explicit Lock(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string path) : path_(std::move(path)) {}
  std::string describe() const override { return "file://" + path_; }

 private:
  Result<> do_put(std::string_view key, std::string_view value, Lease lease,
                  Deadline deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    CROSSDOCK_TRY(lock, Lock::take(dir, deadline));
    // Whoever takes a new name clears away what the dead left; renewals are frequent and do not.
    if (lease && !dir.exists(file_name(key)))
      dir.remove_expired(earlier(deadline, Deadline::in(kCleanUpBound)));
    const std::uint64_t expiry =
        lease ? unix_ms() + static_cast<std::uint64_t>(lease->count()) : std::uint64_t{0};
    return write(dir, lock, key, value, expiry);
  }

  Result<std::optional<Entry>> do_get(std::string_view key, Deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    return look(dir, key);
  }

  Result<> do_remove(std::string_view key, Deadline deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    CROSSDOCK_TRY(lock, Lock::take(dir, deadline));
    return dir.unlink(file_name(key));
  }

  Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    CROSSDOCK_TRY(names, dir.names());
    std::vector<std::string> keys;
    for (const std::string& name : names) {
      if (deadline.passed())
        return make_error(Code::kDeadline, "reading " + path_ + " took too long");
      auto record = dir.read(name);
      // A foreign or torn file is nobody's key; get() of such a key tells.
      if (record.code() == Code::kCorrupt) continue;
      if (!record.ok()) return std::move(record).error();
      if (*record && (*record)->key.starts_with(prefix)) keys.push_back((*record)->key);
    }
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  Result<Entry> do_wait(std::string_view key, Deadline deadline) override {
    const UniqueFd watcher(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    for (;;) {
      // Each time, since the directory may have gone and come again.
      const bool watching =
          watcher && ::inotify_add_watch(watcher.get(), path_.c_str(), IN_MOVED_TO) >= 0;
      auto entry = do_get(key, deadline);
      if (entry.ok() && *entry) return std::move(**entry);
      if (!entry.ok() && entry.code() != Code::kNotFound) return std::move(entry).error();
      if (deadline.passed())
        return make_error(Code::kDeadline,
                          fmt::format("nobody put key {} into {} in time{}",
                                      wire::quote_bytes(wire::as_bytes(key), 80), describe(),
                                      entry.ok() ? "" : " (" + entry.error().message + ")"));
      pollfd item{.fd = watching ? watcher.get() : -1, .events = POLLIN, .revents = 0};
      (void)::poll(&item, 1, deadline.remaining_ms(watching ? 500 : 20));
      alignas(inotify_event) char events[4096];
      while (watching && ::read(watcher.get(), events, sizeof events) > 0) {
      }
    }
  }

  Result<bool> do_compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                  std::string_view value, Deadline deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    CROSSDOCK_TRY(lock, Lock::take(dir, deadline));
    CROSSDOCK_TRY(entry, look(dir, key));
    if ((entry ? entry->revision : 0) != expected_revision) return false;
    CROSSDOCK_CHECK_OK(write(dir, lock, key, value, 0));
    return true;
  }

  Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                     Deadline deadline) override {
    CROSSDOCK_TRY(dir, Directory::open(path_));
    CROSSDOCK_TRY(lock, Lock::take(dir, deadline));
    CROSSDOCK_TRY(entry, look(dir, key));
    if (!entry || entry->revision != expected_revision) return false;
    CROSSDOCK_CHECK_OK(dir.unlink(file_name(key)));
    return true;
  }

  static Result<std::optional<Entry>> look(const Directory& dir, std::string_view key) {
    CROSSDOCK_TRY(record, dir.read(file_name(key)));
    if (!record || record->key != key) return std::optional<Entry>{};
    return std::optional<Entry>(Entry{std::move(record->value), record->revision});
  }

  static Result<> write(const Directory& dir, const Lock& lock, std::string_view key,
                        std::string_view value, std::uint64_t expires_unix_ms) {
    CROSSDOCK_TRY(revision, lock.next_revision(dir));
    return dir.replace(file_name(key), {.key = std::string(key),
                                        .value = std::string(value),
                                        .revision = revision,
                                        .expires_unix_ms = expires_unix_ms});
  }

  std::string path_;
};

}  // namespace

Result<std::shared_ptr<Store>> open_file_store(std::string_view path, Deadline deadline) {
  if (path.empty() || path[0] != '/')
    return invalid_argument(fmt::format(
        "store URL file://{} needs an absolute path, as in file:///tmp/crossdock", path));
  const std::string directory(path);
  if (::mkdir(directory.c_str(), 0777) != 0 && errno != EEXIST)
    return errno_error(errno, "make store directory " + directory);
  // Shows at once whether one may write here.
  CROSSDOCK_TRY(dir, Directory::open(directory));
  CROSSDOCK_CHECK_OK(Lock::take(dir, deadline));
  return std::shared_ptr<Store>(std::make_shared<FileStore>(directory));
}

}  // namespace crossdock::rendezvous
