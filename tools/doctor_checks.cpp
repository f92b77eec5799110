// See the header. Facts about limits are from the manual pages getrlimit(2), memfd_create(2),
// process_vm_readv(2) and the kernel's yama documentation.
// SPDX-License-Identifier: Apache-2.0
#include "doctor_checks.hpp"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/config.hpp"
#include "base/fd.hpp"
#include "cuda/driver.hpp"
#include "jit/compiler.hpp"
#include "jit/jit.hpp"
#include "topo/sysfs.hpp"

namespace crossdock::tools {
namespace {

using topo::Sysfs;

constexpr std::uint64_t kEnoughShmBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kEnoughDescriptors = 4096;

// For people: base::format_size() is exact, and so falls back on units that are too small.
std::string about(std::uint64_t bytes) {
  return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1u << 30));
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

Finding check_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string found =
      limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
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
  if (bytes >= kEnoughShmBytes) return {"/dev/shm", Health::kGood, about(bytes)};
  return {"/dev/shm", Health::kPoor, about(bytes),
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
    return {"process_vm calls", Health::kGood, "allowed within a process"};
  return {"process_vm calls", Health::kPoor, std::strerror(errno),
          "memory that an engine did not allocate moves over TCP even on one host",
          "allow process_vm_readv and process_vm_writev in the seccomp profile "
          "(docker run --cap-add=SYS_PTRACE)"};
}

// What yama asks for; root has it on a host, and in a container only when it was given.
bool has_ptrace_capability(const Sysfs& sysfs) {
  constexpr std::string_view kField = "CapEff:";
  constexpr std::uint64_t kSysPtrace = std::uint64_t{1} << 19;
  const std::string status = sysfs.text("proc/self/status").value_or("");
  const auto at = status.find(kField);
  if (at == std::string::npos) return false;
  return (std::strtoull(status.c_str() + at + kField.size(), nullptr, 16) & kSysPtrace) != 0;
}

Finding check_ptrace_scope(const Sysfs& sysfs) {
  constexpr std::int64_t kNobody = 3;
  const auto scope = sysfs.number("proc/sys/kernel/yama/ptrace_scope");
  if (!scope) return {"ptrace scope", Health::kGood, "no yama: processes of one user may"};
  const bool capable = has_ptrace_capability(sysfs);
  const std::string found =
      fmt::format("{}, {} CAP_SYS_PTRACE", *scope, capable ? "with" : "without");
  if (*scope == 0 || (capable && *scope < kNobody)) return {"ptrace scope", Health::kGood, found};
  return {"ptrace scope", Health::kPoor, found,
          "memory that an engine did not allocate moves over TCP even on one host: process_vm "
          "calls to other processes are refused",
          *scope >= kNobody ? "boot with another kernel.yama.ptrace_scope: 3 cannot be lowered"
                            : "sysctl kernel.yama.ptrace_scope=0, or give the capability "
                              "CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)"};
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

Finding check_driver(const base::Config& config) {
  const auto driver = cuda::Driver::load({.library = config.string("cuda.driver")});
  if (driver.ok())
    return {"CUDA driver", Health::kGood,
            fmt::format("CUDA {}, {}", cuda::version_text((*driver)->version), (*driver)->library)};
  return {"CUDA driver", Health::kAbsent, driver.error().message,
          "everything for GPUs is off; host memory works",
          "install the NVIDIA driver, or docker run --gpus all"};
}

// The one that engines would take, wherever settings and search lead to.
Finding check_compiler(const base::Config& config) {
  auto options = jit::JitOptions::from_config(config).compiler;
  const auto driver = cuda::Driver::load({.library = config.string("cuda.driver")});
  if (driver.ok()) options.newest_cuda = (*driver)->version;
  const auto compiler = jit::open_compiler(options, Deadline::in(std::chrono::seconds(10)));
  if (compiler.ok())
    return {"kernel compiler", Health::kGood,
            fmt::format("{} ({})", (*compiler)->id(), (*compiler)->location())};
  return {"kernel compiler", Health::kAbsent, compiler.error().message,
          "kernels cannot be compiled here; a warmed cache still works",
          "install the CUDA toolkit, or set jit.nvrtc or jit.nvcc to the file"};
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

std::vector<Finding> examine(const std::string& root) {
  const Sysfs sysfs(root);
  const auto config = base::Config::load();
  const base::Config settings = config.ok() ? *config : base::Config::defaults();
  return {
      check_settings(),          check_memfd(),          check_process_vm(),
      check_ptrace_scope(sysfs), check_descriptors(),    check_dev_shm(),
      check_huge_pages(sysfs),   check_driver(settings), check_compiler(settings),
  };
}

}  // namespace crossdock::tools
