// Two engines' worth of transport in one process, for the contract suite: regions, identities, the
// exchange of keys and addresses that a handshake would do, a dial function over TCP, and a sink
// that judges every callback. Test-only; failures are gtest failures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mem/region_table.hpp"
#include "mem/shared_memory.hpp"
#include "transport/transport.hpp"

namespace crossdock::testing {

using transport::Endpoint;
using transport::Op;
using transport::Shard;
using transport::Slice;
using transport::Transport;

// One row of the suite.
struct TransportCase {
  std::string name;
  std::function<std::unique_ptr<Transport>(const transport::TransportContext&)> make;
  bool same_engine = false;    // the peer is the engine itself
  bool shared_memory = false;  // regions are memfds, as Engine::allocate() makes them
};
inline void PrintTo(const TransportCase& c, std::ostream* out) {
  *out << c.name;
}

// This process as a transport sees it.
transport::HostIdentity own_identity();

// Bytes that depend on position and seed; `matches` compares without a second buffer.
void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed);
bool matches_pattern(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t from = 0);
bool all_zero(std::span<const std::byte> bytes);
std::byte pattern_at(std::uint64_t position, std::uint64_t seed);

// Memory with a guard of 4 KiB at each end; private or shared, as the case says.
class TestMemory {
 public:
  TestMemory(std::size_t length, bool shared);
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::span<std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] mem::Backing backing() const;
  [[nodiscard]] bool guards_intact() const;

 private:
  static constexpr std::size_t kGuard = 4096;
  std::unique_ptr<std::byte[]> private_;
  mem::SharedMemory shared_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Counts what happens to each shard; fails the test when a shard finishes twice, reports bytes
// after its end, or more bytes than it has.
class TestSink final : public transport::ShardSink {
 public:
  struct Outcome {
    std::uint64_t bytes = 0;
    int finished = 0;
    std::uint32_t slices_done = 0;
    std::optional<Error> error;
  };

  void expect(const Shard& shard);
  // Called inside shard_progress / shard_finished, on the transport's thread.
  std::function<void(Shard&)> on_progress;
  std::function<void(Shard&)> on_finished;

  void shard_progress(Shard& shard, std::uint64_t bytes) noexcept override;
  void shard_finished(Shard& shard, const Error* error) noexcept override;

  // False when the deadline (20 s) passes first.
  [[nodiscard]] bool wait(const Shard& shard);
  [[nodiscard]] bool wait_all();
  [[nodiscard]] Outcome outcome(const Shard& shard);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const Shard*, Outcome> outcomes_;
};

// A shard with its own slices and stop flag. Not movable: the transport holds its address.
struct TestShard {
  TestShard(Op op, TestSink& sink) : sink_(sink) {
    shard.op = op;
    shard.sink = &sink;
    shard.stop = &stop;
    shard.deadline = Deadline::in(std::chrono::seconds(30));
  }
  // Cuts [local, local + length) into slices of at most `slice_bytes`.
  void add(std::byte* local, std::uint64_t remote, std::size_t length,
           const transport::RemoteRegion& region, std::uint32_t slice_bytes = 64u << 10);
  // Completes the shard; then it may be posted.
  Shard& ready();

  Shard shard;
  std::atomic<bool> stop{false};
  std::vector<Slice> slices;

 private:
  TestSink& sink_;
};

// One engine's side.
struct TestSide {
  TestSide(const TransportCase& c, std::uint64_t instance, std::string name);
  std::string name;
  std::uint64_t instance;
  mem::RegionTable regions;
  transport::TransportContext context;
  std::unique_ptr<Transport> transport;
};

class TransportFixture : public ::testing::TestWithParam<TransportCase> {
 protected:
  TransportFixture();
  ~TransportFixture() override;

  // The side that endpoints lead to; the initiator itself for loopback.
  TestSide& target() { return target_ ? *target_ : *initiator_; }
  TestSide& initiator() { return *initiator_; }
  transport::PeerInfo peer_info();
  std::unique_ptr<Endpoint> connect(std::uint32_t rail = 0);
  // Registers target memory and attaches it through `endpoint`. Kept until the test ends.
  transport::RemoteRegion& expose(const TestMemory& memory, Endpoint& endpoint,
                                  transfer::Access access = transfer::Access::kRemoteReadWrite);
  // Attaches the region exposed last through another endpoint.
  transport::RemoteRegion& reexpose(Endpoint& endpoint);
  // Memory of the kind that the case asks for.
  TestMemory memory(std::size_t length) { return TestMemory(length, GetParam().shared_memory); }
  static std::uint64_t address(const TestMemory& memory, std::uint64_t offset = 0) {
    return reinterpret_cast<std::uint64_t>(memory.data()) + offset;
  }

 private:
  Result<base::UniqueFd> dial(std::uint16_t lane, Deadline deadline);

  std::unique_ptr<TestSide> initiator_;
  std::unique_ptr<TestSide> target_;
  std::vector<std::unique_ptr<transport::RemoteRegion>> remotes_;
};

// Posts until taken; the queue may be full for a while.
Result<> post_patiently(Endpoint& endpoint, Shard& shard);

}  // namespace crossdock::testing
