// Keys, values, revisions, leases. See the header.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/key_table.hpp"

#include <fmt/format.h>

namespace crossdock::rendezvous {

void KeyTable::erase(Items::iterator it) {
  if (it->second.expiry) expiries_.erase({*it->second.expiry, it->first});
  num_bytes_ -= it->first.size() + it->second.entry.value.size();
  items_.erase(it);
}

void KeyTable::expire(Time now) {
  while (!expiries_.empty() && expiries_.begin()->first <= now)
    erase(items_.find(expiries_.begin()->second));
}

Result<std::uint64_t> KeyTable::put(std::string_view key, std::string_view value, Lease lease,
                                    Time now) {
  expire(now);
  auto it = items_.find(key);
  const std::size_t old_bytes =
      it == items_.end() ? 0 : it->first.size() + it->second.entry.value.size();
  const std::size_t new_bytes = num_bytes_ - old_bytes + key.size() + value.size();
  if (new_bytes > limits_.max_bytes || (it == items_.end() && items_.size() >= limits_.max_keys))
    return Error{
        .code = Code::kNoMemory,
        .retry = Retry::kLater,
        .message = fmt::format("the store is full ({} keys, {} bytes; limits {} and {})",
                               items_.size(), num_bytes_, limits_.max_keys, limits_.max_bytes)};
  if (it == items_.end()) it = items_.try_emplace(std::string(key)).first;
  Item& item = it->second;
  if (item.expiry) expiries_.erase({*item.expiry, it->first});
  item.expiry.reset();
  if (lease) {
    item.expiry = now + *lease;
    expiries_.emplace(*item.expiry, it->first);
  }
  item.entry.value = value;
  item.entry.revision = ++last_revision_;
  num_bytes_ = new_bytes;
  return item.entry.revision;
}

const Entry* KeyTable::get(std::string_view key, Time now) {
  expire(now);
  const auto it = items_.find(key);
  return it == items_.end() ? nullptr : &it->second.entry;
}

void KeyTable::remove(std::string_view key) {
  if (const auto it = items_.find(key); it != items_.end()) erase(it);
}

std::vector<std::string> KeyTable::list(std::string_view prefix, Time now) {
  expire(now);
  std::vector<std::string> keys;
  for (auto it = items_.lower_bound(prefix); it != items_.end() && it->first.starts_with(prefix);
       ++it)
    keys.push_back(it->first);
  return keys;
}

Result<std::optional<std::uint64_t>> KeyTable::compare_and_put(std::string_view key,
                                                               std::uint64_t expected,
                                                               std::string_view value, Time now) {
  const Entry* entry = get(key, now);
  if ((entry == nullptr ? 0 : entry->revision) != expected) return std::optional<std::uint64_t>{};
  CROSSDOCK_TRY(revision, put(key, value, std::nullopt, now));
  return std::optional<std::uint64_t>(revision);
}

bool KeyTable::compare_and_remove(std::string_view key, std::uint64_t expected, Time now) {
  const Entry* entry = get(key, now);
  if (entry == nullptr || entry->revision != expected) return false;
  remove(key);
  return true;
}

}  // namespace crossdock::rendezvous
