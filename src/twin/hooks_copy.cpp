// The hooks for cp.async: copies of single threads. The destination holds NaN until the thread has
// waited for the copy's group, which is when it takes effect: as late as is legal. Issuing counts
// as the write for the checks of shared memory.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "twin/hook.hpp"

namespace crossdock::twin::hooks {

namespace {

constexpr Access kWeak{Order::kWeak, Scope::kCta};

void write(void* shared, const void* bytes, unsigned count, Site site) {
  if (count == 16) {
    store_vector(shared, bytes, 16, kWeak, site);
    return;
  }
  std::uint32_t word;
  __builtin_memcpy(&word, bytes, sizeof word);
  store(shared, word, sizeof word, kWeak, site);
}

void land(const PendingCopy& copy, Site site) {
  std::array<unsigned char, 16> bytes{};
  if (copy.global != nullptr && copy.bytes == 16) {
    load_vector(copy.global, bytes.data(), 16, kWeak, site);
  } else if (copy.global != nullptr) {
    const auto word = static_cast<std::uint32_t>(load(copy.global, 4, kWeak, site));
    __builtin_memcpy(bytes.data(), &word, sizeof word);
  }
  write(copy.shared, bytes.data(), copy.bytes, site);
}

}  // namespace

void copy_async(void* shared, const void* global, unsigned bytes, Site site) {
  constexpr std::array<std::uint64_t, 2> kPoison{~0ull, ~0ull};
  write(shared, kPoison.data(), bytes, site);
  Here here(site);
  if (global != nullptr) {
    here.check_aligned(global, bytes, "cp.async");
    here.check_global(global, bytes, "cp.async");
  }
  Runtime::Internal internal(here.runtime);
  here.extra().open_copies.push_back({shared, global, bytes});
}

void copy_async_commit(Site site) {
  Here here(site);
  Runtime::Internal internal(here.runtime);
  FiberExtra& extra = here.extra();
  extra.copies.push_back(std::move(extra.open_copies));
  extra.open_copies.clear();
}

void copy_async_wait(unsigned pending, Site site) {
  Here here(site);
  FiberExtra& extra = here.extra();
  while (extra.copies.size() > pending) {
    // They stay where they are: a violation does not return, and other threads run meanwhile.
    for (const PendingCopy& copy : extra.copies.front())
      land(copy, site);
    Runtime::Internal internal(here.runtime);
    extra.copies.erase(extra.copies.begin());
  }
}

}  // namespace crossdock::twin::hooks
