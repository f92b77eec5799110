// SPDX-License-Identifier: Apache-2.0
#include "base/fork_check.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace crossdock::base {
namespace {

// The exit code of a child that runs `work`.
template <class Work>
int in_a_child(const Work& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    ::_exit(work());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkCheck, EachProcessKnowsWhatItHasMadeItself) {
  const ForkCheck of_parent;
  EXPECT_FALSE(of_parent.forked());
  EXPECT_EQ(in_a_child([&] {
              if (!of_parent.forked()) return 1;
              const ForkCheck of_child;
              if (of_child.forked() || !of_parent.forked()) return 2;
              return in_a_child([&] {
                const ForkCheck of_grandchild;
                const bool knows =
                    of_parent.forked() && of_child.forked() && !of_grandchild.forked();
                return knows ? 0 : 3;
              });
            }),
            0);
  EXPECT_FALSE(of_parent.forked());
  EXPECT_FALSE(ForkCheck().forked());
}

}  // namespace
}  // namespace crossdock::base
