// The matrices of an expert layer as preparation goes through them, on the CPU and on GPUs: what
// may be wrong with a description, and what a flaw in the values is called. No state; any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>

#include <crossdock/core/result.hpp>
#include <crossdock/layout/weights.cuh>
#include <crossdock/moe/weights.hpp>

namespace crossdock::moe {

struct NamedMatrix {
  const char* name;
  device::WeightMatrix matrix;
};
// gate_up and down. `to` is written to, in spite of its type.
std::array<NamedMatrix, 2> weight_matrices(const PlainWeights& plain, const WeightsView& to);

WeightLayout layout_of(const PlainWeights& plain, const PrepareOptions& options);
// Of 32 values, that are folded into e4m3; 0 where e2m1 is neither made nor comes in.
device::u64 folded_groups(const PlainWeights& plain, const WeightLayout& to);

// Pointers, shapes, and what goes with what.
Result<> check_plain(const PlainWeights& plain, const WeightLayout& to);

// Reads `bytes` of the plain matrix, for the message.
using ReadPlain = std::function<Result<>(void* to, const device::u8* from, device::u64 bytes)>;
Error weight_flaw_error(const NamedMatrix& m, device::u64 flaw, const ReadPlain& read);

// Bytes of a scale.
device::u32 width_of(ScaleType type);

}  // namespace crossdock::moe
