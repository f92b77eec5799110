// The contract between the transfer engine and a transport. Every transport is a folder beside this
// file with the same file names (transport.hpp/.cpp, endpoint.hpp/.cpp, ...), and every one passes
// tests/contract/transport_contract_test.cpp.
//
//   Transport (one per engine and kind)          what it can reach, its region keys, its threads
//     └─ Endpoint (one per peer and rail)        executes shards: runs of slices of one transfer
//
//   engine                     endpoint                          peer
//     │ post(shard) ─────────────>│ moves slice by slice ───────────>│
//     │<── shard_progress(bytes) ─│                                  │
//     │ cancel(shard) / sever() ─>│ stops, quiesces                  │
//     │<── shard_finished(error?) │ exactly once; buffers untouched from here on
//
// Threads: post, cancel, sever, attach may be called by any thread. The sink may be called by any
// thread of the transport, or by the thread inside post().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/transfer/types.hpp>

#include "base/fd.hpp"
#include "mem/region_table.hpp"
#include "wire/control.hpp"

namespace crossdock::base {
class Config;
class Logger;
class Registry;
class Tracer;
}  // namespace crossdock::base

namespace crossdock::transport {

using transfer::Op;

// How many kinds of transport one engine can hold; indexes RemoteRegion::access.
inline constexpr std::size_t kMaxTransports = 4;

// What an endpoint learned about a remote region when it attached it. `delta` is added to a remote
// address to get the address this process uses (a mapping); `mode` is the transport's own.
struct RemoteAccess {
  std::int64_t delta = 0;
  std::uint32_t mode = 0;
};

// A region of the peer. Owned by the engine's peer object, at a stable address until every shard
// that names it has finished.
struct RemoteRegion {
  mem::RegionId id = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  transfer::Access access = transfer::Access::kRemoteReadWrite;
  std::string label;
  std::vector<std::pair<std::string, std::string>>
      keys;  // transport name -> key of export_region()
  std::array<std::optional<RemoteAccess>, kMaxTransports> attached = {};  // by transport slot
  std::atomic<std::uint32_t> leases{0};                                   // transfers in flight
  std::atomic<bool> revoked{false};
};

// One contiguous copy of at most `transfer.slice_bytes` (adjacent requests are merged before the
// cut).
struct Slice {
  std::byte* local = nullptr;
  std::uint64_t remote = 0;
  const RemoteRegion* region = nullptr;
  std::uint32_t length = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(Slice) == 32);

struct Shard;

class ShardSink {
 public:
  // `bytes` more are in place at the destination. May be called in batches.
  virtual void shard_progress(Shard& shard, std::uint64_t bytes) noexcept = 0;
  // The shard is over: null when every slice is in place, otherwise why not; `shard.slices_done`
  // slices from the front are known to be in place. Nobody touches its buffers from here on. The
  // endpoint must not touch `shard` after this call.
  virtual void shard_finished(Shard& shard, const Error* error) noexcept = 0;

 protected:
  ~ShardSink() = default;
};

// The unit the engine posts: slices of one transfer for one rail, of one direction, in order.
// Allocated and recycled by the engine.
struct Shard {
  // Set by the engine before post().
  Op op = Op::kWrite;
  std::span<const Slice> slices;
  std::uint64_t bytes = 0;
  std::uint64_t transfer_id = 0;
  Deadline deadline = Deadline::now();
  const std::atomic<bool>* stop = nullptr;  // set to true: start no further slice
  ShardSink* sink = nullptr;

  // The endpoint's from post() until shard_finished().
  std::uint32_t slices_done = 0;
  // With an error: the connection ended, whoever ended it, while some of it was under way, and the
  // peer may still put that in place. The engine sets it to false before post().
  bool in_doubt = false;
  Shard* next = nullptr;  // intrusive queue link
  std::uint64_t scratch[6] = {};

