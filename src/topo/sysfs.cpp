// See the header.
// SPDX-License-Identifier: Apache-2.0
#include "topo/sysfs.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <strings.h>

#include "base/strings.hpp"

namespace crossdock::topo {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kMaxBytes = 64 * 1024;
constexpr int kMaxCpus = 1 << 16;  // bounds what a broken list can make us allocate

bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

// "0000:17:00.0", whose domain may have more than four digits.
bool is_pci_address(std::string_view text) {
  const auto colon = text.find(':');
  if (colon == std::string_view::npos || colon < 4 || text.size() != colon + 8) return false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool digit = i != colon && i != colon + 3 && i != colon + 6;
    if (digit && !is_hex(text[i])) return false;
  }
  return text[colon + 3] == ':' && text[colon + 6] == '.';
}

}  // namespace

std::optional<std::string> Sysfs::text(const std::string& path) const {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(full(path).c_str(), "re"),
                                                   &std::fclose);
  if (!file) return std::nullopt;
  std::string content(kMaxBytes, '\0');
  content.resize(std::fread(content.data(), 1, content.size(), file.get()));
  if (std::ferror(file.get()) != 0) return std::nullopt;  // as `speed` of a link that is down
  return std::string(base::trim(content));
}

std::optional<std::int64_t> Sysfs::number(const std::string& path) const {
  const auto content = text(path);
  if (!content) return std::nullopt;
  const auto value = base::parse_int(*content);
  return value.ok() ? std::optional(*value) : std::nullopt;
}

std::vector<std::string> Sysfs::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(full(path), error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return ::strverscmp(a.c_str(), b.c_str()) < 0;
  });
  return names;
}

std::string Sysfs::resolve(const std::string& path) const {
  std::error_code error;
  const auto base = fs::canonical(root_, error).string();
  if (error) return {};
  const auto target = fs::canonical(full(path), error).string();
  if (error) return {};
  if (base == "/") return target;
  return target.starts_with(base + "/") ? target.substr(base.size()) : std::string();
}

bool Sysfs::exists(const std::string& path) const {
  std::error_code error;
  return fs::exists(full(path), error);
}

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  for (const auto part : base::split(text, ',')) {
    const auto dash = part.find('-');
    const auto first = base::parse_int(part.substr(0, dash));
    const auto last =
        dash == std::string_view::npos ? first : base::parse_int(part.substr(dash + 1));
    if (!first.ok() || !last.ok() || *first < 0 || *last >= kMaxCpus) continue;
    for (auto cpu = *first; cpu <= *last; ++cpu)
      cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

std::string format_cpu_list(const std::vector<int>& cpus) {
  std::string out;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1)
      ++end;
    if (!out.empty()) out += ',';
    out += std::to_string(cpus[i]);
    if (end - i > 1) out += '-' + std::to_string(cpus[end - 1]);
    i = end;
  }
  return out;
}

std::vector<std::string> pci_path_of(std::string_view device_path) {
  std::vector<std::string> path;
  for (const auto part : base::split(device_path, '/')) {
    const bool host_bridge = path.empty() && part.starts_with("pci") && part.size() > 3 &&
                             is_hex(part[3]) && part.find(':') != std::string_view::npos;
    if (host_bridge || (!path.empty() && is_pci_address(part)))
      path.emplace_back(part);
    else if (!path.empty())
      break;  // below the device: net/eth0, infiniband/mlx5_0, virtio0
  }
  return path.size() < 2 ? std::vector<std::string>() : path;
}

}  // namespace crossdock::topo
