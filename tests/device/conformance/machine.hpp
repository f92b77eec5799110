// What runs the probes of probe.cuh: the twin (twin_machine.hpp) or a GPU (tests/gpu/symm). Both
// run the same probes with the same inputs, and their outputs must be equal byte for byte.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cases.hpp"

namespace crossdock::testing::conformance {

class Machine {
 public:
  Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  virtual ~Machine() = default;

  // Gives back all memory.
  virtual void reset() = 0;
  // 256-byte aligned; zeroed, or a copy of `content`.
  virtual void* memory(std::size_t bytes, const void* content = nullptr) = 0;
  virtual std::vector<u8> read(const void* memory, std::size_t bytes) = 0;
  // Over kTensorWidth x kTensorHeight elements of 2 bytes.
  virtual TensorMap encode(void* base, const TensorCase& c) = 0;
  // One block, kShared bytes of shared memory; back when it has ended.
  virtual void run(const WgmmaParams& p) = 0;
  virtual void run(const WarpParams& p) = 0;
  virtual void run(const TensorParams& p) = 0;
};

struct Output {
  std::string name;
  std::vector<u8> bytes;
};

inline void run_tensor_probe(Machine& machine, const TensorCase& c, std::vector<Output>& outputs) {
  constexpr u32 kElements = kTensorWidth * kTensorHeight;
  std::vector<u16> content(kElements);
  for (u32 i = 0; i < kElements; ++i)
    content[i] = static_cast<u16>(i + 1);
  void* in = machine.memory(kElements * sizeof(u16), content.data());
  void* copy = machine.memory(kElements * sizeof(u16));
  TensorParams p{};
  p.bytes = c.box_width * 2 * kBoxHeight;
  p.tile_bytes = tile_bytes(c);
  p.out = static_cast<u32*>(machine.memory(p.tile_bytes));
  p.x = c.x;
  p.y = c.y;
  p.stores = stores(c);
  p.load = machine.encode(in, c);
  p.store = machine.encode(copy, c);
  machine.run(p);
  const std::string name = "swizzle " + std::to_string(c.swizzle) + " box " +
                           std::to_string(c.box_width) + " at " + std::to_string(c.x) + "," +
                           std::to_string(c.y);
  outputs.push_back({"tensor load " + name, machine.read(p.out, p.tile_bytes)});
  outputs.push_back({"tensor store " + name, machine.read(copy, kElements * sizeof(u16))});
}

// Every probe, in a fixed order.
inline std::vector<Output> run_probes(Machine& machine) {
  std::vector<Output> outputs;
  for_each_wgmma([&](u32 kind, u64 a, u64 b, u32 a_offset, u32 b_offset) {
    machine.reset();
    constexpr std::size_t kBytes = 128 * 32 * sizeof(float);
    auto* out = static_cast<float*>(machine.memory(kBytes));
    machine.run(WgmmaParams{out, a, b, a_offset, b_offset, kind});
    outputs.push_back({"wgmma kind " + std::to_string(kind) + " modes " + std::to_string(a >> 62) +
                           " " + std::to_string(b >> 62) + " offsets " + std::to_string(a_offset) +
                           " " + std::to_string(b_offset),
                       machine.read(out, kBytes)});
  });
  machine.reset();
  auto* lanes = static_cast<u32*>(machine.memory(32 * 64 * sizeof(u32)));
  machine.run(WarpParams{lanes});
  outputs.push_back({"warp", machine.read(lanes, 32 * 64 * sizeof(u32))});
  for (const TensorCase& c : kTensorCases) {
    machine.reset();
    run_tensor_probe(machine, c, outputs);
  }
  return outputs;
}

}  // namespace crossdock::testing::conformance
