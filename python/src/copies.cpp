// See copies.hpp. SPDX-License-Identifier: Apache-2.0
#include "copies.hpp"

#include <cstring>
#include <fmt/format.h>
#include <iterator>

#include "errors.hpp"

namespace crossdock::python {
namespace {

enum class Direction : bool { kIn, kOut };

// Between dense rows of the twin and those of a caller's array.
void copy_rows(std::uint8_t* dense, const Tensor& t, Direction direction) {
  const uint64_t row = t.row_bytes();
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    std::uint8_t* const here = dense + static_cast<uint64_t>(i) * row;
    std::uint8_t* const there = static_cast<std::uint8_t*>(t.data) + i * t.strides[0];
    std::memcpy(direction == Direction::kIn ? here : there,
                direction == Direction::kIn ? there : here, row);
  }
}

// Frameworks give an array without elements no address, and the library takes none for an argument
// that was left out. So it lies anywhere in the rank's memory.
void* address_of_none(const RankBox& box, uint32_t rank) {
  return box.ranks().rank(rank).at<std::uint8_t>(0);
}

}  // namespace

bool in_twin_heap(const RankBox& box, const Tensor& t, uint32_t rank) {
  const twin::World* const twin = box.ranks().twin();
  const auto* const heap = twin->heap(static_cast<int>(rank));
  const auto* const data = static_cast<const unsigned char*>(t.data);
  return data >= heap && data < heap + twin->heap_bytes();
}

void need_writable(const Tensor& t) {
  if (t.framework == Framework::kNumpy && !nb::cast<bool>(t.object.attr("flags").attr("writeable")))
    raise(invalid_argument(fmt::format("{} is read-only: give an array of its own", t.name)));
}

const void* Copies::readable(const std::shared_ptr<RankBox>& box, Tensor& t, uint32_t rank) {
  if (t.shape[0] == 0) return address_of_none(*box, rank);
  if (!box->twin()) return t.data;
  if (in_twin_heap(*box, t, rank)) {
    hold(t.object);
    return t.data;
  }
  const uint64_t row = t.row_bytes();
  auto memory = value_or_raise(twin_memory(box, rank, row * static_cast<uint64_t>(t.shape[0])));
  copy_rows(memory->as<std::uint8_t>(), t, Direction::kIn);
  t.strides[0] = static_cast<int64_t>(row);
  staged_.push_back(std::move(memory));
  return staged_.back()->address();
}

void* Copies::writable(const std::shared_ptr<RankBox>& box, const Tensor& t, uint32_t rank) {
  if (t.shape[0] == 0) return address_of_none(*box, rank);
  if (!box->twin()) return t.data;
  need_writable(t);
  if (in_twin_heap(*box, t, rank) && t.dense()) {
    hold(t.object);
    return t.data;
  }
  const uint64_t bytes = t.row_bytes() * static_cast<uint64_t>(t.shape[0]);
  auto memory = value_or_raise(twin_memory(box, rank, bytes));
  // What the kernel leaves alone has to come back as it was.
  copy_rows(memory->as<std::uint8_t>(), t, Direction::kIn);
  back_.push_back({nb::borrow(t.object), t, std::move(memory)});
  return back_.back().memory->address();
}

void Copies::take_over(Copies&& other) {
  const auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
    from.clear();
  };
  append(staged_, other.staged_);
  append(held_, other.held_);
  append(back_, other.back_);
}

void Copies::copy_back() const {
  for (const Back& back : back_)
    copy_rows(back.memory->as<std::uint8_t>(), back.tensor, Direction::kOut);
}

}  // namespace crossdock::python
