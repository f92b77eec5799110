// Opening by URL, and what only one kind of store can do wrong without a server.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/store.hpp"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "rendezvous/inproc_store.hpp"
#include "rendezvous/key_table.hpp"
#include "support/alarm.hpp"
#include "support/temp_dir.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;

Deadline soon() {
  return Deadline::in(5s);
}

TEST(OpenStore, UnknownSchemesListTheKnownOnesAndSuggest) {
  const auto typo = open_store("htp://host:1", soon());
  ASSERT_FALSE(typo.ok());
  EXPECT_EQ(typo.code(), Code::kInvalidArgument);
  for (const char* scheme : {"inproc://", "file://", "tcp://", "http://"})
    EXPECT_NE(typo.error().message.find(scheme), std::string::npos) << scheme;
  EXPECT_NE(typo.error().message.find("did you mean"), std::string::npos) << typo.error().message;
  for (const char* bad : {"", "host:7000", "://x", "redis://h:1", "TCP//x"})
    EXPECT_EQ(open_store(bad, soon()).code(), Code::kInvalidArgument) << bad;
}

TEST(OpenStore, MalformedUrlsSayWhatIsMissing) {
  for (const char* bad : {"inproc://", "file://", "file://relative/dir", "tcp://", "tcp://host",
                          "tcp://:7000", "tcp://host:99999", "http://", "http://host:x/",
                          "http://host:80/a?b", "http://host:80/a b"})
    EXPECT_EQ(open_store(bad, soon()).code(), Code::kInvalidArgument) << bad;
}

TEST(OpenStore, NobodyListeningIsUnreachableWithinTheDeadline) {
  // Port 1 needs privileges to be bound and is free on any sane machine.
  for (const char* url : {"tcp://127.0.0.1:1", "http://127.0.0.1:1/x"}) {
    const auto start = Deadline::Clock::now();
    const auto store = open_store(url, Deadline::in(100ms));
    EXPECT_EQ(store.code(), Code::kUnreachable) << url;
    EXPECT_NE(store.error().message.find("127.0.0.1:1"), std::string::npos);
    EXPECT_LT(Deadline::Clock::now() - start, 3s);
  }
}

// As a store writes it for `key`, with a lease that ended that long ago.
void write_expired(const support::TempDir& dir, const std::string& key, std::chrono::minutes ago) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto end = std::chrono::duration_cast<std::chrono::milliseconds>(now - ago);
  const auto bytes = wire::encode_store_record(
      {.key = key, .value = "v", .revision = 1, .expires_unix_ms = std::uint64_t(end.count())});
  dir.write("k-" + key, wire::as_text(bytes.value()));
}

// What engines leave that were killed goes when another one is born.
TEST(FileStore, FilesOfLongExpiredEntriesGoWhenANewEntryIsLeased) {
  const support::TempDir dir;
  const auto store = open_store("file://" + dir.path(), soon()).value();
  const auto there = [&](const std::string& name) {
    return std::filesystem::exists(dir.path() + "/k-" + name);
  };
  ASSERT_TRUE(store->put("stays", "v", {}, soon()).ok());
  ASSERT_TRUE(store->put("lives", "v", 1h, soon()).ok());
  dir.write("k-foreign", "not an entry");
  write_expired(dir, "dead", 61min);
  write_expired(dir, "late", 59min);
  EXPECT_FALSE(store->get("dead", soon()).value().has_value());
  EXPECT_FALSE(store->get("late", soon()).value().has_value());
  ASSERT_TRUE(store->put("lives", "renewed", 1h, soon()).ok());
  EXPECT_TRUE(there("dead")) << "a renewal does not read the whole directory";
  ASSERT_TRUE(store->put("hasty", "v", 1h, Deadline::now()).ok());
  EXPECT_TRUE(there("dead")) << "no time for it";
  ASSERT_TRUE(store->put("born", "v", 1h, soon()).ok());
  EXPECT_FALSE(there("dead"));
  EXPECT_TRUE(there("late")) << "a host whose clock is behind may still take it for living";
  EXPECT_TRUE(there("foreign")) << "not the store's";
  EXPECT_EQ(store->list("", soon()).value(),
            (std::vector<std::string>{"born", "hasty", "lives", "stays"}));
  EXPECT_EQ(store->get("lives", soon()).value()->value, "renewed");
}

