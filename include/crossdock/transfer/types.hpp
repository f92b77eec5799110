// The plain types of the transfer engine: requests, options, states, reports. Values only; a struct
// here is thread-compatible and may be copied freely.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/error.hpp>

namespace crossdock::transfer {
inline namespace v1 {

// Direction seen from the engine that submits: kWrite moves local bytes to the peer, kRead fetches.
enum class Op : std::uint8_t { kRead = 0, kWrite = 1 };
std::string_view to_string(Op op) noexcept;

// One contiguous copy. `local` lies in a region of this engine, `remote` is an address in the
// address space of the peer, inside one of its regions. `length` in bytes, at least 1.
struct Request {
  Op op = Op::kWrite;
  void* local = nullptr;
  std::uint64_t remote = 0;
  std::size_t length = 0;
};

// What a transfer goes through. The last three are terminal, and terminal means quiesced: nothing
// will read or write its buffers any more, on either side.
enum class State : std::uint8_t {
  kPosted = 0,      // accepted, nothing moved yet
  kActive = 1,      // bytes are moving
  kCancelling = 2,  // cancelled or past its deadline; buffers may still be touched
  kDelivered = 3,   // every byte is visible at its destination
  kFailed = 4,      // see the error
  kCancelled = 5,   // on request
};
std::string_view to_string(State state) noexcept;
constexpr bool is_terminal(State state) noexcept {
  return state >= State::kDelivered;
}

struct Status {
  State state = State::kPosted;
  std::uint64_t bytes_done = 0;  // grows slice by slice
  std::uint64_t bytes_total = 0;
  std::optional<Error> error = {};  // set when failed or cancelled
};

// A line of an engine's log. Its texts are there for the call that gets it; `level` is "trace",
// "debug", "info", "warn" or "error", `component` the part that logs ("transport.tcp").
struct LogLine {
  std::string_view level;
  std::string_view component;
  std::string_view message;
};

// A message to a named mailbox of a peer; `payload` at most 60 KiB, `mailbox` at most 64 bytes.
struct Notification {
  std::string mailbox;
  std::string payload;
};

// What arrives in a mailbox. kPeerLost tells that the sender is gone and that nothing it started
// will touch this engine's memory any more.
struct Message {
  // kLinkLost goes to Engine::watch_peers() alone: the connection that a Peer handle of this engine
  // stands on ended. Whether that peer may still touch this engine's memory, it does not say.
  enum class Kind : std::uint8_t { kNotification = 0, kPeerLost = 1, kLinkLost = 2 };
  Kind kind = Kind::kNotification;
  std::string peer;  // name of the sending engine; with kLinkLost, the one it was opened by
  std::uint64_t peer_instance = 0;  // changes when the peer restarts
  std::string payload;
};

struct TransferOptions {
  // When it passes, the transfer is stopped, quiesced and failed with kDeadline.
  // Unset: `transfer.timeout` of the configuration from the moment of submission.
  std::optional<Deadline> deadline = {};
  // Stopped and failed in the same way when none of its bytes has moved for this long (at the
  // latest a quarter of it later); before its first, none of any transfer to that peer, and after
  // its last no checksum: waiting for one's turn is no stall. 0: no such limit. Unset:
  // `transfer.stall_timeout` of the configuration where `deadline` is unset too, else none.
  std::optional<std::chrono::nanoseconds> stall_timeout = {};
  // Delivered to the peer after every byte of this transfer is visible there; the transfer counts
  // as delivered once the peer's engine has it.
  std::optional<Notification> notification = {};
  // Compares XXH3-64 of source and destination after the copy; a difference fails with kCorrupt.
  // Unset: `transfer.checksum` of the configuration.
  std::optional<bool> checksum = {};
  // Called exactly once, with the terminal status, on the thread that finished the transfer (it may
  // be the submitting one, before submit() returns). It may submit; it must not wait.
  std::function<void(const Status&)> on_complete = {};
  // Carried along for the caller: shown by Engine::pending() and in traces.
  std::uint64_t user_data = 0;
};

enum class Access : std::uint8_t { kLocalOnly = 0, kRemoteRead = 1, kRemoteReadWrite = 3 };

struct RegionOptions {
  Access access = Access::kRemoteReadWrite;
  std::string label = {};  // at most 64 bytes; peers see it
};

// Where registered memory may start: a multiple of this many bytes, as every allocator gives it.
// A start that is not one is nearly always a pointer into the middle of something.
inline constexpr std::size_t kRegionAlignment = 16;

struct MemoryRange {
  void* address = nullptr;
  std::size_t length = 0;
};

// A region of a peer as this engine knows it.
struct RemoteRegion {
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  Access access = Access::kRemoteReadWrite;
  std::string label;
};

struct PendingTransfer {
  std::uint64_t id = 0;
  std::string peer;
  Op op = Op::kWrite;  // of the first request
  Status status;
  Deadline deadline = Deadline::now();
  std::uint64_t user_data = 0;
};

}  // namespace v1
}  // namespace crossdock::transfer
