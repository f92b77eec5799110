// Which words a wait is for, and what to say when they do not come. See board.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "coll/board.hpp"

#include <fmt/format.h>
#include <optional>

#include <crossdock/layout/fault.cuh>

namespace crossdock::coll {
namespace {

u64 from_all(const Window& w, const Awaited& a) {
  switch (a.what) {
    case What::kFree:
      return w.free;
    case What::kPosted:
      return w.posted_at(a.index, 0);
    case What::kSeen:
      return w.seen;
    default:
      return w.here;
  }
}

std::string text_of(const Awaited& a) {
  switch (a.what) {
    case What::kFree:
      return "to have read the inputs of the session before";
    case What::kPosted:
      return fmt::format("to give its input to gather or scatter {} of the session, of {} bytes",
                         a.index, tag_bytes(a.value));
    case What::kCredit:
      return fmt::format("to receive the tensor that was sent in slot {} before", a.index);
    case What::kArrived:
      return fmt::format("to send a tensor of {} bytes", tag_bytes(a.value));
    case What::kSeen:
      return "to pass the barrier before";
    case What::kHere:
      return "to come to the barrier";
    default:
      return "to say that it has not failed";
  }
}

Error error(Code code, std::string message) {
  return Error{.code = code,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = std::move(message) +
                          "; what the stream did afterwards is of no use, and calls of the group "
                          "are refused until its ranks reset() it"};
}

const char* call_of(u64 value) {
  switch (static_cast<Said>(value >> 62)) {
    case Said::kScatter:
      return "reduce_scatter";
    case Said::kTensor:
      return "send";
    default:
      return "all_gather";
  }
}

// The peer has come, with something else.
std::optional<Error> differs(const symm::Rank& rank, const Awaited& a, u32 peer, u64 seen) {
  if (seen == 0 || (a.what != What::kPosted && a.what != What::kArrived)) return std::nullopt;
  if (a.what == What::kArrived)
    return error(
        Code::kIncompatible,
        fmt::format("coll: rank {} sends a tensor of {} bytes, rank {} receives one of {}: "
                    "both name the same size",
                    peer, tag_bytes(seen), rank.rank(), tag_bytes(a.value)));
  return error(
      Code::kIncompatible,
      fmt::format("coll: call {} of the session is {} of {} bytes at {} on rank {}, and {} of {} "
                  "bytes at {} on rank {}: all ranks make the same calls with the same sizes",
                  a.index, call_of(seen), tag_bytes(seen), (seen >> 32 & 0x3fffffffu) * 128, peer,
                  call_of(a.value), tag_bytes(a.value), (a.value >> 32 & 0x3fffffffu) * 128,
                  rank.rank()));
}

}  // namespace

std::vector<AwaitedWord> words_of(const symm::Rank& rank, const Window& w, const Awaited& a) {
  if (a.what == What::kFailed) return {{rank.at<u64>(w.failed), 0, device::kNoPeer}};
  if (a.what == What::kCredit)
    return {{rank.at<u64>(w.credit_at(a.peer, a.index)), a.value, a.peer}};
  if (a.what == What::kArrived)
    return {{rank.at<u64>(w.arrived_at(a.peer, a.index)), a.value, a.peer}};
  std::vector<AwaitedWord> words;
  const u64 first = from_all(w, a);
  for (u32 peer = 0; peer < w.world; ++peer)
    if (peer != rank.rank()) words.push_back({rank.at<u64>(first + u64{peer} * 8), a.value, peer});
  return words;
}

Steps& Steps::await(u32 site, const Awaited& awaited) {
  const std::vector<AwaitedWord> words = words_of(*rank_, *window_, awaited);
  if (words.empty()) return *this;
  Mark* const mark = marks_ + site;
  say(&mark->what, awaited.packed());
  say(&mark->value, awaited.value);
  say(&mark->state, Mark::kWaiting);
  for (const AwaitedWord& w : words)
    ops_.push_back({WordOp::Kind::kWait, w.word, w.value});
  if (awaited.what != What::kFailed)
    for (const AwaitedWord& w : words)
      say(w.word, 0);
  return say(&mark->state, Mark::kNone);
}

Steps& Steps::tell_peers(u64 offset, u64 value) {
  for (u32 i = 1; i < window_->world; ++i)
    say(rank_->at<u64>(offset, (rank_->rank() + i) % window_->world), value);
  return *this;
}

Error explain(const symm::Rank& rank, const Awaited& a, const std::vector<AwaitedWord>& words,
              const std::vector<u64>& seen, std::chrono::nanoseconds waited) {
  if (a.what == What::kFailed)
    return error(Code::kPeerLost, fmt::format("coll: rank {} was told by rank {} that it has "
                                              "failed; the error of rank {} says why",
                                              rank.rank(), seen[0] - 1, seen[0] - 1));
  std::string missing;
  std::size_t count = 0;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (seen[i] == words[i].value) continue;
    if (auto other = differs(rank, a, words[i].peer, seen[i])) return *std::move(other);
    missing += fmt::format("{}{}", count++ == 0 ? "" : ", ", words[i].peer);
  }
  return error(Code::kPeerLost, fmt::format("coll: rank {} waited {:.3f} ms for {} {} {}",
                                            rank.rank(), static_cast<double>(waited.count()) / 1e6,
                                            count == 1 ? "rank" : "ranks", missing, text_of(a)));
}

}  // namespace crossdock::coll
