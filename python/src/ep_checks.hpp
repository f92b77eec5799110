// What the calls of Group need of their arrays. Each raises InvalidArgument naming the argument,
// what it
// is, the rule and the fix; `call` is "ep dispatch". No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "array.hpp"

namespace crossdock::python {

inline constexpr const char* kDispatch = "ep dispatch";
inline constexpr const char* kCombine = "ep combine";
inline constexpr const char* kExpand = "ep expand_rows";
inline constexpr const char* kReduce = "ep reduce_rows";

[[noreturn]] void refuse(std::string text);
// How the bytes of a tensor are shown again: floats that every library knows as what they are.
ArrayType shown_as(const Tensor& t);
void need_aligned(const char* call, const Tensor& t);
// `count` negative: any number of rows.
void need_bf16_rows(const char* call, const Tensor& t, int64_t count, uint32_t hidden);

}  // namespace crossdock::python
