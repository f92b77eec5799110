// What waits poll, as values: a load of a word, and a test of what it holds. Waits with one of each
// share what they do after their first look (wait.cuh), while a wait with lambdas has it in its
// place.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>

namespace crossdock::device {

// ---- loads --------------------------------------------------------------------------------------

template <class T>
struct RelaxedSys {
  static constexpr bool kPlainPoll = true;
  const T* word;
  CROSSDOCK_DEVICE u64 operator()(CROSSDOCK_SITE_ONLY) const {
    return ptx::ld_relaxed_sys(word CROSSDOCK_PASS_SITE);
  }
};
template <class T>
struct AcquireSys {
  static constexpr bool kPlainPoll = true;
  const T* word;
  CROSSDOCK_DEVICE u64 operator()(CROSSDOCK_SITE_ONLY) const {
    return ptx::ld_acquire_sys(word CROSSDOCK_PASS_SITE);
  }
};
template <class T>
struct AcquireGpu {
  static constexpr bool kPlainPoll = true;
  const T* word;
  CROSSDOCK_DEVICE u64 operator()(CROSSDOCK_SITE_ONLY) const {
    return ptx::ld_acquire_gpu(word CROSSDOCK_PASS_SITE);
  }
};
template <class T>
RelaxedSys(const T*) -> RelaxedSys<T>;
template <class T>
AcquireSys(const T*) -> AcquireSys<T>;
template <class T>
AcquireGpu(const T*) -> AcquireGpu<T>;

// ---- tests --------------------------------------------------------------------------------------

// The upper bits, from `kShift` on, are `value`.
template <u32 kShift>
struct UpperIs {
  static constexpr bool kPlainPoll = true;
  u32 value;
  CROSSDOCK_DEVICE bool operator()(u64 seen) const { return seen >> kShift == value; }
};
// A counter of 32 bits, or an epoch, is `target` or later.
struct Reached {
  static constexpr bool kPlainPoll = true;
  u32 target;
  CROSSDOCK_DEVICE bool operator()(u64 seen) const {
    return static_cast<i32>(static_cast<u32>(seen) - target) >= 0;
  }
};
// As another test, or the rank `peer` is in the mask; without a mask, as the test.
template <class Test>
struct OrMasked {
  static constexpr bool kPlainPoll = true;
  Test test;
  const u32* mask;
  u32 peer;
  CROSSDOCK_DEVICE bool operator()(u64 seen) const {
    return test(seen) || (mask != nullptr && (ptx::ld_relaxed_gpu(mask) >> peer & 1u) != 0);
  }
};

}  // namespace crossdock::device
