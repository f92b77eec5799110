// Reading of the small text files below /sys and /proc, with a root that tests replace by a made-up
// tree. Absence is normal and gives nothing. Any thread; no state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace crossdock::topo {

class Sysfs {
 public:
  // `root` is "/" for the machine itself.
  explicit Sysfs(std::string root) : root_(std::move(root)) {}

  // Trimmed content, at most 64 KiB of it; nothing when there is no such file or it cannot be read.
  [[nodiscard]] std::optional<std::string> text(const std::string& path) const;
  [[nodiscard]] std::optional<std::int64_t> number(const std::string& path) const;
  // Names in a folder, sorted (numbers in them by value); empty when there is no such folder.
  [[nodiscard]] std::vector<std::string> list(const std::string& path) const;
  // Where a link leads, as a path below the root ("/sys/devices/pci0000:00/..."); empty if nowhere.
  [[nodiscard]] std::string resolve(const std::string& path) const;
  [[nodiscard]] bool exists(const std::string& path) const;

 private:
  [[nodiscard]] std::string full(const std::string& path) const { return root_ + "/" + path; }
  std::string root_;
};

// "0-3,8,10-11" -> 0 1 2 3 8 10 11; what cannot be read as such is left out.
std::vector<int> parse_cpu_list(std::string_view text);
// The inverse: 0 1 2 3 8 -> "0-3,8".
std::string format_cpu_list(const std::vector<int>& cpus);

// The PCI addresses in a sysfs device path from the host bridge down, as "pci0000:16", then
// "0000:16:02.0", ..., and last the device itself. Empty for devices that are not on PCI.
std::vector<std::string> pci_path_of(std::string_view device_path);

}  // namespace crossdock::topo
