// Copies to, and looks at, memory that may not be there; with the system's help and without.
// SPDX-License-Identifier: Apache-2.0
#include "mem/user_memory.hpp"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace crossdock::mem {
namespace {

constexpr std::size_t kPage = 4096;

// Four pages, the last two out of reach.
class HalfMemory {
 public:
  HalfMemory()
      : data_(static_cast<std::byte*>(::mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    (void)::mprotect(data_ + 2 * kPage, 2 * kPage, PROT_NONE);
  }
  ~HalfMemory() { ::munmap(data_, 4 * kPage); }
  HalfMemory(const HalfMemory&) = delete;
  HalfMemory& operator=(const HalfMemory&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* const data_;
};

// True when everything is as it should be; no gtest, for the forked child.
bool all_holds() {
  const HalfMemory memory;
  std::byte* const data = memory.data();
  if (!is_readable(data, 2 * kPage) || is_readable(data, 2 * kPage + 1)) return false;
  if (!is_readable(data + kPage, 1) || is_readable(data + 3 * kPage, 1)) return false;
  std::vector<std::byte> from(300);
  for (std::size_t i = 0; i < from.size(); ++i)
    from[i] = static_cast<std::byte>(i);
  // Uneven pieces, out of order.
  const std::array<iovec, 3> to{iovec{data + kPage, 7}, iovec{data, 193}, iovec{data + 500, 1000}};
  const Moved stored = store_bytes(to, from);
  if (stored.error != 0 || stored.bytes != 300) return false;
  if (std::memcmp(data + kPage, from.data(), 7) != 0 ||
      std::memcmp(data, from.data() + 7, 193) != 0 ||
      std::memcmp(data + 500, from.data() + 200, 100) != 0 || data[600] != std::byte{0})
    return false;
  // What can be placed is; the rest is told.
  const std::array<iovec, 2> torn{iovec{data, 100}, iovec{data + 2 * kPage, 200}};
  const Moved part = store_bytes(torn, from);
  if (part.error != EFAULT || part.bytes != 100) return false;
  std::vector<std::byte> loaded(300);
  if (const Moved all = load_bytes(loaded, from.data()); all.error != 0 || all.bytes != 300)
    return false;
  if (loaded != from) return false;
  // From the last 300 bytes that are there and one more.
  loaded.resize(301);
  return load_bytes(loaded, data + 2 * kPage - 300).error == EFAULT;
}

TEST(UserMemory, StoresLoadsAndLooks) {
  EXPECT_TRUE(all_holds());
}

// Containers may forbid process_vm_writev().
TEST(UserMemory, DoesSoWithoutTheSystemCallsToo) {
  const pid_t child = ::fork();
  if (child == 0) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      ::_exit(77);
    ::_exit(all_holds() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "the system does not let a process filter calls";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace crossdock::mem
