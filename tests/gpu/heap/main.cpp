// The children of the process tests are this executable too. SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <gmock/gmock.h>

#include "support/symm_worker.hpp"

int main(int argc, char** argv) {
  if (crossdock::testing::is_symm_worker(argc, argv))
    return crossdock::testing::symm_worker_main(argc, argv);
  std::signal(SIGPIPE, SIG_IGN);  // a killed child's stdin
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
