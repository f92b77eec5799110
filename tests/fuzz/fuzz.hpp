// How a fuzz target is written: one file, one CROSSDOCK_FUZZ_TARGET with its seeds. The same file
// is built twice: for libFuzzer (preset `fuzz`), and into `fuzz_replay`, which runs seeds, their
// truncations and simple mutations in every test run. A target must accept any bytes; it fails by
// crashing, or by CROSSDOCK_FUZZ_REQUIRE.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "wire/codec.hpp"

namespace crossdock::fuzz {

using Seeds = std::vector<std::string>;

struct Target {
  const char* name;
  void (*run)(wire::Bytes input);
  Seeds (*seeds)();
};

// The input that is running, for the message of a failure.
inline wire::Bytes current_input = {};

// Adds a target to those that fuzz_replay runs.
struct Registration {
  explicit Registration(const Target& target);
};

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return std::string(wire::as_text(bytes));
}

}  // namespace crossdock::fuzz

#define CROSSDOCK_FUZZ_REQUIRE(condition)                                                  \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(                                                                        \
          stderr, "%s:%d: not true: %s; input %s\n", __FILE__, __LINE__, #condition,       \
          ::crossdock::wire::quote_bytes(::crossdock::fuzz::current_input, 4096).c_str()); \
      std::abort();                                                                        \
    }                                                                                      \
  } while (0)

#if defined(CROSSDOCK_FUZZ_LIBFUZZER)
#define CROSSDOCK_FUZZ_TARGET(name, run, seeds)                                        \
  [[maybe_unused]] static auto* const kSeeds = &seeds;                                 \
  extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size);  \
  extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) { \
    run({reinterpret_cast<const std::byte*>(data), size});                             \
    return 0;                                                                          \
  }                                                                                    \
  static_assert(true)
#else
#define CROSSDOCK_FUZZ_TARGET(name, run, seeds) \
  static const ::crossdock::fuzz::Registration kRegistration({name, run, seeds})
#endif
