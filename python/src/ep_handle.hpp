// Handle of Python: a dispatch, what kind of arrays went in, and how its memory is shown. Closing
// it
// gives its slot back as soon as no array of it is left. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "array.hpp"
#include "group.hpp"

namespace crossdock::python {

// How rows and scales of one dispatch are typed and shaped.
struct Payload {
  ArrayType rows = {};
  int64_t row_values = 0;
  ArrayType scales = {};
  int64_t scale_values = 0;  // 0: none
  bool weights = false;
};

struct Handle {
  std::shared_ptr<ep::Handle> handle;  // null once closed
  uint32_t rank = 0;
  uint32_t tokens = 0;  // sent
  uint32_t top_k = 0;
  uint32_t hidden = 0;
  uint32_t world = 0;
  uint32_t experts = 0;  // of the rank
  int device = kHost;
  Framework framework = Framework::kNone;
  Payload payload;

  // Raises Closed after close(). Kept by a call that lets the GIL go: another thread may close it.
  [[nodiscard]] std::shared_ptr<const ep::Handle> open() const;
  // bf16 as the framework of the tokens can take it.
  [[nodiscard]] ArrayType bf16() const;
};

}  // namespace crossdock::python
