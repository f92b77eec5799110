// Entry of the GPU tests of the CUDA and JIT layers; see import_child.hpp for the second role.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <gmock/gmock.h>

#include "gpu/cuda/import_child.hpp"

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], crossdock::testing::kImportChildFlag) == 0)
    return crossdock::testing::import_child(argv[2]);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
