// Choosing a compiler, and what both share. See compiler.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/compiler.hpp"

#include <charconv>
#include <fmt/format.h>

namespace crossdock::jit {
namespace {

constexpr std::size_t kMaxLogBytes = 4000;
// Major versions of CUDA: the first whose compilers know C++20, and the one whose packages have no
// version in their names.
constexpr int kOldestCompiler = 12;
constexpr int kNewestCompiler = 13;

// The lines about errors and what follows them; the assembler's figures are of no use here.
std::string readable(std::string_view log) {
  std::string text;
  while (!log.empty() && text.size() < kMaxLogBytes) {
    const auto end = log.find('\n');
    const auto line = log.substr(0, end);
    if (!line.empty() && line[0] != '\0' && !line.starts_with("ptxas info")) {
      text += '\n';
      text += line;
    }
    log = end == std::string_view::npos ? std::string_view{} : log.substr(end + 1);
  }
  if (!log.empty()) text += "\n(more lines were left out)";
  while (!text.empty() && text.back() == '\0')
    text.pop_back();
  return text;
}

std::string cuda_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// What helps with this driver: a package of another major version would be passed over as well.
std::string remedies(const CompilerOptions& options) {
  const int major = options.newest_cuda / 1000;
  if (major != 0 && major < kOldestCompiler)
    return fmt::format("Update the driver: it takes CUDA {}, and the kernels need a compiler of {}",
                       cuda_text(options.newest_cuda), kOldestCompiler);
  const bool old = major != 0 && major < kNewestCompiler;
  const std::string suffix = old ? fmt::format("-cu{}", major) : "";
  const std::string version = old ? fmt::format(" {}", major) : "";
  const std::string of = old ? fmt::format(" of CUDA {}", major) : "";
  return fmt::format(
      "Any one of these helps: (1) pip install nvidia-cuda-nvrtc{}; "
      "(2) install the CUDA{} toolkit and set CUDA_HOME, or jit.nvrtc or jit.nvcc; "
      "(3) run `crossdock jit warm` on a machine with a compiler{} and copy its cache to "
      "jit.cache_dir here{}",
      suffix, version, of, old ? "; (4) update the driver" : "");
}

}  // namespace

Result<std::unique_ptr<Compiler>> open_compiler(const CompilerOptions& options, Deadline deadline) {
  auto nvrtc = open_nvrtc(options);
  if (nvrtc.ok()) return nvrtc;
  auto nvcc = open_nvcc(options, deadline);
  if (nvcc.ok()) return nvcc;
  return make_error(Code::kUnsupported,
                    fmt::format("no CUDA compiler for the kernels ({}; {}). {}",
                                nvrtc.error().message, nvcc.error().message, remedies(options)));
}

int cuda_major_of(std::string_view compiler_id) {
  int major = 0;
  const auto blank = compiler_id.find(' ');
  if (blank == std::string_view::npos) return 0;
  std::from_chars(compiler_id.data() + blank + 1, compiler_id.data() + compiler_id.size(), major);
  return major;
}

Error too_new(std::string_view found, int newest_cuda) {
  return make_error(Code::kIncompatible,
                    fmt::format("{} is newer than the driver, which takes CUDA {}", found,
                                cuda_text(newest_cuda)));
}

std::string flags_of(const CompilerOptions& options) {
  return options.line_info ? fmt::format("{} {}", kStandardFlag, kLinesFlag) : kStandardFlag;
}

Error compile_error(const KernelSpec& spec, std::string_view compiler, std::string_view log) {
  return invalid_argument(
      fmt::format("kernel {} does not compile with {}:{}", spec.title(), compiler, readable(log)));
}

Result<std::string> only_kernel(const KernelSpec& spec, std::span<const std::byte> image) {
  CROSSDOCK_TRY(symbols, kernel_symbols(image));
  if (symbols.size() == 1) return symbols[0];
  return make_error(Code::kInternal,
                    fmt::format("kernel {} compiled to {} kernels; its header must "
                                "hold templates only",
                                spec.title(), symbols.size()));
}

}  // namespace crossdock::jit
