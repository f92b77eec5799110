// Figures of the collectives for `crossdock bench symm`: gathers and tensors by copy engines, sums,
// rows of a table. A round is `kRepeat` calls of every rank on its own stream between two events,
// after a barrier of the streams; the slowest rank counts, and of the rounds the median. What a
// gather delivers is compared before anything is timed.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <functional>

#include <crossdock/coll/group.hpp>

#include "bench/statistics.hpp"
#include "bench/symm.hpp"
#include "coll/core.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;
using symm::u8;

constexpr u64 kLarge = u64{64} << 20;  // of a rank
constexpr u64 kSmall = 16 << 10;
constexpr u32 kRepeat = 20;
constexpr u32 kRowBytes = 7168;
constexpr u32 kShardRows = 65536;
constexpr u32 kFetched = 32768;  // 235 MB
constexpr u32 kFetchSms = 16;

class CollRig {
 public:
  static Result<CollRig> create(const symm::GroupOptions& ranks, u32 rounds) {
    CROSSDOCK_TRY(group, coll::Group::create({.ranks = ranks,
                                              .coll = {.session_bytes = kLarge * ranks.world,
                                                       .gathers = 32,
                                                       .reduce = true,
                                                       .tensor_bytes = kLarge,
                                                       .inflight = 2,
                                                       .shard_rows = kShardRows,
                                                       .row_bytes = kRowBytes,
                                                       .fetch_sms = kFetchSms,
                                                       .wait = std::chrono::seconds(30)}}));
    CollRig rig(std::move(group), rounds);
    for (const u32 r : rig.group_.local_ranks()) {
      symm::Rank& rank = rig.rank(r);
      CROSSDOCK_TRY(output, rank.allocate(kLarge * ranks.world));
      CROSSDOCK_TRY(input, rank.allocate(kLarge));
      CROSSDOCK_TRY(rows, rank.allocate(u64{kFetched} * kRowBytes));
      CROSSDOCK_TRY(numbers, rank.allocate(u64{kFetched} * sizeof(u32)));
      std::vector<u32> list;
      for (u32 i = 0; i < kFetched; ++i)
        list.push_back(rig.random_row(r, i));
      CROSSDOCK_CHECK_OK(symm::upload(rank, numbers.as<u32>(), list, rig.soon()));
      rig.memory_.push_back(
          {r, std::move(input), std::move(output), std::move(rows), std::move(numbers)});
    }
    return rig;
  }

  Result<> verify() {
    for (Memory& m : memory_) {
      const std::vector<u8> own(kSmall, static_cast<u8>(m.rank + 1));
      CROSSDOCK_CHECK_OK(symm::upload(rank(m.rank), m.input.as<u8>(), own, soon()));
    }
    for (Memory& m : memory_)
      CROSSDOCK_CHECK_OK(gather(m, kSmall, false));
    CROSSDOCK_CHECK_OK(group_.synchronize(soon()));
    for (const Memory& m : memory_) {
      CROSSDOCK_TRY(all, symm::download(rank(m.rank), m.output.as<u8>(), kSmall * world(), soon()));
      for (u64 i = 0; i < all.size(); ++i)
        if (all[i] != i / kSmall + 1)
          return make_error(Code::kCorrupt,
                            fmt::format("all-gather: byte {} at rank {} is {}", i, m.rank, all[i]));
    }
    return {};
  }

  Result<> measure(std::vector<Figure>& figures) {
    const u64 from_peers = world() > 1 ? world() - 1 : 1;  // one rank alone moves within its memory
    const auto rate = [&](const char* name, double us, u64 bytes) {
      figures.push_back(
          {.name = name, .value = static_cast<double>(bytes) / us / 1e3, .unit = "GB/s"});
    };
    CROSSDOCK_TRY(large, time([&](Memory& m) { return gather(m, kLarge, true); }));
    rate("all-gather by copy engines, 64 MiB a rank, in place", large, from_peers * kLarge);
    CROSSDOCK_TRY(copied, time([&](Memory& m) { return gather(m, kLarge, false); }));
    rate("all-gather by copy engines, 64 MiB a rank", copied, from_peers * kLarge);
    CROSSDOCK_TRY(small, time([&](Memory& m) { return gather(m, kSmall, true); }));
    figures.push_back(
        {.name = "all-gather by copy engines, 16 KiB a rank", .value = small, .unit = "us"});
    CROSSDOCK_TRY(sums, time([&](Memory& m) { return scatter(m); }));
    rate("reduce-scatter, bf16, 64 MiB a rank", sums, from_peers * kLarge / world());
    if (world() > 1) {
      CROSSDOCK_TRY(tensors, time([&](Memory& m) { return pass_on(m, kLarge); }));
      rate("send and receive, 64 MiB to the next rank", tensors, kLarge);
      CROSSDOCK_TRY(hop, time([&](Memory& m) { return pass_on(m, kSmall); }));
      figures.push_back(
          {.name = "send and receive, 16 KiB to the next rank", .value = hop, .unit = "us"});
    }
    CROSSDOCK_TRY(rows, time([&](Memory& m) {
                    return group_.fetch_rows(m.rank, m.numbers.address(), kFetched,
                                             m.rows.address());
                  }));
    const std::string name =
        fmt::format("rows fetched from {}, {} B, {} SMs", world() > 1 ? "peers" : "own memory",
                    kRowBytes, kFetchSms);
    rate(name.c_str(), rows, u64{kFetched} * kRowBytes);
    CROSSDOCK_TRY(met, time([&](Memory& m) { return group_.barrier(m.rank); }));
    figures.push_back({.name = "barrier of streams, no SM", .value = met, .unit = "us"});
    return {};
  }

