// Runs the probes on a GPU, compares with the file that conformance_twin wrote and says which probe
// differs: conformance_gpu FILE. Exit code 0 when all are equal.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#include "probe.cuh"

namespace {

using namespace crossdock::testing::conformance;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* device(std::size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "allocate");
  check(cudaMemset(p, 0, count * sizeof(T)), "clear");
  return static_cast<T*>(p);
}

class Comparer {
 public:
  explicit Comparer(std::FILE* file) : file_(file) {}
  void compare(const void* on_device, std::size_t bytes, const std::string& name) {
    check(cudaDeviceSynchronize(), name.c_str());
    std::vector<unsigned char> gpu(bytes);
    std::vector<unsigned char> twin(bytes);
    check(cudaMemcpy(gpu.data(), on_device, bytes, cudaMemcpyDeviceToHost), "copy");
    const bool read = std::fread(twin.data(), 1, bytes, file_) == bytes;
    ++probes_;
    if (read && gpu == twin) return;
    ++different_;
    std::size_t at = 0;
    while (read && at + 1 < bytes && gpu[at] == twin[at])
      ++at;
    std::printf("DIFFERENT %s at byte %zu of %zu\n", name.c_str(), at, bytes);
  }
  int finish() const {
    std::printf("%d probes, %d different\n", probes_, different_);
    return different_ == 0 ? 0 : 1;
  }

 private:
  std::FILE* file_;
  int probes_ = 0;
  int different_ = 0;
};

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

TensorMap encode(void* base, const TensorCase& c) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found),
        "entry point");
  const CUtensorMapSwizzle swizzle = c.swizzle == 0    ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : c.swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : c.swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_128B;
  const cuuint64_t dims[2] = {kTensorWidth, kTensorHeight};
  const cuuint64_t strides[1] = {kTensorWidth * 2};
  const cuuint32_t box[2] = {c.box_width, kBoxHeight};
  const cuuint32_t element_strides[2] = {1, 1};
  CUtensorMap map;
  const CUresult status = reinterpret_cast<Encode>(entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, base, dims, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", static_cast<int>(status));
    std::exit(1);
  }
  TensorMap out;
  static_assert(sizeof out == sizeof map);
  std::memcpy(&out, &map, sizeof out);
  return out;
}

template <class Kernel>
void allow_shared(Kernel kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "shared memory");
}

void tensor(Comparer& comparer, const TensorCase& c) {
  std::vector<u16> host(kTensorWidth * kTensorHeight);
  for (u32 i = 0; i < host.size(); ++i)
    host[i] = static_cast<u16>(i + 1);
  auto* in = device<u16>(host.size());
  auto* copy = device<u16>(host.size());
  check(cudaMemcpy(in, host.data(), host.size() * 2, cudaMemcpyHostToDevice), "copy");
  TensorParams p{};
  p.bytes = c.box_width * 2 * kBoxHeight;
  p.tile_bytes = tile_bytes(c);
  p.out = device<u32>(p.tile_bytes / 4);
  p.x = c.x;
  p.y = c.y;
  p.stores = stores(c);
  p.load = encode(in, c);
  p.store = encode(copy, c);
  tensor_probe<<<1, 32, kShared>>>(p);
  const std::string name = "swizzle " + std::to_string(c.swizzle) + " box " +
                           std::to_string(c.box_width) + " at " + std::to_string(c.x) + "," +
                           std::to_string(c.y);
  comparer.compare(p.out, p.tile_bytes, "tensor load " + name);
  comparer.compare(copy, host.size() * 2, "tensor store " + name);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: conformance_gpu FILE\n"), 2;
  std::FILE* file = std::fopen(argv[1], "rb");
  if (file == nullptr) return std::perror(argv[1]), 1;
  Comparer comparer(file);
  allow_shared(wgmma_probe);
  allow_shared(warp_probe);
  allow_shared(tensor_probe);
  for_each_wgmma([&](u32 kind, u64 a, u64 b, u32 a_offset, u32 b_offset) {
    auto* out = device<float>(128 * 32);
    wgmma_probe<<<1, 128, kShared>>>(WgmmaParams{out, a, b, a_offset, b_offset, kind});
    comparer.compare(out, 128 * 32 * 4,
                     "wgmma kind " + std::to_string(kind) + " modes " + std::to_string(a >> 62) +
                         " " + std::to_string(b >> 62) + " offsets " + std::to_string(a_offset) +
                         " " + std::to_string(b_offset));
    check(cudaFree(out), "free");
  });
  auto* lanes = device<u32>(32 * 64);
  warp_probe<<<1, 32, kShared>>>(WarpParams{lanes});
  comparer.compare(lanes, 32 * 64 * 4, "warp");
  for (const TensorCase& c : kTensorCases)
    tensor(comparer, c);
  return comparer.finish();
}
