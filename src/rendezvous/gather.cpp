// all_gather and barrier over any store: each rank puts `name/rank` and waits for the others'.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "rendezvous/retry.hpp"
#include "rendezvous/store.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

constexpr std::uint32_t kMaxWorld = 65'536;
constexpr std::size_t kMaxNamedRanks = 16;  // in one error message
constexpr std::chrono::milliseconds kWithdrawal{100};

std::string key_of(const Gathering& gathering, std::uint32_t rank) {
  return fmt::format("{}/{}", gathering.name, rank);
}

Result<> check(const Gathering& gathering) {
  if (gathering.name.empty() || gathering.name.size() > kMaxKeyBytes - 16)
    return invalid_argument(fmt::format("the name of a gathering must have 1 to {} bytes, not {}",
                                        kMaxKeyBytes - 16, gathering.name.size()));
  if (gathering.world == 0 || gathering.world > kMaxWorld || gathering.rank >= gathering.world)
    return invalid_argument(
        fmt::format("rank {} of world {} in gathering '{}': world must be 1 to "
                    "{} and rank below it",
                    gathering.rank, gathering.world, gathering.name, kMaxWorld));
  return {};
}

Error rank_is_taken(const Store& store, const Gathering& gathering) {
  return invalid_argument(
      fmt::format("rank {} of gathering '{}' is taken already in {}: two processes have this rank, "
                  "or the name was used before (use a new name, or remove its keys)",
                  gathering.rank, gathering.name, store.describe()));
}

// Where `key` has this value; 0 when it has not, or the store does not say.
std::uint64_t revision_of(Store& store, const std::string& key, std::string_view value,
                          Deadline deadline) {
  const auto entry = store.get(key, deadline);
  return entry.ok() && *entry && (*entry)->value == value ? (*entry)->revision : 0;
}

// After a put of which nobody knows whether it was executed.
void withdraw_doubtful(Store& store, const std::string& key, std::string_view value) {
  const auto deadline = Deadline::in(kWithdrawal);
  const auto revision = revision_of(store, key, value, deadline);
  if (revision != 0) (void)store.compare_and_remove(key, revision, deadline);
}

Result<> contribute(Store& store, const Gathering& gathering, std::string_view bytes,
                    Deadline deadline) {
  CROSSDOCK_TRY(
      part, wire::encode_gather_part(
                {.rank = gathering.rank, .world = gathering.world, .bytes = std::string(bytes)}));
  const std::string key = key_of(gathering, gathering.rank);
  Backoff backoff(5, 200);
  for (bool doubtful = false;; doubtful = true) {
    Result<bool> put = store.compare_and_put(key, 0, part, deadline);
    // A plain HTTP service cannot compare; then two processes of one rank go unnoticed.
    if (put.code() == Code::kUnsupported) return store.put(key, part, std::nullopt, deadline);
    if (put.ok() && *put) return {};
    if (put.ok()) {
      // It may be this rank's own, of a try whose answer was lost.
      const auto there = doubtful ? revision_of(store, key, part, deadline) : 0;
      return there != 0 ? Result<>() : rank_is_taken(store, gathering);
    }
    if (put.code() == Code::kPeerLost && !deadline.passed()) {
      backoff.pause(deadline);
      continue;
    }
    if (doubtful || put.code() == Code::kPeerLost || put.code() == Code::kDeadline)
      withdraw_doubtful(store, key, part);
    return std::move(put).error();
  }
}

Error late(const Gathering& gathering, std::string_view what) {
  return Error{.code = Code::kDeadline,
               .retry = Retry::kLater,
               .message = fmt::format("gathering '{}': {}", gathering.name, what)};
}

// Called when waiting for `first` ended by the deadline with `waited`; the ranks that are not there
// are found with what is left until the real deadline.
Error name_missing(Store& store, const Gathering& gathering, std::uint32_t first,
                   const Error& waited, Deadline deadline) {
  std::string missing;
  std::string unknown;  // why the list has an end before the last rank
  std::size_t num_missing = 0;
  for (std::uint32_t rank = first; rank < gathering.world && unknown.empty(); ++rank) {
    const auto entry = store.get(key_of(gathering, rank), deadline);
    if (!entry.ok()) unknown = entry.error().message;
    if (!entry.ok() || entry->has_value() || ++num_missing > kMaxNamedRanks) continue;
    missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
  }
  if (num_missing == 0)  // it is the store that did not come, or all came at the last moment
    return late(gathering, unknown.empty() ? waited.message : "who came is unknown: " + unknown);
  if (num_missing > kMaxNamedRanks)
    missing += fmt::format(" and {} more", num_missing - kMaxNamedRanks);
  if (!unknown.empty()) missing += "; and the rest is unknown: " + unknown;
  return late(gathering, fmt::format("of {} {} these did not come in time: {}", gathering.world,
                                     gathering.noun, missing));
}

Result<std::string> take_part(const Gathering& gathering, std::uint32_t rank, const Entry& entry) {
  CROSSDOCK_TRY(part, wire::decode_gather_part(entry.value));
  if (part.world != gathering.world || part.rank != rank)
    return make_error(
        Code::kIncompatible,
        fmt::format("gathering '{}': rank {} says it is rank {} of {}, rank {} says "
                    "the world has {}",
                    gathering.name, rank, part.rank, part.world, gathering.rank, gathering.world));
  return std::move(part.bytes);
}

Result<std::vector<std::string>> collect(Store& store, const Gathering& gathering,
                                         Deadline deadline) {
  // The last tenth is kept for finding out who is missing.
  const auto reserve =
      std::min<Deadline::Clock::duration>(deadline.remaining() / 10, std::chrono::seconds(1));
  const Deadline wait_until = deadline.after(-reserve);
  std::vector<std::string> all;
  for (std::uint32_t rank = 0; rank < gathering.world; ++rank) {
    Result<Entry> entry = store.wait(key_of(gathering, rank), wait_until);
    if (entry.code() == Code::kDeadline)
      return name_missing(store, gathering, rank, entry.error(), deadline);
    if (!entry.ok()) return std::move(entry).error();
    CROSSDOCK_TRY(bytes, take_part(gathering, rank, *entry));
    all.push_back(std::move(bytes));
  }
  return all;
}

}  // namespace

Result<std::vector<std::string>> all_gather(Store& store, const Gathering& gathering,
                                            std::string_view bytes, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check(gathering));
  CROSSDOCK_CHECK_OK(contribute(store, gathering, bytes, deadline));
  auto all = collect(store, gathering, deadline);
  // Withdrawn, so that a later attempt under the same name is not taken for a second rank.
  if (!all.ok()) (void)store.remove(key_of(gathering, gathering.rank), Deadline::in(kWithdrawal));
  return all;
}

Result<> barrier(Store& store, const Gathering& gathering, Deadline deadline) {
  CROSSDOCK_CHECK_OK(all_gather(store, gathering, {}, deadline));
  return {};
}

}  // namespace crossdock::rendezvous
