// PoolCore: the state behind PagePool and PageLease. One mutex guards all of it; any thread calls.
// It never touches the memory of the pool and never waits on a peer. In a forked child it is left
// as it is: a thread of the parent may hold the mutex or wait, for ever.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include <crossdock/kv/page_pool.hpp>
#include <crossdock/transfer/engine.hpp>

#include "base/fork_check.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

// A full prefix block: its pages are shared by every table that lists it.
struct PrefixBlock {
  std::uint64_t hash = 0;
  std::vector<PageId> pages;
  RequestId owner = 0;  // who brings the content
  bool ready = false;
  bool indexed = true;     // new requests may find it
  std::uint32_t live = 0;  // tables in use that list it
  std::uint32_t held = 0;  // tables in quarantine that list it
  std::list<PrefixBlock*>::iterator idle =
      {};  // place in the eviction order while live == held == 0
};

struct PoolTable {
  RequestId request = 0;
  std::vector<std::shared_ptr<PrefixBlock>> blocks;
  std::vector<PageId> own;  // pages of no prefix block
  BlockTable view;          // as admitted; does not change
  std::uint32_t leases = 0;
  bool released = false;
};

// The free pages as bits. Hands out the lowest first, so that tables are mostly contiguous and
// their copies merge.
class FreePages {
 public:
  explicit FreePages(std::uint32_t total);
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  // Precondition: count() > 0.
  PageId take();
  void put(PageId page);

 private:
  std::vector<std::uint64_t> words_;
  std::size_t lowest_ = 0;  // no word before it has a free page
  std::uint32_t count_ = 0;
};

class PoolCore {
 public:
  static std::shared_ptr<PoolCore> make(const PageLayout& layout, void* memory,
                                        std::optional<transfer::Region> region) {
    return {new PoolCore(layout, memory, std::move(region)), base::DeleteUnlessForked{}};
  }
  PoolCore(const PageLayout& layout, void* memory, std::optional<transfer::Region> region)
      : layout_(layout),
        base_(static_cast<std::byte*>(memory)),
        region_(std::move(region)),
        free_(layout.options().num_pages) {}

  [[nodiscard]] bool forked() const noexcept { return fork_.forked(); }
  // kUnsupported in a forked child.
  [[nodiscard]] Result<> usable() const;
  const PageLayout& layout() const noexcept { return layout_; }
  std::byte* base() const noexcept { return base_; }

  Result<BlockTable> admit(const Admission& admission, std::optional<Deadline> deadline);
  Result<BlockTable> table(RequestId request) const;
  Result<> mark_ready(RequestId request);
  Result<> release(RequestId request);
  Result<std::shared_ptr<PoolTable>> lease(RequestId request);
  void end_lease(const std::shared_ptr<PoolTable>& table) noexcept;
  PoolStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  Result<> check(const Admission& admission) const;
  std::optional<BlockTable> try_admit(const Admission& admission);
  std::uint32_t share_prefix(const Admission& admission, PoolTable& table);
  void fill_rest(const Admission& admission, PoolTable& table);
  void evict_for(std::uint32_t pages);
  void unshare(PrefixBlock& block);
  void free_block(PrefixBlock& block);
  void settle(const std::shared_ptr<PrefixBlock>& block);
  void free_table(PoolTable& table);
  std::uint32_t idle_pages() const;

  const base::ForkCheck fork_;
  const PageLayout layout_;
  std::byte* const base_;
  const std::optional<transfer::Region> region_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  FreePages free_;
  std::unordered_map<RequestId, std::shared_ptr<PoolTable>> tables_;
  std::set<std::shared_ptr<PoolTable>> quarantine_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PrefixBlock>> index_;
  std::list<PrefixBlock*> idle_;  // indexed, ready, unused; least recently used first
};

}  // namespace detail
}  // namespace v1
}  // namespace crossdock::kv
