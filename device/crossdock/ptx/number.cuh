// Comparisons of numbers that are one instruction each, where a comparison and a choice are two.
// Runs in any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
// Of a number and a NaN the number.
CROSSDOCK_DEVICE float larger(float a, float b) {
  return fmaxf(a, b);
}
CROSSDOCK_DEVICE float magnitude(float x) {
  return fabsf(x);
}
// `x` where it is within the limit, which is a number; NaN stays.
CROSSDOCK_DEVICE float at_most(float x, float limit) {
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
  return out;
}
CROSSDOCK_DEVICE float at_least(float x, float limit) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(limit));
  return out;
}
#else
CROSSDOCK_DEVICE float larger(float a, float b) {
  return __builtin_fmaxf(a, b);
}
CROSSDOCK_DEVICE float magnitude(float x) {
  return __builtin_fabsf(x);
}
CROSSDOCK_DEVICE float at_most(float x, float limit) {
  return x > limit ? limit : x;
}
CROSSDOCK_DEVICE float at_least(float x, float limit) {
  return x < limit ? limit : x;
}
#endif

}  // namespace crossdock::device::ptx
