// The cache under everything that can happen to a folder: damage, races, locks of the living and
// the dead, no room, no permission. SPDX-License-Identifier: Apache-2.0
#include "jit/cache.hpp"

#include <chrono>
#include <gmock/gmock.h>
#include <mutex>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "jit/process.hpp"
#include "jit_fixture.hpp"

namespace crossdock::jit {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::string_view kCompiler = "fake 1.0 -std=c++20";

Binary binary_for(const KernelSpec& spec) {
  return {.spec = spec,
          .key = binary_key(source_key(spec, {}), kCompiler),
          .compiler = std::string(kCompiler),
          .symbol = "code",
          .use = {.registers = 8},
          .image = make_cubin({"code"})};
}

std::string file_of(const KernelSpec& spec) {
  return Cache::file_name(spec, source_key(spec, {}), kCompiler);
}

struct CollectedLog {
  std::mutex mutex;
  std::vector<std::string> lines;
  base::Logger logger() {
    return base::Logger::create("info",
                                [this](const base::LogRecord& record) {
                                  const std::lock_guard lock(mutex);
                                  lines.emplace_back(record.message);
                                })
        .value();
  }
};

class CacheFolder : public ::testing::Test {
 protected:
  [[nodiscard]] Cache cache() { return Cache({.folder = folder_.path.string()}, log_.logger()); }
  TemporaryFolder folder_;
  CollectedLog log_;
  KernelSpec spec_ = fill_spec();
  Binary binary_ = binary_for(spec_);
  std::string file_ = file_of(spec_);
};

TEST_F(CacheFolder, StoresAndLoadsAcrossObjects) {
  Cache({.folder = folder_.path.string()}).store(file_, binary_);
  Cache other({.folder = folder_.path.string()});
  const auto loaded = other.load(file_, binary_.key);
  ASSERT_TRUE(loaded.has_value());
  EXPECT_EQ(loaded->image, binary_.image);
  EXPECT_EQ(other.counters().hits, 1u);
  EXPECT_FALSE(other.load("absent.kernel", binary_.key).has_value());
  EXPECT_EQ(other.counters().misses, 1u);
}

TEST_F(CacheFolder, FileNameHoldsNoPathAndIsReadable) {
  EXPECT_THAT(file_, ::testing::MatchesRegex("fill-[0-9a-f]*-fake1.0.kernel"));
}

TEST_F(CacheFolder, ContentHoldsNoPathOfThisMachine) {
  Cache({.folder = folder_.path.string()}).store(file_, binary_);
  EXPECT_THAT(read_text(folder_.path / file_), ::testing::Not(HasSubstr(folder_.path.string())));
}

TEST_F(CacheFolder, DamagedFileIsDroppedCountedAndTold) {
  Cache cache({.folder = folder_.path.string()}, log_.logger());
  cache.store(file_, binary_);
  const std::string whole = read_text(folder_.path / file_);
  std::string flipped = whole;
  flipped[flipped.size() / 2] ^= 1;
  for (const auto& damage : {flipped, whole.substr(0, whole.size() / 2), std::string(), whole + "x",
                             std::string(5000, '\0')}) {
    write_text(folder_.path / file_, damage);
    EXPECT_FALSE(cache.load(file_, binary_.key).has_value());
    EXPECT_FALSE(fs::exists(folder_.path / file_));
  }
  EXPECT_EQ(cache.counters().corrupt, 5u);
  ASSERT_EQ(log_.lines.size(), 5u);
  EXPECT_THAT(log_.lines[0], HasSubstr("checksum does not match"));
}

// The next process may be able to read what this one could not.
TEST_F(CacheFolder, AFileThatCannotBeOpenedNowStays) {
  Cache cache({.folder = folder_.path.string()}, log_.logger());
  cache.store(file_, binary_);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit none{0, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto unreadable = cache.load(file_, binary_.key);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_FALSE(unreadable.has_value());
  EXPECT_EQ(cache.counters().misses, 1u);
  EXPECT_EQ(cache.counters().corrupt, 0u);
  ASSERT_EQ(log_.lines.size(), 1u);
  EXPECT_THAT(log_.lines[0], HasSubstr("cannot read"));
  EXPECT_TRUE(cache.load(file_, binary_.key).has_value()) << "it was not removed";
}

TEST_F(CacheFolder, FileUnderAnotherKeysNameIsNotTaken) {
  Cache cache({.folder = folder_.path.string()});
  cache.store(file_, binary_for(fill_spec(512)));
  EXPECT_FALSE(cache.load(file_, binary_.key).has_value());
  EXPECT_EQ(cache.counters().corrupt, 1u);
}

TEST_F(CacheFolder, LinksAndFoldersInPlaceOfFilesAreNotFollowed) {
  Cache cache({.folder = folder_.path.string()});
  write_text(folder_.path / "target", "content");
  fs::create_symlink(folder_.path / "target", folder_.path / file_);
  EXPECT_FALSE(cache.load(file_, binary_.key).has_value());
  EXPECT_TRUE(fs::exists(folder_.path / "target"));
  EXPECT_FALSE(fs::is_symlink(folder_.path / file_)) << "the link is in the way of a kernel";
  fs::create_directory(folder_.path / "dir.kernel");
  EXPECT_FALSE(cache.load("dir.kernel", binary_.key).has_value());
}

TEST_F(CacheFolder, AnyCompilersFileServesWhereThereIsNone) {
  Cache cache({.folder = folder_.path.string()});
  cache.store(file_, binary_);
  EXPECT_TRUE(cache.load_any(spec_, source_key(spec_, {})).has_value());
  EXPECT_FALSE(cache.load_any(fill_spec(512), source_key(fill_spec(512), {})).has_value());
  // A file that was renamed to these sources' name is not theirs.
  fs::rename(folder_.path / file_, folder_.path / file_of(fill_spec(512)));
  EXPECT_FALSE(cache.load_any(fill_spec(512), source_key(fill_spec(512), {})).has_value());
}

// The driver would refuse it, though another file of the same sources would serve.
TEST_F(CacheFolder, FilesOfANewerCompilerThanTheDriverArePassedOver) {
  Cache cache({.folder = folder_.path.string()});
  const Key source = source_key(spec_, {});
  for (const std::string compiler : {"nvrtc 13.0 -std=c++20", "nvrtc 12.8 -std=c++20"}) {
    Binary binary = binary_;
    binary.compiler = compiler;
    binary.key = binary_key(source, compiler);
    const auto file = Cache::file_name(spec_, source, compiler);
    cache.store(file, binary);
    const auto hours = std::chrono::hours(compiler.starts_with("nvrtc 13") ? 2 : 1);
    fs::last_write_time(folder_.path / file, fs::file_time_type::clock::now() - hours);
  }
  const auto taken = cache.load_any(spec_, source, 12040);
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->compiler, "nvrtc 12.8 -std=c++20");
  EXPECT_TRUE(cache.load_any(spec_, source, 13000).has_value());
  EXPECT_FALSE(cache.load_any(spec_, source, 11080).has_value());
}

// /proc takes no files from anybody, root among them.
TEST_F(CacheFolder, UnwritableFolderWorksUncachedWithOneWarning) {
  Cache cache({.folder = "/proc/crossdock-no-such-cache"}, log_.logger());
  EXPECT_TRUE(cache.lock(file_, Deadline::in(1s)).ok());
  cache.store(file_, binary_);
  cache.store(file_, binary_);
  EXPECT_FALSE(cache.load(file_, binary_.key).has_value());
  EXPECT_EQ(cache.counters().write_failures, 2u);
  ASSERT_EQ(log_.lines.size(), 1u);
  EXPECT_THAT(log_.lines[0], HasSubstr("jit.cache_dir"));
}

TEST_F(CacheFolder, ReadOnlyFolderStillServes) {
  Cache(CacheOptions{.folder = folder_.path.string()}).store(file_, binary_);
  const auto codes = in_processes(1, [&](int) {
    // Root writes everywhere: become nobody where we are root.
    const auto read_only = fs::perms::owner_read | fs::perms::group_read | fs::perms::others_read |
                           fs::perms::owner_exec | fs::perms::group_exec | fs::perms::others_exec;
    fs::permissions(folder_.path, read_only);
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return 9;
    Cache cache({.folder = folder_.path.string()});
    if (!cache.lock("other.kernel", Deadline::in(1s)).ok()) return 1;
    if (!cache.load(file_, binary_.key)) return 2;
    cache.store("other.kernel", binary_);
    return cache.counters().write_failures == 1 ? 0 : 3;
  });
  fs::permissions(folder_.path, fs::perms::owner_all);
  EXPECT_EQ(codes[0], 0);
}

// A limit on file sizes stops the write halfway, as a full file system does.
TEST_F(CacheFolder, WriteThatStopsHalfwayLeavesNothing) {
  const auto codes = in_processes(1, [&](int) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{100, 100};
    ::setrlimit(RLIMIT_FSIZE, &small);
    Cache cache({.folder = folder_.path.string()});
    cache.store(file_, binary_);
    return cache.counters().write_failures == 1 ? 0 : 1;
  });
  EXPECT_EQ(codes[0], 0);
  EXPECT_TRUE(fs::is_empty(folder_.path));
}

