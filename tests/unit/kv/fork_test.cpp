// Handles in a child that was forked: their threads are not there.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::KvCluster;

Deadline soon() {
  return Deadline::in(60s);
}

TEST(KvFork, AForkedChildMayDestroyEverything) {
  KvCluster cluster({});
  cluster.admit_and_expect(1, 4, soon());
  ASSERT_TRUE(cluster.prefill[0]->sender.push(1, 0).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    cluster.prefill.clear();
    cluster.decode.clear();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  for (std::uint32_t layer = 1; layer < 3; ++layer)
    ASSERT_TRUE(cluster.prefill[0]->sender.push(1, layer).ok());
  EXPECT_TRUE(cluster.decode[0]->receiver.wait(1, soon()).ok()) << "the parent goes on";
}

}  // namespace
}  // namespace crossdock::kv
