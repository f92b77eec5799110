// See check.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/check.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include <crossdock/layout/probe.cuh>
#include <crossdock/ptx/minifloat.cuh>

#include "symm/copy.hpp"
#include "symm/kernels/list.hpp"
#include "symm/tensor_map.hpp"

namespace crossdock::symm {
namespace {

using device::WgmmaCheckConfig;

constexpr u32 kRows = 64;   // of A
constexpr u32 kBlocks = 3;  // tiles of 128 bytes along K: the mbarrier's phase comes round
constexpr u32 kTileBytes = 128;

// Small integers, exact in either format, so that the order of the additions does not matter.
float element(u32 matrix, u32 row, u32 k) {
  return static_cast<float>(device::mix(matrix * 0x51ed27u + row * 1021 + k) % 9) - 4.0f;
}

u32 depth(const WgmmaCheckConfig& config) {
  return kBlocks * kTileBytes / (config.fp8 ? 1 : 2);
}

std::vector<u8> matrix(const WgmmaCheckConfig& config, u32 which, u32 rows) {
  const u32 width = config.fp8 ? 1 : 2;
  std::vector<u8> bytes(u64{rows} * depth(config) * width);
  for (u32 row = 0; row < rows; ++row)
    for (u32 k = 0; k < depth(config); ++k) {
      const u32 bits = device::bit_cast<u32>(element(which, row, k));
      const u32 code = config.fp8 ? device::minifloat::encode(device::minifloat::kE4m3, bits)
                                  : device::minifloat::encode_bf16(bits);
      std::memcpy(bytes.data() + (u64{row} * depth(config) + k) * width, &code, width);
    }
  return bytes;
}

Result<device::TensorMap> tile_map(const Rank& rank, const WgmmaCheckConfig& config, u8* base,
                                   u32 rows) {
  const u32 width = config.fp8 ? 1 : 2;
  TensorMapOptions options;
  options.base = base;
  options.element = config.fp8 ? TensorElement::kU8 : TensorElement::kBf16;
  options.dims = {depth(config), rows};
  options.strides = {u64{depth(config)} * width};
  options.box = {kTileBytes / width, rows};
  options.swizzle_bytes = 128;
  const cuda::Context* gpu = rank.device().context();
  return gpu == nullptr ? twin::encode_tensor_map(options) : encode_for_gpu(*gpu, options);
}

u32 count_wrong(const WgmmaCheckConfig& config, const std::vector<float>& d) {
  u32 wrong = 0;
  for (u32 row = 0; row < kRows; ++row)
    for (u32 column = 0; column < config.n; ++column) {
      float want = 0;
      for (u32 k = 0; k < depth(config); ++k)
        want += element(1, row, k) * element(2, column, k);
      wrong += d[u64{row} * config.n + column] != want;
    }
  return wrong;
}

}  // namespace

Result<u32> check_wgmma(Launcher& launcher, Rank& rank, const WgmmaCheckConfig& config,
                        Deadline deadline) {
  CROSSDOCK_TRY(ref, wgmma_check_kernel(config));
  const BlockShape block{.threads = device::kWarpgroupSize,
                         .shared_bytes = wgmma_check_shared_bytes(config)};
  CROSSDOCK_TRY(kernel, launcher.prepare(ref, block, deadline));
  const auto a = matrix(config, 1, kRows);
  const auto b = matrix(config, 2, config.n);
  CROSSDOCK_TRY(a_memory, rank.allocate(a.size()));
  CROSSDOCK_TRY(b_memory, rank.allocate(b.size()));
  CROSSDOCK_TRY(d_memory, rank.allocate(u64{kRows} * config.n * sizeof(float)));
  CROSSDOCK_CHECK_OK(upload(rank, a_memory.as<u8>(), a, deadline));
  CROSSDOCK_CHECK_OK(upload(rank, b_memory.as<u8>(), b, deadline));
  device::WgmmaCheckParams p{};
  if (config.tensor_map) {
    CROSSDOCK_TRY(a_map, tile_map(rank, config, a_memory.as<u8>(), kRows));
    CROSSDOCK_TRY(b_map, tile_map(rank, config, b_memory.as<u8>(), config.n));
    p.a_map = a_map;
    p.b_map = b_map;
  }
  p.a = a_memory.as<u8>();
  p.b = b_memory.as<u8>();
  p.d = d_memory.as<float>();
  p.k_blocks = kBlocks;
  CROSSDOCK_CHECK_OK(launcher.launch(rank, kernel, {}, p));
  CROSSDOCK_CHECK_OK(launcher.synchronize(deadline));
  CROSSDOCK_TRY(d, download(rank, p.d, u64{kRows} * config.n, deadline));
  return count_wrong(config, d);
}

Result<ConvertMismatches> check_conversions(Launcher& launcher, Rank& rank,
                                            const ConvertRange& range, Deadline deadline) {
  CROSSDOCK_TRY(kernel, launcher.prepare(convert_check_kernel(), {.threads = kConvertCheckThreads},
                                         deadline));
  CROSSDOCK_TRY(memory, rank.allocate(device::kConvertChecks * sizeof(u32)));
  const device::ConvertCheckParams p{memory.as<u32>(), range.first, range.stride, range.count};
  CROSSDOCK_CHECK_OK(launcher.launch(rank, kernel, {.grid = range.blocks}, p));
  CROSSDOCK_CHECK_OK(launcher.synchronize(deadline));
  CROSSDOCK_TRY(counts, download(rank, p.mismatches, device::kConvertChecks, deadline));
  ConvertMismatches mismatches{};
  std::copy(counts.begin(), counts.end(), mismatches.begin());
  return mismatches;
}

}  // namespace crossdock::symm
