// What went wrong, in a form a server can act on: which kind of error, what it damaged, whether a
// retry can help, the native code underneath, and one sentence for a person.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

namespace crossdock {
inline namespace v1 {

// The kind of failure. Numbers are part of the C API and of the wire protocol: append only.
enum class Code : std::uint16_t {
  kOk = 0,
  kInvalidArgument = 1,  // the caller's mistake: the message names rule, value and fix
  kNotFound = 2,         // no such peer, region, key or file
  kBusy = 3,             // in use (a leased region, a bound port); try again when it is free
  kWouldBlock = 4,       // a bounded queue is full; nothing was accepted
  kDeadline = 5,         // the deadline passed first
  kCancelled = 6,        // cancelled on request
  kPeerLost = 7,         // the peer died, restarted, or stopped answering
  kUnreachable = 8,      // no path to the peer
  kNoMemory = 9,         // memory, descriptors, disk or device memory ran out
  kUnsupported = 10,     // this machine, build or transport cannot do it
  kIncompatible = 11,    // the peer speaks another protocol version, or disagrees on a size
  kClosed = 12,          // the object was closed before
  kInternal = 13,        // a bug of this library
  kCorrupt = 14,         // a checksum did not match
  kDenied = 15,          // authentication or permission refused
};

// The largest thing that is damaged and has to be made anew.
enum class Scope : std::uint8_t { kCall = 0, kTransfer = 1, kPeer = 2, kDevice = 3, kEngine = 4 };

// Whether doing the same again can succeed.
enum class Retry : std::uint8_t { kNo = 0, kLater = 1, kAfterReconnect = 2 };

// The code of the system underneath, kept as it was.
struct Native {
  enum class Domain : std::uint8_t { kNone = 0, kErrno, kCuda, kNvrtc, kVerbs };
  Domain domain = Domain::kNone;
  std::int64_t value = 0;
  friend bool operator==(const Native&, const Native&) = default;
};

std::string_view to_string(Code code) noexcept;    // "kPeerLost" -> "peer lost"
std::string_view to_string(Scope scope) noexcept;  // "peer"
std::string_view to_string(Retry retry) noexcept;  // "after reconnect"

struct Error {
  Code code = Code::kInternal;
  Scope scope = Scope::kCall;
  Retry retry = Retry::kNo;
  Native native = {};
  std::string message = {};
  std::source_location where = std::source_location::current();

  // "peer lost (scope peer, retry after reconnect): <message> [errno 104: ...] (engine.cpp:17)"
  std::string describe() const;
};

// Shorthands; each records the place it is called from.
[[nodiscard]] Error make_error(Code code, std::string message,
                               std::source_location where = std::source_location::current());
[[nodiscard]] Error invalid_argument(std::string message,
                                     std::source_location where = std::source_location::current());
// `message` says what was being done ("bind 127.0.0.1:80"); the text of `errno_value` is appended.
[[nodiscard]] Error errno_error(int errno_value, std::string message,
                                std::source_location where = std::source_location::current());

}  // namespace v1
}  // namespace crossdock
