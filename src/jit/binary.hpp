// Compiled kernels: the machine code, what is known about it, and its form as a file of the cache.
// The file format is little-endian and holds no path:
//
//   bytes 0..7    magic "XDKERNEL"
//   8..11         format version      12..15  bytes of this header (80)
//   16..23        bytes of metadata   24..31  bytes of machine code
//   32..47        key                 48..63  XXH3-128 of metadata and code
//   64..79        XXH3-128 of bytes 0..63
//   metadata      lines "name\tvalue\n": kernel entry config_type config sm compiler symbol
//                 registers stack spill shared
//   machine code  a cubin
//
// Parsing trusts nothing in the file. Values, thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "jit/key.hpp"
#include "jit/spec.hpp"

namespace crossdock::jit {

// What the assembler said about a kernel, per thread except for shared memory.
struct ResourceUse {
  int registers = 0;
  int stack_bytes = 0;
  int spill_bytes = 0;   // stored and loaded
  int shared_bytes = 0;  // static
  friend bool operator==(const ResourceUse&, const ResourceUse&) = default;
};

struct Binary {
  KernelSpec spec = {};
  Key key = {};               // binary_key()
  std::string compiler = {};  // "nvrtc 13.0 -std=c++20"
  std::string symbol = {};    // the kernel's name in the machine code
  ResourceUse use = {};
  std::vector<std::byte> image = {};
};

inline constexpr std::uint32_t kBinaryFormat = 1;

std::vector<std::byte> encode(const Binary& binary);
// kIncompatible: another format version; kCorrupt: anything else that is wrong.
Result<Binary> decode(std::span<const std::byte> file);

// The kernels in a cubin, by name. kCorrupt when it is not an ELF file of the GPU.
Result<std::vector<std::string>> kernel_symbols(std::span<const std::byte> cubin);

// Of all instructions in a cubin: what a compiler takes longest for. kCorrupt as above.
Result<std::uint64_t> code_bytes(std::span<const std::byte> cubin);

// Reads the figures that ptxas prints with -v; absent figures stay 0.
ResourceUse parse_ptxas_log(std::string_view log);

}  // namespace crossdock::jit