TEST(InprocStore, NamesAreGoneWithTheirLastHandle) {
  const std::size_t before = num_inproc_stores();
  {
    const auto a = open_store("inproc://one", soon()).value();
    const auto b = open_store("inproc://one", soon()).value();
    const auto other = open_store("inproc://two", soon()).value();
    ASSERT_TRUE(a->put("k", "v", {}, soon()).ok());
    EXPECT_TRUE(b->get("k", soon()).value().has_value());
    EXPECT_FALSE(other->get("k", soon()).value().has_value());
    EXPECT_EQ(num_inproc_stores(), before + 2);
  }
  EXPECT_EQ(num_inproc_stores(), before);
  const auto fresh = open_store("inproc://one", soon()).value();
  EXPECT_FALSE(fresh->get("k", soon()).value().has_value());
}

TEST(KeyTable, LimitsAreErrorsAndFreedSpaceIsUsedAgain) {
  KeyTable table({.max_keys = 2, .max_bytes = 20});
  const KeyTable::Time now{};
  ASSERT_TRUE(table.put("a", "12345", {}, now).ok());
  ASSERT_TRUE(table.put("b", "12345", {}, now).ok());
  EXPECT_EQ(table.put("c", "", {}, now).code(), Code::kNoMemory) << "keys";
  EXPECT_EQ(table.put("a", std::string(14, 'x'), {}, now).code(), Code::kNoMemory) << "bytes";
  EXPECT_EQ(table.get("a", now)->value, "12345") << "a refused put changes nothing";
  table.remove("b");
  EXPECT_TRUE(table.put("a", std::string(14, 'x'), {}, now).ok());
}

TEST(KeyTable, LeasesEndAtTheirMoment) {
  KeyTable table;
  const KeyTable::Time start{};
  ASSERT_TRUE(table.put("k", "v", 10ms, start).ok());
  EXPECT_NE(table.get("k", start + 9ms), nullptr);
  EXPECT_EQ(table.get("k", start + 10ms), nullptr);
  ASSERT_TRUE(table.put("k", "v", 10ms, start).ok());
  ASSERT_TRUE(table.put("k", "v", {}, start + 5ms).ok());
  EXPECT_NE(table.get("k", start + 1h), nullptr) << "put again without a lease";
}

TEST(FileStore, ForeignAndTornFilesAreNamedNotServed) {
  const support::TempDir dir;
  const auto store = open_store("file://" + dir.path(), soon()).value();
  dir.write("k-torn", "XDKV half a record");
  dir.write("README", "not ours");
  const auto entry = store->get("torn", soon());
  ASSERT_FALSE(entry.ok());
  EXPECT_EQ(entry.code(), Code::kCorrupt);
  EXPECT_NE(entry.error().message.find("k-torn"), std::string::npos);
  EXPECT_TRUE(store->list("", soon()).value().empty());
  EXPECT_TRUE(store->put("torn", "whole", {}, soon()).ok()) << "a put repairs it";
  EXPECT_EQ(store->get("torn", soon()).value()->value, "whole");
}

TEST(FileStore, ADirectoryThatVanishesOrIsNoneIsAnError) {
  const support::TempDir dir;
  const std::string path = dir.path() + "/store";
  const auto store = open_store("file://" + path, soon()).value();
  std::filesystem::remove_all(path);
  EXPECT_EQ(store->get("k", soon()).code(), Code::kNotFound);
  EXPECT_EQ(store->put("k", "v", {}, soon()).code(), Code::kNotFound);
  EXPECT_EQ(store->wait("k", Deadline::in(50ms)).code(), Code::kDeadline) << "it may come back";
  const std::string file = dir.write("file", "x");
  EXPECT_FALSE(open_store("file://" + file, soon()).ok());
  EXPECT_FALSE(open_store("file:///nonexistent/deep/dir", soon()).ok());
  EXPECT_EQ(open_store("file://" + file + "/x", soon()).code(), Code::kInvalidArgument);
}

