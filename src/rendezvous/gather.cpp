// all_gather and barrier over any store: each rank puts `name/rank` and waits for the others'.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "rendezvous/store.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

constexpr std::uint32_t kMaxWorld = 65'536;
constexpr std::size_t kMaxNamedRanks = 16;  // in one error message

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

Result<> contribute(Store& store, const Gathering& gathering, std::string_view bytes,
                    Deadline deadline) {
  CROSSDOCK_TRY(
      part, wire::encode_gather_part(
                {.rank = gathering.rank, .world = gathering.world, .bytes = std::string(bytes)}));
  const std::string key = key_of(gathering, gathering.rank);
  Result<bool> put = store.compare_and_put(key, 0, part, deadline);
  // A plain HTTP service cannot compare; then two processes of one rank go unnoticed.
  if (put.code() == Code::kUnsupported) return store.put(key, part, std::nullopt, deadline);
  if (!put.ok()) return std::move(put).error();
  if (!*put)
    return invalid_argument(fmt::format(
        "rank {} of gathering '{}' is taken already in {}: two processes have this rank, "
        "or the name was used before (use a new name, or remove its keys)",
        gathering.rank, gathering.name, store.describe()));
  return {};
}

// Called when `first` did not come in time; the other ranks that are not there either are found
// with what is left until the real deadline.
Error name_missing(Store& store, const Gathering& gathering, std::uint32_t first,
                   Deadline deadline) {
  std::string missing = fmt::format("{}", first);
  std::size_t num_missing = 1;
  for (std::uint32_t rank = first + 1; rank < gathering.world; ++rank) {
    const auto entry = store.get(key_of(gathering, rank), deadline);
    if (!entry.ok()) break;
    if (entry->has_value()) continue;
    if (++num_missing <= kMaxNamedRanks) missing += fmt::format(", {}", rank);
  }
  if (num_missing > kMaxNamedRanks)
    missing += fmt::format(" and {} more", num_missing - kMaxNamedRanks);
  return Error{.code = Code::kDeadline,
               .retry = Retry::kLater,
               .message = fmt::format("gathering '{}': of {} {} these did not come in time: {}",
                                      gathering.name, gathering.world, gathering.noun, missing)};
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
    if (entry.code() == Code::kDeadline) return name_missing(store, gathering, rank, deadline);
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
  if (!all.ok())
    (void)store.remove(key_of(gathering, gathering.rank),
                       Deadline::in(std::chrono::milliseconds(100)));
  return all;
}

Result<> barrier(Store& store, const Gathering& gathering, Deadline deadline) {
  CROSSDOCK_CHECK_OK(all_gather(store, gathering, {}, deadline));
  return {};
}

}  // namespace crossdock::rendezvous
