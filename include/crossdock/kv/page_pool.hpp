// PagePool: the pages of a KV cache and who uses them. Each request has a block table; full prefix
// blocks are shared by hash and counted; pages that a transfer may still touch stay in quarantine
// after their request is released.
//
//            admit                  release, no lease
//    free ───────────> in use ─────────────────────────> free, or cached when a ready prefix block
//      ^                  │ release, leased by a sender or receiver
//      │ lease ends       v
//      └───────────── quarantine
//
// PagePool is a thread-safe handle on shared state. PageLease has one owner. No call waits on a
// peer. In a child after fork() both may be destroyed; calls return kUnsupported, stats() nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/kv/page_layout.hpp>

namespace crossdock::transfer {
inline namespace v1 {
class Engine;
}
}  // namespace crossdock::transfer

namespace crossdock::kv {
inline namespace v1 {

// Chosen by the router; the same on the prefill and the decode side, unique while in use.
using RequestId = std::uint64_t;

namespace detail {
class Keeper;
class PoolCore;
struct PoolTable;
}  // namespace detail

// What a request needs. Hash i names the prefix that ends with page (i + 1) * pages_per_hash; equal
// hashes mean equal tokens. Hashes of blocks that the pages do not fill are ignored.
struct Admission {
  RequestId request = 0;
  std::uint32_t num_pages = 0;  // at least 1
  std::span<const std::uint64_t> prefix_hashes = {};
  std::uint32_t pages_per_hash = 32;
};

// pages[i] holds the tokens [i * page_tokens, (i + 1) * page_tokens) of the request.
struct BlockTable {
  std::vector<PageId> pages;
  // The first so many pages belong to prefix blocks that were there before: do not send them again.
  std::uint32_t num_shared_pages = 0;
  // Requests that still bring some of the shared pages. They are valid once each of these is ready;
  // when one fails, so does this request.
  std::vector<RequestId> depends_on;
};

struct PoolStats {
  std::uint32_t total = 0;
  std::uint32_t free = 0;
  std::uint32_t cached = 0;  // ready prefix blocks nobody uses; evicted when pages run short
  std::uint32_t in_use = 0;
  std::uint32_t quarantined = 0;  // released, but a transfer may still touch them
};

// While it lives, pages of the table it was taken on are not reused.
class CROSSDOCK_API PageLease {
 public:
  PageLease() = default;
  PageLease(PageLease&& other) noexcept = default;
  PageLease& operator=(PageLease&& other) noexcept;
  ~PageLease() { reset(); }
  void reset() noexcept;
  [[nodiscard]] bool held() const noexcept { return table_ != nullptr; }
  // Those of the table it was taken on; none when it is not held.
  [[nodiscard]] std::span<const PageId> pages() const noexcept;

 private:
  friend class PagePool;
  PageLease(std::shared_ptr<detail::PoolCore> core, std::shared_ptr<detail::PoolTable> table)
      : core_(std::move(core)), table_(std::move(table)) {}
  std::shared_ptr<detail::PoolCore> core_;
  std::shared_ptr<detail::PoolTable> table_;
};

class CROSSDOCK_API PagePool {
 public:
  // Allocates the pool's memory from `engine`, registered under `label`, zeroed.
  static Result<PagePool> create(transfer::Engine& engine, const PageLayout& layout,
                                 std::string_view label = "kv");
  // Over layout.pool_bytes() bytes of the caller's, which must be registered with the engine that
  // transfers them and outlive every handle and lease. kInvalidArgument for null.
  static Result<PagePool> adopt(const PageLayout& layout, void* memory);

  [[nodiscard]] const PageLayout& layout() const noexcept;
  [[nodiscard]] std::byte* base() const noexcept;

  // Gives the request its pages: shared prefix blocks first, then free ones, then evicted ones.
  // kWouldBlock when too few are left (nothing is taken), kNoMemory when the pool could never hold
  // it, kInvalidArgument when the request has a table already.
  Result<BlockTable> admit(const Admission& admission);
  // The same, waiting for pages of others until `deadline` (kDeadline).
  Result<BlockTable> admit(const Admission& admission, Deadline deadline);
  // kNotFound when the request has no table.
  Result<BlockTable> table(RequestId request) const;
  // The request's prefix blocks hold their content: others may share them from now on without
  // depending on it, and they stay cached after release.
  Result<> mark_ready(RequestId request);
  // Gives the request up. Its pages become free, or cached, or go to quarantine until the last
  // lease ends. The id may be admitted again at once.
  Result<> release(RequestId request);

  // For senders and receivers: keeps the request's pages from being reused.
  Result<PageLease> lease(RequestId request);

  [[nodiscard]] PoolStats stats() const;

 private:
  friend class detail::Keeper;
  explicit PagePool(std::shared_ptr<detail::PoolCore> core) : core_(std::move(core)) {}
  std::shared_ptr<detail::PoolCore> core_;
};

}  // namespace v1
}  // namespace crossdock::kv
