// Control messages between KvReceiver and KvSender, and their codec: the only place of this layer
// that parses bytes from a peer. Little endian, versioned, every length checked before use; any
// input yields a message or an Error. Pure functions, any thread. Fuzzed by
// tests/fuzz/kv_messages.cpp.
//
//   receiver -> sender   Ticket   "write the pages of this request there"; long tables take several
//   sender -> receiver   Ready    "this is the connection I would write on; does the ticket stand?"
//   receiver -> sender   Go       "it does": nothing is written before; as long as that connection
//                                 lives, it stands for later tickets too
//   sender -> receiver   Parts    rides on a transfer: "these pages of these layers are in place"
//   receiver -> sender   Abort    "stop this request, then answer Stopped"
//   sender -> receiver   Stopped  "nothing of mine will touch your pages of this request any more"
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <crossdock/kv/page_layout.hpp>
#include <crossdock/kv/page_pool.hpp>

namespace crossdock::kv::message {

inline constexpr std::uint8_t kVersion = 2;
// Limits of one message; a notification carries at most 60 KiB.
inline constexpr std::size_t kMostPages = 12'000;
inline constexpr std::size_t kMostParts = 2'048;
inline constexpr std::size_t kLongestText = 1'024;

struct Ticket {
  RequestId request = 0;
  // Chosen by the receiver, new for each expectation; the other messages carry it, so that one that
  // is late never speaks of a later use of the same request id.
  std::uint64_t ticket = 0;
  std::uint64_t life =
      0;             // of the receiver: differs for each one made; tickets of one are ascending
  ModelShape shape;  // the name does not travel
  LayoutOptions layout;
  std::uint64_t base = 0;       // address of the receiver's pool in its own address space
  std::uint32_t sender_tp = 1;  // how many senders the receiver counts on, and which one this is
  std::uint32_t sender_rank = 0;
  std::uint32_t expires_ms = 0;   // from arrival
  std::uint32_t first_page = 0;   // page of the request that pages[0] of the whole table is for
  std::uint32_t total_pages = 0;  // of the whole table
  std::uint32_t chunk_first = 0;  // where `pages` starts in the table
  std::string address;            // of the receiver's engine, for when its name cannot be dialled
  std::vector<PageId> pages;
};

struct Ready {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  std::uint32_t sender_rank = 0;
};

struct Go {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  std::uint64_t life = 0;
  std::uint64_t later = 0;  // tickets of this life from here on need no Ready on that connection
};

struct Abort {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  std::string reason;
};

// Layers [first_layer, +num_layers) of the request's pages [first_page, +num_pages).
struct Part {
  std::uint32_t first_layer = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t first_page = 0;
  std::uint32_t num_pages = 0;
  friend bool operator==(const Part&, const Part&) = default;
};

struct Parts {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  std::uint32_t sender_rank = 0;
  std::vector<Part> parts;
};

struct Stopped {
  RequestId request = 0;
  std::uint64_t ticket = 0;
  std::uint32_t sender_rank = 0;
  Code code = Code::kCancelled;
  std::string reason;
};

using Any = std::variant<Ticket, Ready, Go, Parts, Abort, Stopped>;

// Texts are cut to kLongestText. Precondition: pages and parts within the limits.
std::string encode(const Any& message);
// kIncompatible for another version, naming both; kInvalidArgument for anything malformed.
Result<Any> decode(std::string_view bytes);

// Splits the table of `ticket` into messages that fit.
std::vector<Ticket> chunks_of(const Ticket& ticket);

}  // namespace crossdock::kv::message
