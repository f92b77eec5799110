// Copies: the caller's arrays in the twin, whose kernels read and write only memory of their rank.
// Arrays elsewhere are copied there at the call, and outputs back when the twin has run; memory of
// the library is used where it is and held as long. On GPUs everything is used where it is.
// Changed under the lane of the rank (group.hpp). Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "group.hpp"

namespace crossdock::python {

class Copies {
 public:
  // Where the kernels of `rank` can read the tensor; its strides become those of the copy.
  const void* readable(const std::shared_ptr<RankBox>& box, Tensor& t, uint32_t rank);
  // The same for what they write; in the caller's array after copy_back().
  void* writable(const std::shared_ptr<RankBox>& box, const Tensor& t, uint32_t rank);
  void hold(nb::handle object) { held_.push_back(nb::borrow(object)); }
  // What another call has copied, until this one's end.
  void take_over(Copies&& other);
  // When the twin has run, by the Copies that the calls before have used.
  void copy_back() const;

 private:
  // A copy in the twin, and the caller's array it goes back to.
  struct Back {
    nb::object object;
    Tensor tensor;
    std::shared_ptr<symm::LocalMemory> memory;
  };
  std::vector<std::shared_ptr<symm::LocalMemory>> staged_;
  std::vector<nb::object> held_;
  std::vector<Back> back_;
};

// Raises InvalidArgument where an output is an array that must not be written: a view of bytes, or
// of a file that is open for reading.
void need_writable(const Tensor& t);
// Whether the tensor is memory of the rank in the twin.
bool in_twin_heap(const RankBox& box, const Tensor& t, uint32_t rank);

}  // namespace crossdock::python