  // The engine's own.
  void* owner = nullptr;
  std::uint32_t in_flight = 0;  // through std::atomic_ref
  std::uint32_t attempts = 0;
  std::uint64_t progress = 0;  // bytes reported so far
  std::uint64_t back_ns = 0;   // when it came back in doubt, by base::now_ns()
};

using HostIdentity = wire::HostIdentity;

// The peer as a transport sees it while it connects.
struct PeerInfo {
  std::string name;
  std::uint64_t instance = 0;
  HostIdentity host;
  std::string address;  // what the peer's transport of the same name returned from local_address()
  // Connects a data lane to the peer's control port and does the whole handshake (version,
  // authentication, instance check); the descriptor is non-blocking. `lane` is told to the peer.
  std::function<Result<base::UniqueFd>(std::uint16_t lane, Deadline)> dial;
};

// A data lane that a peer opened towards us, after the handshake.
struct InboundLane {
  base::UniqueFd fd;  // non-blocking
  std::string peer_name;
  std::uint64_t session = 0;  // of the peer with this engine: a peer may have several
  std::uint16_t lane = 0;
};

class Endpoint {
 public:
  // Precondition: every posted shard has finished.
  virtual ~Endpoint() = default;
  // Takes the shard; shard_finished() follows exactly once, perhaps before post() returns. An error
  // means not taken: kWouldBlock (queue full, try later), kPeerLost or kClosed (severed before).
  virtual Result<> post(Shard& shard) = 0;
  // `*shard.stop` is set: finish the shard as soon as nothing touches its buffers. A hint; harmless
  // for a shard that has finished in the meantime (the address is only compared).
  virtual void cancel(const Shard& shard) = 0;
  // Gives the peer up: cuts the connection so that no byte can follow, then finishes every shard
  // with `why`. Later posts return it. Idempotent; returns at once, the shards finish soon.
  virtual void sever(const Error& why) = 0;
  // Makes a region usable; fills RemoteRegion::attached[slot]. kUnsupported when this transport
  // cannot reach that memory. May be called again for an attached region.
  virtual Result<RemoteAccess> attach(const RemoteRegion& region) = 0;
  // Undoes attach(). Precondition: no shard in flight names it.
  virtual void detach(const RemoteRegion& region) = 0;
  // Bytes posted and not finished: the engine posts to the rail with the fewest.
  [[nodiscard]] virtual std::uint64_t queued_bytes() const noexcept = 0;
};

struct TransportContext {
  std::size_t slot = 0;                  // index into RemoteRegion::attached
  const base::Config* config = nullptr;  // all of these outlive the transport
  base::Logger* log = nullptr;
  base::Registry* metrics = nullptr;
  base::Tracer* tracer = nullptr;
  mem::RegionTable* regions = nullptr;  // of this engine: inbound requests lease from it
  std::uint64_t instance = 0;
  HostIdentity host;
};

class Transport {
 public:
  // Joins its threads. Precondition: every endpoint is destroyed.
  virtual ~Transport() = default;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  // Told to every peer in the handshake; at most 512 bytes, may be empty.
  [[nodiscard]] virtual std::string local_address() const = 0;
  // Whether peers map memory that this engine allocated: then it has to be a memfd.
  [[nodiscard]] virtual bool maps_memory() const noexcept { return false; }
  // The key a peer needs to reach this region; at most 64 bytes, may be empty.
  [[nodiscard]] virtual std::string export_region(const mem::RegionRecord& region) const = 0;
  // Whether the peer can be reached this way: ok, or why not (kUnreachable).
  [[nodiscard]] virtual Result<> reaches(const PeerInfo& peer) = 0;
  // Parallel rails to one peer; connect() is called with 0 .. num_rails()-1.
  [[nodiscard]] virtual std::uint32_t num_rails() const noexcept = 0;
  virtual Result<std::unique_ptr<Endpoint>> connect(const PeerInfo& peer, std::uint32_t rail,
                                                    Deadline deadline) = 0;
  // Whether peers dial data lanes to this transport.
  [[nodiscard]] virtual bool takes_lanes() const noexcept { return false; }
  // A lane that a peer dialled. The default refuses it.
  virtual Result<> accept(InboundLane lane);
  // Ends every inbound lane of that session and returns when none of them can touch this engine's
  // memory any more. False: this transport cannot prove it alone (the peer copies by itself and
  // must acknowledge or die).
  virtual bool sever_inbound(std::uint64_t session);
  // A peer is about to be welcomed on a lane of this number: ends the one it had before and returns
  // when that can touch this engine's memory no more. So a welcome tells the peer that nothing it
  // sent on the old lane will still arrive.
  virtual void retire_lane(std::uint64_t /*session*/, std::uint16_t /*lane*/) {}
  // A slice of this many bytes in a shard of one is executed inside post().
  [[nodiscard]] virtual std::uint64_t inline_bytes() const noexcept { return 0; }
};

// The transports that `transport.enabled` asks for, best first ("auto": loopback, shm, tcp).
// kInvalidArgument for a name that does not exist, with the list of those that do.
// A name like "faulty+tcp" wraps the second in the fault injector.
Result<std::vector<std::unique_ptr<Transport>>> make_transports(const TransportContext& context);

}  // namespace crossdock::transport
