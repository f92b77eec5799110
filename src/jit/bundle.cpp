// Finding what a kernel's source reaches. See bundle.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/bundle.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <string>

namespace crossdock::jit {
namespace {

const SourceFile* find_file(std::span<const SourceFile> files, std::string_view path) {
  for (const auto& file : files)
    if (file.path == path) return &file;
  return nullptr;
}

std::string_view skip_blanks(std::string_view text) {
  const auto start = text.find_first_not_of(" \t");
  return start == std::string_view::npos ? std::string_view{} : text.substr(start);
}

// "crossdock/core.cuh" of a line `#include <crossdock/core.cuh>`; empty for any other line.
std::string_view included_path(std::string_view line) {
  line = skip_blanks(line);
  if (!line.starts_with('#')) return {};
  line = skip_blanks(line.substr(1));
  if (!line.starts_with("include")) return {};
  line = skip_blanks(line.substr(7));
  if (line.empty() || (line[0] != '<' && line[0] != '"')) return {};
  const auto end = line.find(line[0] == '<' ? '>' : '"', 1);
  return end == std::string_view::npos ? std::string_view{} : line.substr(1, end - 1);
}

std::vector<std::string_view> includes_of(std::string_view content) {
  std::vector<std::string_view> paths;
  while (!content.empty()) {
    const auto end = content.find('\n');
    if (const auto path = included_path(content.substr(0, end)); !path.empty())
      paths.push_back(path);
    content = end == std::string_view::npos ? std::string_view{} : content.substr(end + 1);
  }
  return paths;
}

}  // namespace

std::string_view embedded_kernel_list() noexcept {
  const auto* const file = find_file(embedded_files(), "kernels.json");
  return file ? file->content : std::string_view{};
}

Result<std::vector<SourceFile>> reachable_files(std::span<const SourceFile> files,
                                                std::string_view root) {
  const auto* const first = find_file(files, root);
  if (!first)
    return make_error(
        Code::kNotFound,
        fmt::format("there is no device source {} in this build of the library", root));
  std::vector<const SourceFile*> found = {first};
  for (std::size_t next = 0; next < found.size(); ++next) {
    for (const auto path : includes_of(found[next]->content)) {
      const auto* const file = find_file(files, path);
      if (file && std::find(found.begin(), found.end(), file) == found.end()) found.push_back(file);
    }
  }
  std::vector<SourceFile> result;
  result.reserve(found.size());
  for (const auto* file : found)
    result.push_back(*file);
  std::sort(result.begin(), result.end(),
            [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return result;
}

}  // namespace crossdock::jit
