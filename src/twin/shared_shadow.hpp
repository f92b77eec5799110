// The checker of shared memory: which 16-byte granules were written by generic stores and not yet
// fenced for the async proxy, and which ranges asynchronous operations still read. Generic stores
// reach it through the hooks only; plain C++ stores are not seen (rule 3 of docs/design/twin.md).
// One per CTA; the caller turns a finding into a violation.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <crossdock/twin/hooks.hpp>

namespace crossdock::twin {

// What a thread knows of generic stores to shared memory, on the CTA's own clock: everything by its
// warp up to `warp`, everything by anybody up to `cta`; `fence` is when it last fenced the proxies.
struct SmemView {
  std::uint64_t warp = 0;
  std::uint64_t cta = 0;
  std::uint64_t fence = 0;
};

// A range that an asynchronous operation reads until its issuer has waited for it.
struct InflightRead {
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
  const char* what = "";
  Site site;
};

class SharedShadow {
 public:
  void begin(std::size_t shared_bytes, std::uint32_t threads, bool enabled);
  [[nodiscard]] bool enabled() const { return enabled_; }
  [[nodiscard]] std::uint64_t clock() const { return clock_; }

  // A finding: what was wrong with which granule.
  struct Finding {
    std::uint32_t offset;
    std::uint32_t writer;      // thread of the generic store, for unfenced granules
    const InflightRead* read;  // for overlaps
  };

  void generic_write(std::uint32_t offset, std::uint32_t bytes, std::uint32_t thread);
  void async_write(std::uint32_t offset, std::uint32_t bytes);
  void proxy_fence(std::uint32_t thread, SmemView& view);

  // A generic store that no fence has ordered before an asynchronous access of the range.
  [[nodiscard]] std::optional<Finding> unfenced(std::uint32_t offset, std::uint32_t bytes) const;
  // An asynchronous read in flight that overlaps the range.
  [[nodiscard]] std::optional<Finding> in_flight(std::uint32_t offset, std::uint32_t bytes) const;

  std::uint64_t add_read(const InflightRead& read);  // returns a handle
  void end_read(std::uint64_t handle);

 private:
  struct Entry {
    std::uint64_t handle;
    InflightRead read;
  };
  bool enabled_ = false;
  std::uint64_t clock_ = 0;
  std::uint64_t cta_fence_ = 0;
  std::uint64_t next_handle_ = 1;
  std::vector<std::uint64_t> dirty_;         // per granule: clock << 16 | thread, 0 when clean
  std::vector<std::uint64_t> warp_fence_;    // writers of this warp are fenced up to here
  std::vector<std::uint64_t> thread_fence_;  // by the writer itself
  std::vector<Entry> reads_;
};

}  // namespace crossdock::twin
