// See the header. Facts about limits are from the manual pages getrlimit(2), memfd_create(2),
// process_vm_readv(2) and the kernel's yama documentation.
// SPDX-License-Identifier: Apache-2.0
#include "doctor_checks.hpp"

#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/config.hpp"
#include "base/fd.hpp"
#include "base/strings.hpp"
#include "topo/sysfs.hpp"

namespace crossdock::tools {
namespace {

using base::format_size;
using topo::Sysfs;

constexpr std::uint64_t kEnoughLockedBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kEnoughShmBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kEnoughDescriptors = 4096;

std::string limit_text(rlim_t value, bool bytes) {
  if (value == RLIM_INFINITY) return "unlimited";
  return bytes ? format_size(value) : std::to_string(value);
}

Finding check_settings() {
  const auto config = base::Config::load();
  if (!config.ok())
    return {"settings", Health::kBroken, config.error().message,
            "no engine starts with these settings", "correct the value or remove it"};
  if (!config->warnings().empty())
    return {"settings", Health::kPoor, config->warnings().front(), "a variable has no effect",
            "correct its name; crossdock info --config lists all"};
  return {"settings", Health::kGood, "valid"};
}

Finding check_memlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string found = limit_text(limit.rlim_cur, true);
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= kEnoughLockedBytes)
    return {"locked memory", Health::kGood, found};
  return {"locked memory", Health::kPoor, found,
          "registering memory with RDMA devices fails beyond this",
          "ulimit -l unlimited, or docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity"};
}

Finding check_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string found = limit_text(limit.rlim_cur, false);
  if (limit.rlim_cur >= kEnoughDescriptors) return {"open files", Health::kGood, found};
  return {"open files", Health::kPoor, found,
          "each peer takes several descriptors; new peers are refused when they run out",
          fmt::format("ulimit -n {}", kEnoughDescriptors * 16)};
}

Finding check_memfd() {
  const base::UniqueFd fd(::memfd_create("crossdock-doctor", MFD_CLOEXEC));
  if (fd && ::ftruncate(fd.get(), 4096) == 0) return {"shared memory files", Health::kGood, "work"};
  return {"shared memory files", Health::kBroken, std::strerror(errno),
          "engines cannot allocate memory that peers on this host map",
          "allow memfd_create in the seccomp profile"};
}

Finding check_dev_shm() {
  struct statvfs status{};
  if (::statvfs("/dev/shm", &status) != 0)
    return {"/dev/shm", Health::kAbsent, std::strerror(errno),
            "frameworks beside Crossdock may need it; Crossdock itself uses memfd", ""};
  const std::uint64_t bytes = std::uint64_t{status.f_blocks} * status.f_frsize;
  if (bytes >= kEnoughShmBytes) return {"/dev/shm", Health::kGood, format_size(bytes)};
  return {"/dev/shm", Health::kPoor, format_size(bytes),
          "frameworks beside Crossdock may run out of it; Crossdock itself uses memfd",
          "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"};
}

Finding check_process_vm() {
  int source = 42;
  int target = 0;
  iovec to{&target, sizeof target};
  iovec from{&source, sizeof source};
  const auto moved = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
  if (moved == sizeof target && target == source)
    return {"process_vm calls", Health::kGood, "allowed"};
  return {"process_vm calls", Health::kPoor, std::strerror(errno),
          "memory that an engine did not allocate moves over TCP even on one host",
          "allow process_vm_readv and process_vm_writev in the seccomp profile "
          "(docker run --cap-add=SYS_PTRACE)"};
}

Finding check_ptrace_scope(const Sysfs& sysfs) {
  const auto scope = sysfs.number("proc/sys/kernel/yama/ptrace_scope");
  if (!scope) return {"ptrace scope", Health::kGood, "no yama: processes of one user may"};
  const std::string found = std::to_string(*scope);
  if (*scope == 0 || ::geteuid() == 0) return {"ptrace scope", Health::kGood, found};
  return {"ptrace scope", Health::kPoor, found,
          "process_vm calls to other processes are refused, shm then needs memory that the engine "
          "allocated",
          "sysctl kernel.yama.ptrace_scope=0, or give the capability CAP_SYS_PTRACE"};
}

Finding check_huge_pages(const Sysfs& sysfs) {
  const auto mode = sysfs.text("sys/kernel/mm/transparent_hugepage/shmem_enabled");
  if (!mode) return {"huge pages", Health::kAbsent, "no transparent huge pages", "", ""};
  const auto open = mode->find('[');
  const auto close = mode->find(']');
  const std::string chosen =
      open < close && close != std::string::npos ? mode->substr(open + 1, close - open - 1) : *mode;
  if (chosen == "always" || chosen == "advise" || chosen == "within_size" || chosen == "force")
    return {"huge pages", Health::kGood, "shared memory: " + chosen};
  return {"huge pages", Health::kAbsent, "shared memory: " + chosen,
          "first touches of large shared regions and copies of scattered small pages take longer",
          "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"};
}

struct Library {
  std::string_view what;
  std::vector<const char*> names;
  std::string_view cause;
  std::string_view fix;
};

Finding check_library(const Library& library) {
  for (const char* name : library.names) {
    // Stays open: what such a library has allocated for itself is lost when it is unloaded.
    void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    return {std::string(library.what), Health::kGood, name};
  }
  return {std::string(library.what), Health::kAbsent, "not found", std::string(library.cause),
          std::string(library.fix)};
}

Finding check_gpu_memory_for_rdma(const Sysfs& sysfs) {
  if (!sysfs.exists("proc/driver/nvidia/version"))
    return {"GPU memory over RDMA", Health::kAbsent, "no NVIDIA driver", "", ""};
  if (sysfs.exists("sys/module/nvidia_peermem"))
    return {"GPU memory over RDMA", Health::kGood, "nvidia_peermem is loaded"};
  return {"GPU memory over RDMA", Health::kAbsent, "nvidia_peermem is not loaded",
          "RDMA of GPU memory needs dma-buf support of driver and kernel",
          "modprobe nvidia_peermem, or use the open kernel modules with a kernel of 5.12 or later"};
}

}  // namespace

std::string_view to_string(Health health) noexcept {
  switch (health) {
    case Health::kGood:
      return "good";
    case Health::kAbsent:
      return "absent";
    case Health::kPoor:
      return "poor";
    case Health::kBroken:
      return "broken";
  }
  return "unknown";
}

std::vector<Finding> examine() {
  const Sysfs sysfs("/");
  return {
      check_settings(),
      check_memfd(),
      check_process_vm(),
      check_ptrace_scope(sysfs),
      check_memlock(),
      check_descriptors(),
      check_dev_shm(),
      check_huge_pages(sysfs),
      check_library({"CUDA driver",
                     {"libcuda.so.1"},
                     "everything for GPUs is off; host memory works",
                     "install the NVIDIA driver, or docker run --gpus all"}),
      check_library({"NVRTC",
                     {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"},
                     "kernels cannot be compiled here; a warmed cache still works",
                     "install the CUDA toolkit or pip install nvidia-cuda-nvrtc"}),
      check_library({"verbs library",
                     {"libibverbs.so.1"},
                     "the rdma transport is off; tcp is used between hosts",
                     "apt-get install libibverbs1 ibverbs-providers"}),
      check_gpu_memory_for_rdma(sysfs),
  };
}

}  // namespace crossdock::tools
