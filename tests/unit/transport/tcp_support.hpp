// What the tests of the tcp transport share: connected loopback sockets, memory with a pattern, and
// a sink that counts and waits. Each object is used by one test.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <vector>

#include "base/fd.hpp"
#include "mem/region_table.hpp"
#include "transport/tcp/transport.hpp"
#include "transport/transport.hpp"
#include "wire/data.hpp"

namespace crossdock::transport::tcp::test {

struct SocketPair {
  base::UniqueFd initiator;
  base::UniqueFd target;
};

inline void set_nonblocking(int fd) {
  ASSERT_EQ(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
}

// A real TCP connection, so that resets exist. Both ends non-blocking.
inline SocketPair tcp_pair() {
  const base::UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), generic, size), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), generic, &size), 0);
  SocketPair pair;
  pair.initiator = base::UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(pair.initiator.get(), generic, size), 0);
  pair.target = base::UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_TRUE(pair.target.valid());
  set_nonblocking(pair.initiator.get());
  set_nonblocking(pair.target.get());
  return pair;
}

// A connection without segments, windows and retransmission. Both ends non-blocking.
inline SocketPair local_pair() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

inline Deadline in_seconds(int s) {
  return Deadline::in(std::chrono::seconds(s));
}

// Byte i of a pattern, so that a byte in the wrong place shows.
inline std::byte pattern(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
  return static_cast<std::byte>((x ^ (x >> 29)) >> 32);
}
inline void fill_pattern(std::span<std::byte> out, std::uint64_t seed) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = pattern(seed, i);
}
inline std::uint64_t address_of(const void* p) {
  return reinterpret_cast<std::uint64_t>(p);
}

class WaitingSink final : public ShardSink {
 public:
  void shard_progress(Shard&, std::uint64_t bytes) noexcept override { progress_ += bytes; }
  void shard_finished(Shard& shard, const Error* error) noexcept override {
    const std::lock_guard lock(mutex_);
    finished_.push_back(&shard);
    errors_.push_back(error != nullptr ? std::optional<Error>(*error) : std::nullopt);
    changed_.notify_all();
  }
  // Whether `n` shards have finished within `seconds`.
  bool wait(std::size_t n, int seconds = 20) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(seconds),
                             [&] { return finished_.size() >= n; });
  }
  std::size_t count() {
    const std::lock_guard lock(mutex_);
    return finished_.size();
  }
  std::optional<Error> error(std::size_t i) {
    const std::lock_guard lock(mutex_);
    return errors_.at(i);
  }
  Shard* shard(std::size_t i) {
    const std::lock_guard lock(mutex_);
    return finished_.at(i);
  }
  std::uint64_t progress() const { return progress_.load(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Shard*> finished_;
  std::vector<std::optional<Error>> errors_;
  std::atomic<std::uint64_t> progress_{0};
};

// A shard with its slices and stop flag, as the engine would own them.
struct OwnedShard {
  std::vector<Slice> slices;
  std::atomic<bool> stop{false};
  Shard shard;

  Shard& make(Op op, ShardSink& sink, Deadline deadline = in_seconds(30)) {
    shard = Shard();
    shard.op = op;
    shard.slices = slices;
    for (const Slice& s : slices)
      shard.bytes += s.length;
    shard.deadline = deadline;
    shard.stop = &stop;
    shard.sink = &sink;
    return shard;
  }
  void add(std::byte* local, const std::byte* remote, std::size_t length) {
    slices.push_back({local, address_of(remote), nullptr, static_cast<std::uint32_t>(length), 0});
  }
};

// True once `condition()` holds; looks again every millisecond for at most `seconds`.
template <class F>
bool eventually(F&& condition, int seconds = 20) {
  const Deadline deadline = in_seconds(seconds);
  while (!condition()) {
    if (deadline.passed()) return false;
    ::poll(nullptr, 0, 1);
  }
  return true;
}

}  // namespace crossdock::transport::tcp::test
