// A network of a test's own, where interfaces can be made, lose their route and go down: namespaces
// of user and network that the program enters by executing itself again. Needs unshare(1) and
// ip(8).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sched.h>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "base/child_process.hpp"

namespace crossdock::testing {

inline bool shell(const std::string& command) {
  return std::system(command.c_str()) == 0;
}

// First in main(), in a program without threads. Returns true inside of the namespace, where the
// loopback interface is up and nothing else is there; false where the system does not permit one.
inline bool enter_network_namespace(char** argv) {
  constexpr const char* kInside = "TEST_IN_NETWORK_NAMESPACE";
  if (std::getenv(kInside) != nullptr) return shell("ip link set lo up");
  if (!shell("unshare -rn ip link add v0 type veth peer name v1 >/dev/null 2>&1")) return false;
  ::setenv(kInside, "1", 1);
  std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<char*> command;
  std::string words[] = {"unshare", "-rn"};
  for (auto& word : words)
    command.push_back(word.data());
  command.push_back(self.data());
  for (char** argument = argv + 1; *argument != nullptr; ++argument)
    command.push_back(*argument);
  command.push_back(nullptr);
  ::execvp("unshare", command.data());
  ::unsetenv(kInside);
  return false;
}

// What a process at the other end of a cable does, in a network of its own: it says "here", then
// does what its parent tells it in a line, "shell COMMAND" or one of `commands` with its arguments,
// and answers with a line, until there are no more.
inline int serve_other_end(
    const std::map<std::string, std::function<std::string(std::istream&)>>& commands) {
  if (::unshare(CLONE_NEWNET) != 0) return 1;
  base::say_parent("here");
  std::string line;
  while (base::hear_parent(line)) {
    std::istringstream in(line);
    std::string word;
    in >> word;
    if (word == "shell")
      base::say_parent(shell(line.substr(6)) ? "ok" : "failed");
    else
      base::say_parent(commands.at(word)(in));
  }
  return 0;
}

// Where a process listens, "127.0.0.1:7000" or, for IPv6, "[..]:7000".
inline std::vector<std::string> listening_sockets(pid_t pid) {
  const std::string process = "/proc/" + std::to_string(pid);
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator(process + "/fd")) {
    std::error_code gone;
    own.insert(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  std::vector<std::string> found;
  for (const std::string table : {"tcp", "tcp6"}) {
    std::ifstream lines(process + "/net/" + table);
    for (std::string line; std::getline(lines, line);) {
      char address[33] = {};
      unsigned port = 0, state = 0;
      unsigned long inode = 0;
      if (std::sscanf(line.c_str(), " %*d: %32[0-9A-F]:%x %*s %x %*s %*s %*s %*d %*d %lu", address,
                      &port, &state, &inode) != 4)
        continue;
      if (state != 10 || !own.contains("socket:[" + std::to_string(inode) + "]")) continue;
      const unsigned long ip = std::stoul(std::string(address).substr(0, 8), nullptr, 16);
      char text[64];
      std::snprintf(text, sizeof text, "%lu.%lu.%lu.%lu:%u", ip & 255, ip >> 8 & 255,
                    ip >> 16 & 255, ip >> 24 & 255, port);
      found.push_back(table == "tcp" ? text : "[..]:" + std::to_string(port));
    }
  }
  return found;
}

}  // namespace crossdock::testing
