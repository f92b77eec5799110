// See host_identity.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/host_identity.hpp"

#include <fstream>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

namespace crossdock::transfer::detail {
namespace {

// Field 22 of /proc/self/stat; the command name before it may hold spaces and parentheses.
std::uint64_t own_start_time() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(line.substr(name_end + 1));
  std::string field;
  for (int i = 3; i < 22; ++i)
    rest >> field;
  std::uint64_t start = 0;
  rest >> start;
  return start;
}

}  // namespace

transport::HostIdentity read_host_identity() {
  transport::HostIdentity host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host.boot_id;
  struct stat ns{};
  if (::stat("/proc/self/ns/pid", &ns) == 0) host.pid_namespace = ns.st_ino;
  host.pid = static_cast<std::uint32_t>(::getpid());
  host.start_time = own_start_time();
  return host;
}

}  // namespace crossdock::transfer::detail
