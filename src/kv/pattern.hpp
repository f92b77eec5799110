// Page content that can be recomputed: every row (one token, head, plane and layer) is derived from
// the key of its prefix block, so a receiver that knows the keys verifies every byte without a copy
// of the source. A row in the wrong place, from another request, torn or stale does not match.
// Stateless; any thread. Used by the demo, the tests and the benches, never on the data path.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <crossdock/kv/page_layout.hpp>

namespace crossdock::kv::pattern {

// What a page holds: tokens [first_token, first_token + page_tokens) of the block named `key`.
struct PageContent {
  std::uint64_t key = 0;
  std::uint32_t first_token = 0;
};

struct Mismatch {
  std::uint32_t layer = 0;
  PageId page = 0;
  std::uint32_t plane = 0;
  std::uint32_t token = 0;  // in the page
  std::uint32_t head = 0;   // of the model
  std::size_t byte = 0;     // in the row
  [[nodiscard]] std::string describe() const;
};

// `pool` is the start of the pool that `layout` describes.
void fill_page(const PageLayout& layout, std::byte* pool, std::uint32_t layer, PageId page,
               PageContent content) noexcept;
// The first difference, or nothing when every byte of the page in that layer is as filled.
std::optional<Mismatch> check_page(const PageLayout& layout, const std::byte* pool,
                                   std::uint32_t layer, PageId page, PageContent content) noexcept;

}  // namespace crossdock::kv::pattern
