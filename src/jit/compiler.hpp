// The contract of a compiler: NVRTC in this process, or nvcc as a child process. Opened at run
// time; having none is a normal, reported condition. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "jit/binary.hpp"
#include "jit/bundle.hpp"
#include "jit/spec.hpp"

namespace crossdock::jit {

struct CompileRequest {
  const KernelSpec& spec;
  std::span<const SourceFile> files;  // all that spec.header() reaches
  Deadline deadline;
};

struct Compiled {
  std::vector<std::byte> image;
  std::string symbol;
  ResourceUse use;
};

class Compiler {
 public:
  virtual ~Compiler() = default;
  Compiler() = default;
  Compiler(const Compiler&) = delete;
  Compiler& operator=(const Compiler&) = delete;

  // "nvrtc 13.0 -std=c++20": kind, version and flags, as they enter the key. No path.
  [[nodiscard]] virtual const std::string& id() const = 0;
  // Where it was found, for people.
  [[nodiscard]] virtual const std::string& location() const = 0;
  // Source errors are kInvalidArgument with the compiler's own lines (file, line, text).
  virtual Result<Compiled> compile(const CompileRequest& request) const = 0;
};

struct CompilerOptions {
  std::string nvrtc = {};      // path of the NVRTC library; empty: search; "none": do not use it
  std::string nvcc = {};       // path of nvcc; empty: search; "none": do not use it
  std::string cuda_home = {};  // a toolkit to search first, as CUDA_HOME names it
  int newest_cuda = 0;         // 13000: compilers newer than this driver are passed over; 0: any
  bool line_info = false;  // lines of the source in the machine code, for profilers and checkers
};

// kIncompatible from either: one was found that is newer than the driver.
Result<std::unique_ptr<Compiler>> open_nvrtc(const CompilerOptions& options);
Result<std::unique_ptr<Compiler>> open_nvcc(const CompilerOptions& options, Deadline deadline);
// NVRTC, or else nvcc, or else kUnsupported with the remedies.
Result<std::unique_ptr<Compiler>> open_compiler(const CompilerOptions& options, Deadline deadline);

// --- shared by the compilers ---
// Whether a driver (CompilerOptions::newest_cuda) takes what a compiler of this major version
// makes.
constexpr bool is_taken(int cuda_major, int newest_cuda) {
  return newest_cuda == 0 || cuda_major <= newest_cuda / 1000;
}
// That of a compiler's id(); 0 where it has none.
int cuda_major_of(std::string_view compiler_id);
// kIncompatible: `found`, as in "NVRTC 13 at /usr/lib/libnvrtc.so.13", is not taken.
Error too_new(std::string_view found, int newest_cuda);
inline constexpr const char* kStandardFlag = "-std=c++20";
inline constexpr const char* kLinesFlag = "-lineinfo";
// All flags that are the same for every kernel, as they enter the key.
std::string flags_of(const CompilerOptions& options);
// The error of a source that does not compile; `log` is cut to what a person reads.
Error compile_error(const KernelSpec& spec, std::string_view compiler, std::string_view log);
// The one kernel of a compiled image.
Result<std::string> only_kernel(const KernelSpec& spec, std::span<const std::byte> image);

}  // namespace crossdock::jit