 private:
  struct Memory {
    u32 rank;
    symm::LocalMemory input;
    symm::LocalMemory output;
    symm::LocalMemory rows;
    symm::LocalMemory numbers;
  };
  CollRig(coll::Group group, u32 rounds) : group_(std::move(group)), rounds_(rounds) {}
  [[nodiscard]] symm::Rank& rank(u32 r) const { return group_.core().group().rank(r); }
  [[nodiscard]] u32 world() const { return group_.world(); }
  static Deadline soon() { return Deadline::in(std::chrono::seconds(60)); }

  // Of another rank.
  [[nodiscard]] u32 random_row(u32 r, u32 i) const {
    const u32 mixed = device::mix(r * 0x9e3779b9u + i);
    const u32 owner = world() == 1 ? 0 : (r + 1 + mixed % (world() - 1)) % world();
    return owner * kShardRows + device::mix(mixed) % kShardRows;
  }
  Result<> gather(Memory& m, u64 bytes, bool in_place) {
    CROSSDOCK_TRY(session, group_.begin(m.rank));
    const void* input = m.input.address();
    if (in_place) {
      CROSSDOCK_TRY(view, session.input(bytes));
      input = view;
    }
    CROSSDOCK_CHECK_OK(session.all_gather(input, m.output.address(), bytes));
    return session.end();
  }
  Result<> scatter(Memory& m) {
    CROSSDOCK_TRY(session, group_.begin(m.rank));
    const u64 count = kLarge / world() / 32 * 16;
    CROSSDOCK_CHECK_OK(session.reduce_scatter(m.input.address(), m.output.address(), count,
                                              coll::DataType::kBf16));
    return session.end();
  }
  Result<> pass_on(Memory& m, u64 bytes) {
    const u32 next = (m.rank + 1) % world();
    const u32 previous = (m.rank + world() - 1) % world();
    CROSSDOCK_CHECK_OK(group_.send(m.rank, next, m.input.address(), bytes));
    return group_.receive(m.rank, previous, m.output.address(), bytes);
  }

  struct Timed {
    cuda::Event start;
    cuda::Event end;
  };
  // Microseconds of one call.
  Result<double> time(const std::function<Result<>(Memory&)>& call) {
    std::vector<double> us;
    for (u32 round = 0; round <= rounds_; ++round) {
      CROSSDOCK_TRY(took, time_once(call));
      if (round > 0) us.push_back(took / kRepeat);
    }
    return median(us);
  }
  Result<double> time_once(const std::function<Result<>(Memory&)>& call) {
    std::vector<Timed> timed;
    for (const Memory& m : memory_) {
      const cuda::Stream& stream = *rank(m.rank).device().stream();
      CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      CROSSDOCK_CHECK_OK(group_.barrier(m.rank));
      CROSSDOCK_CHECK_OK(start.record(stream));
      timed.push_back({std::move(start), std::move(end)});
    }
    for (u32 i = 0; i < kRepeat; ++i)
      for (Memory& m : memory_)
        CROSSDOCK_CHECK_OK(call(m));
    for (std::size_t i = 0; i < memory_.size(); ++i)
      CROSSDOCK_CHECK_OK(timed[i].end.record(*rank(memory_[i].rank).device().stream()));
    CROSSDOCK_CHECK_OK(group_.synchronize(soon()));
    double slowest = 0;
    for (const Timed& t : timed) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(t.start, t.end));
      slowest = std::max(slowest, static_cast<double>(ms) * 1e3);
    }
    return slowest;
  }

  coll::Group group_;
  u32 rounds_;
  std::vector<Memory> memory_;
};

}  // namespace

Result<> measure_collectives(const SymmBench& options, const symm::GroupOptions& group,
                             std::vector<Figure>& figures) {
  CROSSDOCK_TRY(rig, CollRig::create(group, options.repeat));
  CROSSDOCK_CHECK_OK(rig.verify());
  return rig.measure(figures);
}

}  // namespace crossdock::tools::bench
