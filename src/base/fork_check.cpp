// SPDX-License-Identifier: Apache-2.0
#include "base/fork_check.hpp"

#include <new>
#include <sys/mman.h>

namespace crossdock::base {
namespace {

constexpr std::size_t kPage = 4096;

std::atomic<std::uint64_t>* make_page() noexcept {
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (::madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    ::munmap(page, kPage);
    return nullptr;
  }
  return new (page) std::atomic<std::uint64_t>(0);
}

}  // namespace

std::atomic<std::uint64_t>* ForkCheck::process() noexcept {
  static std::atomic<std::uint64_t>* const page = make_page();  // for as long as the process lives
  return page;
}

ForkCheck::ForkCheck() noexcept : process_(process()) {
  if (process_ == nullptr) return;
  made_in_ = process_->load();
  if (made_in_ != 0) return;
  // A child has this from its parent, and takes another number than any of its ancestors.
  static std::atomic<std::uint64_t> last{0};
  const std::uint64_t number = ++last;
  if (process()->compare_exchange_strong(made_in_, number)) made_in_ = number;
}

}  // namespace crossdock::base
