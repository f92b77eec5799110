// Whether this build can run kernels of the twin at the sizes of benches: every CUDA thread is a
// fiber, and the ThreadSanitizer of GCC 12 ends a process that has more than 8128.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(CROSSDOCK_SANITIZE_THREAD) && !defined(__clang__) && __GNUC__ < 13
#define CROSSDOCK_SKIP_WITHOUT_FIBERS() \
  GTEST_SKIP() << "ThreadSanitizer of this compiler knows 8128 fibers at most"
#else
#define CROSSDOCK_SKIP_WITHOUT_FIBERS() static_cast<void>(0)
#endif
