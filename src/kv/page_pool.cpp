// Admission, sharing, eviction and quarantine of pages. See page_pool.hpp for the life of a page.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <fmt/format.h>

#include "kv/pool_core.hpp"

namespace crossdock::kv {
inline namespace v1 {
namespace detail {

FreePages::FreePages(std::uint32_t total) : words_((total + 63) / 64, ~std::uint64_t{0}) {
  if (total % 64 != 0) words_.back() = (std::uint64_t{1} << total % 64) - 1;
  count_ = total;
}

PageId FreePages::take() {
  while (words_[lowest_] == 0)
    ++lowest_;
  std::uint64_t& word = words_[lowest_];
  const auto bit = static_cast<std::uint32_t>(std::countr_zero(word));
  word &= word - 1;
  --count_;
  return static_cast<PageId>(lowest_ * 64 + bit);
}

void FreePages::put(PageId page) {
  words_[page / 64] |= std::uint64_t{1} << page % 64;
  lowest_ = std::min<std::size_t>(lowest_, page / 64);
  ++count_;
}

Result<> PoolCore::usable() const {
  if (!forked()) return {};
  return make_error(Code::kUnsupported,
                    "this page pool was made before fork(), and is the parent's. Make an engine "
                    "and a pool in the child");
}

Result<> PoolCore::check(const Admission& admission) const {
  if (admission.num_pages == 0 || admission.pages_per_hash == 0)
    return invalid_argument(
        fmt::format("admission of request {}: num_pages = {} and "
                    "pages_per_hash = {} must be at least 1",
                    admission.request, admission.num_pages, admission.pages_per_hash));
  if (admission.num_pages > layout_.options().num_pages)
    return make_error(
        Code::kNoMemory,
        fmt::format("request {} needs {} pages, the whole pool has {}", admission.request,
                    admission.num_pages, layout_.options().num_pages));
  if (tables_.contains(admission.request))
    return invalid_argument(fmt::format(
        "request {} has a block table already; release it before admitting the id again",
        admission.request));
  return {};
}

Result<BlockTable> PoolCore::admit(const Admission& admission, std::optional<Deadline> deadline) {
  Lock lock(mutex_);
  for (;;) {
    CROSSDOCK_CHECK_OK(check(admission));
    if (auto table = try_admit(admission)) return std::move(*table);
    const auto text =
        fmt::format("request {} needs {} pages; {} are free, {} cached", admission.request,
                    admission.num_pages, free_.count(), idle_pages());
    if (!deadline) return make_error(Code::kWouldBlock, text);
    if (deadline->passed()) return make_error(Code::kDeadline, text);
    changed_.wait_until(lock, deadline->when());
  }
}

std::optional<BlockTable> PoolCore::try_admit(const Admission& admission) {
  auto table = std::make_shared<PoolTable>();
  table->request = admission.request;
  const std::uint32_t needed = admission.num_pages - share_prefix(admission, *table);
  if (needed > free_.count() + idle_pages()) {
    for (const auto& block : table->blocks) {
      --block->live;
      settle(block);
    }
    return std::nullopt;
  }
  evict_for(needed);
  fill_rest(admission, *table);
  tables_.emplace(admission.request, table);
  return table->view;
}

// Takes the leading blocks that exist already; returns how many pages that saves.
std::uint32_t PoolCore::share_prefix(const Admission& admission, PoolTable& table) {
  BlockTable& view = table.view;
  const std::size_t full = std::min<std::size_t>(admission.prefix_hashes.size(),
                                                 admission.num_pages / admission.pages_per_hash);
  for (std::size_t i = 0; i < full; ++i) {
    const auto found = index_.find(admission.prefix_hashes[i]);
    if (found == index_.end() || found->second->pages.size() != admission.pages_per_hash) break;
    const auto& block = found->second;
    // The same hash twice in one request is the caller's slip; a block is listed once at most.
    if (std::find(table.blocks.begin(), table.blocks.end(), block) != table.blocks.end()) break;
    if (block->live == 0 && block->held == 0) idle_.erase(block->idle);
    ++block->live;
    table.blocks.push_back(block);
    view.pages.insert(view.pages.end(), block->pages.begin(), block->pages.end());
    const bool known = std::find(view.depends_on.begin(), view.depends_on.end(), block->owner) !=
                       view.depends_on.end();
    if (!block->ready && !known) view.depends_on.push_back(block->owner);
  }
  view.num_shared_pages = static_cast<std::uint32_t>(view.pages.size());
  return view.num_shared_pages;
}

// Precondition: enough free pages. Pages of full blocks go to new prefix blocks of this request.
void PoolCore::fill_rest(const Admission& admission, PoolTable& table) {
  BlockTable& view = table.view;
  const std::uint32_t per_block = admission.pages_per_hash;
  while (view.pages.size() < admission.num_pages) {
    const std::size_t block_index = view.pages.size() / per_block;
    const bool full = admission.num_pages - view.pages.size() >= per_block;
    const bool hashed = full && block_index < admission.prefix_hashes.size() &&
                        !index_.contains(admission.prefix_hashes[block_index]);
    const std::size_t count =
        std::min<std::size_t>(per_block, admission.num_pages - view.pages.size());
    std::vector<PageId> pages(count);
    for (PageId& page : pages)
      page = free_.take();
    view.pages.insert(view.pages.end(), pages.begin(), pages.end());
    if (!hashed) {
      table.own.insert(table.own.end(), pages.begin(), pages.end());
      continue;
    }
    auto block = std::make_shared<PrefixBlock>();
    block->hash = admission.prefix_hashes[block_index];
    block->pages = std::move(pages);
    block->owner = admission.request;
    block->live = 1;
    index_.emplace(block->hash, block);
    table.blocks.push_back(std::move(block));
  }
}

std::uint32_t PoolCore::idle_pages() const {
  std::size_t pages = 0;
  for (const PrefixBlock* block : idle_)
    pages += block->pages.size();
  return static_cast<std::uint32_t>(pages);
}

void PoolCore::evict_for(std::uint32_t pages) {
  while (free_.count() < pages) {
    PrefixBlock* block = idle_.front();
    idle_.pop_front();
    const auto keep = index_.find(block->hash)->second;
    unshare(*keep);
    free_block(*keep);
  }
}

// No new request finds the block.
void PoolCore::unshare(PrefixBlock& block) {
  if (!block.indexed) return;
  block.indexed = false;
  index_.erase(block.hash);
}

void PoolCore::free_block(PrefixBlock& block) {
  for (const PageId page : block.pages)
    free_.put(page);
  block.pages.clear();
}

// After a reference went away: keeps the block cached when it is whole, frees it otherwise.
void PoolCore::settle(const std::shared_ptr<PrefixBlock>& block) {
  if (block->live != 0 || block->held != 0) return;
  if (block->ready && block->indexed) {
    block->idle = idle_.insert(idle_.end(), block.get());
    return;
  }
  // The index may hold the last reference, and `block` be that one.
  const auto keep = block;  // NOLINT(performance-unnecessary-copy-initialization)
  unshare(*keep);
  free_block(*keep);
}

Result<BlockTable> PoolCore::table(RequestId request) const {
  const Lock lock(mutex_);
  const auto found = tables_.find(request);
  if (found == tables_.end())
    return make_error(Code::kNotFound, fmt::format("request {} has no block table", request));
  return found->second->view;
}

Result<> PoolCore::mark_ready(RequestId request) {
  const Lock lock(mutex_);
  const auto found = tables_.find(request);
  if (found == tables_.end())
    return make_error(Code::kNotFound, fmt::format("request {} has no block table", request));
  for (const auto& block : found->second->blocks)
    if (block->owner == request) block->ready = true;
  return {};
}

Result<> PoolCore::release(RequestId request) {
  const Lock lock(mutex_);
  const auto found = tables_.find(request);
  if (found == tables_.end())
    return make_error(Code::kNotFound, fmt::format("request {} has no block table", request));
  const auto table = found->second;
  tables_.erase(found);
  table->released = true;
  for (const auto& block : table->blocks) {
    if (block->owner == request && !block->ready) unshare(*block);
    if (table->leases == 0) continue;
    --block->live;
    ++block->held;
  }
  if (table->leases > 0) {
    quarantine_.insert(table);
    return {};
  }
  for (const auto& block : table->blocks)
    --block->live;
  free_table(*table);
  return {};
}

// Precondition: the table's references to its blocks are given back.
void PoolCore::free_table(PoolTable& table) {
  for (const auto& block : table.blocks)
    settle(block);
  for (const PageId page : table.own)
    free_.put(page);
  table.blocks.clear();
  table.own.clear();
  changed_.notify_all();
}

Result<std::shared_ptr<PoolTable>> PoolCore::lease(RequestId request) {
  const Lock lock(mutex_);
  const auto found = tables_.find(request);
  if (found == tables_.end())
    return make_error(Code::kNotFound,
                      fmt::format("request {} has no block table to lease", request));
  ++found->second->leases;
  return found->second;
}

void PoolCore::end_lease(const std::shared_ptr<PoolTable>& table) noexcept {
  const Lock lock(mutex_);
  if (--table->leases > 0 || !table->released) return;
  quarantine_.erase(table);
  for (const auto& block : table->blocks)
    --block->held;
  free_table(*table);
}

PoolStats PoolCore::stats() const {
  const Lock lock(mutex_);
  PoolStats stats;
  stats.total = layout_.options().num_pages;
  stats.free = free_.count();
  stats.cached = idle_pages();
  std::set<const PrefixBlock*> held;
  std::size_t quarantined = 0;
  for (const auto& table : quarantine_) {
    quarantined += table->own.size();
    for (const auto& block : table->blocks)
      if (block->live == 0 && held.insert(block.get()).second) quarantined += block->pages.size();
  }
  stats.quarantined = static_cast<std::uint32_t>(quarantined);
  stats.in_use = stats.total - stats.free - stats.cached - stats.quarantined;
  return stats;
}

}  // namespace detail

PageLease& PageLease::operator=(PageLease&& other) noexcept {
  if (this == &other) return *this;
  reset();
  core_ = std::move(other.core_);
  table_ = std::move(other.table_);
  return *this;
}

void PageLease::reset() noexcept {
  if (table_ != nullptr && !core_->forked()) core_->end_lease(table_);
  table_.reset();
  core_.reset();
}

// Without the mutex: the view of a table does not change.
std::span<const PageId> PageLease::pages() const noexcept {
  if (table_ == nullptr) return {};
  return table_->view.pages;
}

Result<PagePool> PagePool::adopt(const PageLayout& layout, void* memory) {
  if (memory == nullptr)
    return invalid_argument("page pool: the memory is null; pass layout.pool_bytes() bytes");
  return PagePool(detail::PoolCore::make(layout, memory, std::nullopt));
}

const PageLayout& PagePool::layout() const noexcept {
  return core_->layout();
}
std::byte* PagePool::base() const noexcept {
  return core_->base();
}
Result<BlockTable> PagePool::admit(const Admission& admission) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->admit(admission, std::nullopt);
}
Result<BlockTable> PagePool::admit(const Admission& admission, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->admit(admission, deadline);
}
Result<BlockTable> PagePool::table(RequestId request) const {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->table(request);
}
Result<> PagePool::mark_ready(RequestId request) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->mark_ready(request);
}
Result<> PagePool::release(RequestId request) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->release(request);
}
Result<PageLease> PagePool::lease(RequestId request) {
  CROSSDOCK_CHECK_OK(core_->usable());
  CROSSDOCK_TRY(table, core_->lease(request));
  return PageLease(core_, std::move(table));
}
PoolStats PagePool::stats() const {
  return core_->forked() ? PoolStats{} : core_->stats();
}

}  // namespace v1
}  // namespace crossdock::kv