// Then the holder of a lock compiles for nobody else.
TEST_F(CacheFolder, ACacheThatCannotStoreWaitsForNoLock) {
  Cache other({.folder = folder_.path.string()});
  const auto held = other.lock(file_, Deadline::in(1s));
  ASSERT_TRUE(held.ok());
  const auto codes = in_processes(1, [&](int) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{100, 100};
    ::setrlimit(RLIMIT_FSIZE, &small);
    Cache cache({.folder = folder_.path.string()});
    if (cache.lock(file_, Deadline::in(20ms)).code() != Code::kDeadline) return 1;
    cache.store(file_, binary_);
    return cache.lock(file_, Deadline::in(20ms)).ok() ? 0 : 2;
  });
  EXPECT_EQ(codes[0], 0);
}

// Containers that share a folder have the same process numbers, and one that was killed leaves its
// file; two caches of one process count alike.
TEST_F(CacheFolder, OthersTemporaryFilesAreNotInTheWay) {
  for (int i = 0; i < 4; ++i)
    write_text(folder_.path / (".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(i)),
               "of another");
  Cache cache({.folder = folder_.path.string()}, log_.logger());
  cache.store(file_, binary_);
  EXPECT_EQ(cache.counters().write_failures, 0u);
  EXPECT_TRUE(log_.lines.empty());
  EXPECT_TRUE(cache.load(file_, binary_.key).has_value());
}

TEST_F(CacheFolder, FullFileSystem) {
  if (::mount("tmpfs", folder_.path.c_str(), "tmpfs", 0, "size=8k") != 0)
    GTEST_SKIP() << "cannot mount a small tmpfs here: " << ::strerror(errno);
  {
    Cache cache({.folder = folder_.path.string()}, log_.logger());
    Binary large = binary_;
    large.image.resize(1 << 20);
    cache.store(file_, large);
    EXPECT_EQ(cache.counters().write_failures, 1u);
    EXPECT_TRUE(fs::is_empty(folder_.path));
    cache.store(file_, binary_);
    EXPECT_TRUE(cache.load(file_, binary_.key).has_value());
  }
  EXPECT_EQ(::umount(folder_.path.c_str()), 0);
}

TEST_F(CacheFolder, LockIsExclusiveAndEndsAtTheDeadline) {
  Cache cache({.folder = folder_.path.string()});
  {
    const auto held = cache.lock(file_, Deadline::in(1s));
    ASSERT_TRUE(held.ok());
    const auto second = cache.lock(file_, Deadline::in(20ms));
    EXPECT_EQ(second.code(), Code::kDeadline);
    EXPECT_THAT(second.error().message, HasSubstr(file_));
    EXPECT_TRUE(cache.lock("other.kernel", Deadline::in(20ms)).ok());
  }
  EXPECT_TRUE(cache.lock(file_, Deadline::in(20ms)).ok());
  EXPECT_TRUE(fs::is_empty(folder_.path));  // released locks leave no file
}

TEST_F(CacheFolder, LockOfAKilledProcessIsFree) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    Cache cache({.folder = folder_.path.string()});
    const auto held = cache.lock(file_, Deadline::in(1s));
    static_cast<void>(!::write(ready[1], held.ok() ? "y" : "n", 1));
    for (;;)
      ::pause();
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  Cache cache({.folder = folder_.path.string()});
  EXPECT_EQ(cache.lock(file_, Deadline::in(10ms)).code(), Code::kDeadline);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(cache.lock(file_, Deadline::in(1s)).ok());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(CacheFolder, PruneRemovesTheLeastRecentlyUsedAndLeftovers) {
  Cache cache({.folder = folder_.path.string()});
  const auto now = fs::file_time_type::clock::now();
  for (unsigned i = 1; i <= 4; ++i) {
    const KernelSpec spec = fill_spec(i * 32);
    cache.store(file_of(spec), binary_for(spec));
    fs::last_write_time(folder_.path / file_of(spec), now - std::chrono::hours(10 - i));
  }
  write_text(folder_.path / ".tmp-1-1", "left by a crash");
  fs::last_write_time(folder_.path / ".tmp-1-1", now - std::chrono::hours(2));
  write_text(folder_.path / ".tmp-1-2", "being written");
  write_text(folder_.path / "notes.txt", "not ours");
  // Loading makes the oldest the newest.
  ASSERT_TRUE(cache.load(file_of(fill_spec(32)), binary_for(fill_spec(32)).key).has_value());
  const auto each = cache.entries()[0].bytes;
  const auto outcome = cache.prune({.max_bytes = 2 * each + each / 2});
  EXPECT_EQ(outcome.removed, 2u);
  EXPECT_TRUE(fs::exists(folder_.path / file_of(fill_spec(32))));
  EXPECT_FALSE(fs::exists(folder_.path / file_of(fill_spec(64))));
  EXPECT_FALSE(fs::exists(folder_.path / file_of(fill_spec(96))));
  EXPECT_FALSE(fs::exists(folder_.path / ".tmp-1-1"));
  EXPECT_TRUE(fs::exists(folder_.path / ".tmp-1-2"));
  EXPECT_TRUE(fs::exists(folder_.path / "notes.txt"));
  EXPECT_EQ(cache.prune({.max_age = std::chrono::hours(1)}).removed, 1u);
}

TEST_F(CacheFolder, StoringPrunesToTheLimit) {
  const auto each = encode(binary_).size();
  Cache cache({.folder = folder_.path.string(), .max_bytes = 3 * each});
  for (unsigned i = 1; i <= 10; ++i) {
    const KernelSpec spec = fill_spec(i + 100);
    cache.store(file_of(spec), binary_for(spec));
  }
  EXPECT_LE(cache.entries().size(), 3u);
  EXPECT_GE(cache.entries().size(), 2u);
}

TEST(Process, OutputAndExitCode) {
  const auto outcome =
      run_process({"sh", "-c", "echo out; echo err >&2; exit 3"}, Deadline::in(10s));
  ASSERT_TRUE(outcome.ok()) << outcome.error().describe();
  EXPECT_EQ(outcome->exit_code, 3);
  EXPECT_EQ(outcome->output, "out\nerr\n");
  EXPECT_EQ(run_process({"sh", "-c", "kill -9 $$"}, Deadline::in(10s))->exit_code, 137);
}

TEST(Process, MissingProgramIsNotFound) {
  EXPECT_EQ(run_process({"crossdock-no-such-program"}, Deadline::in(10s)).code(), Code::kNotFound);
}

TEST(Process, DeadlineKillsTheWholeFamily) {
  const auto start = std::chrono::steady_clock::now();
  const auto outcome = run_process({"sh", "-c", "sleep 60 & sleep 60"}, Deadline::in(50ms));
  EXPECT_EQ(outcome.code(), Code::kDeadline);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

}  // namespace
}  // namespace crossdock::jit