TEST(FileStore, WaitOutlivesADirectoryThatIsMadeAnew) {
  const support::TempDir dir;
  const std::string url = "file://" + dir.path() + "/store";
  const auto store = open_store(url, soon()).value();
  std::jthread waiter([&] {
    const auto entry = store->wait("k", Deadline::in(20s));
    EXPECT_TRUE(entry.ok()) << entry.error().describe();
  });
  for (int i = 0; i < 50; ++i) {
    std::filesystem::remove_all(dir.path() + "/store");
    ASSERT_TRUE(open_store(url, soon()).ok());
  }
  EXPECT_TRUE(store->put("k", "v", {}, soon()).ok());
}

// Nobody may ever write to the pipe.
TEST(FileStore, PipesLinksAndSocketsWithNamesOfEntriesHoldNobodyUp) {
  const support::TempDir dir;
  const auto store = open_store("file://" + dir.path(), soon()).value();
  ASSERT_EQ(::mkfifo((dir.path() + "/k-pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mknod((dir.path() + "/k-socket").c_str(), S_IFSOCK | 0600, 0), 0);
  std::filesystem::create_symlink("elsewhere", dir.path() + "/k-link");
  std::filesystem::create_directory(dir.path() + "/k-directory");
  const support::Alarm alarm(20s);  // ends the test where open() waits
  for (const char* foreign : {"pipe", "socket", "link", "directory"})
    EXPECT_EQ(store->get(foreign, soon()).code(), Code::kCorrupt) << foreign;
  ASSERT_TRUE(store->put("k", "v", 1h, soon()).ok()) << "looks for what is over";
  EXPECT_EQ(store->list("", soon()).value(), std::vector<std::string>{"k"});
}

bool has_open(pid_t process, const std::string& path) {
  for (const auto& fd :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/fd"))
    if (std::error_code gone; std::filesystem::read_symlink(fd, gone) == path) return true;
  return false;
}

// A host that forks without exec (Python's multiprocessing) gives its child all that is open.
TEST(FileStore, AChildForkedWhileTheLockIsHeldDoesNotKeepIt) {
  const support::TempDir dir;
  const auto store = open_store("file://" + dir.path(), soon()).value();
  const std::string value(4u << 20, 'x');
  std::jthread writer([&](const std::stop_token& stop) {
    while (!stop.stop_requested())
      EXPECT_TRUE(store->put("big", value, {}, soon()).ok());
  });
  const auto until = Deadline::in(20s);
  pid_t child = -1;
  bool caught = false;
  while (!caught && !until.passed()) {
    child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;)
        ::pause();
    }
    caught = has_open(child, dir.path() + "/.lock");
    if (caught) break;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  ASSERT_TRUE(caught) << "no child was forked while the lock was held";
  writer.request_stop();
  writer.join();
  const auto put = store->put("k", "v", {}, Deadline::in(1s));
  EXPECT_TRUE(put.ok()) << put.error().describe();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(FileStore, AWriterKilledWithTheLockHeldBlocksNobody) {
  const support::TempDir dir;
  const auto store = open_store("file://" + dir.path(), soon()).value();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    // Only calls that are safe after fork: puts for ever until killed.
    const auto mine = open_store("file://" + dir.path(), soon());
    const std::string value(100'000, 'x');
    for (;;) {
      if (!mine.ok() || !(*mine)->put("k", value, {}, soon()).ok()) ::_exit(1);
      [[maybe_unused]] const auto n = ::write(ready[1], "x", 1);
    }
  }
  char byte;
  for (int i = 0; i < 20; ++i)
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_EQ(store->get("k", soon()).value()->value.size(), 100'000u) << "whole, never half";
  EXPECT_TRUE(store->put("k", "v", {}, soon()).ok());
}

}  // namespace
}  // namespace crossdock::rendezvous
