// What AddressSanitizer does in tests unless ASAN_OPTIONS says otherwise; that adds to it. Linked
// into each test of a build with it.
// SPDX-License-Identifier: Apache-2.0

// The sanitizer looks at what sendmsg() has sent when it returns. The peer, in the same process,
// may have it all by then, have called the transfer done and given the memory back.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "intercept_send=0";
}
