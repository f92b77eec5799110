// Jit: turns kernel specifications into kernels on a GPU. `prepare()` compiles or loads; launching
// never compiles. One object serves all GPUs of a process; thread-safe. It owns no thread between
// calls; a compilation runs on the thread that asked, prepare_all() on a few threads of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/config.hpp"
#include "base/log.hpp"
#include "cuda/module.hpp"
#include "jit/binary.hpp"
#include "jit/cache.hpp"
#include "jit/compiler.hpp"

namespace crossdock::jit {

struct JitOptions {
  CompilerOptions compiler;
  CacheOptions cache;
  std::span<const SourceFile> files = embedded_files();
  unsigned threads = 0;  // of prepare_all; 0: as many as CPUs, at most 8
  base::Logger log = {};

  // From the jit.* settings; what they leave empty comes from CUDA_HOME (or CUDA_PATH) and, for the
  // cache, XDG_CACHE_HOME or HOME.
  static JitOptions from_config(const base::Config& config, base::Logger log = {});
};

// A kernel that is loaded on a GPU. A cheap shared handle; the code stays loaded while one exists.
class Kernel {
 public:
  [[nodiscard]] const KernelSpec& spec() const { return code_->spec; }
  [[nodiscard]] const ResourceUse& use() const { return code_->use; }
  [[nodiscard]] const cuda::Function& function() const { return code_->function; }
  // Never compiles; safe while the stream is being captured.
  template <class Params>
  Result<void> launch(const cuda::Stream& stream, const cuda::LaunchOptions& options,
                      const Params& params) const {
    return code_->function.launch(stream, options, params);
  }

 private:
  friend class Jit;
  struct Code {
    KernelSpec spec;
    ResourceUse use;
    cuda::Module module;
    cuda::Function function;
  };
  explicit Kernel(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

struct PrepareOptions {
  Deadline deadline;
  // The stream the caller will launch on, if known: preparing is refused while it is captured.
  const cuda::Stream* stream = nullptr;
  // Allowed for the kernel at its launches; 0: none beyond the 48 KiB every kernel has.
  std::size_t dynamic_shared_bytes = 0;
};

struct BuildInfo {
  bool compiled = false;  // false: it came from the cache
  double milliseconds = 0;
};

class Jit {
 public:
  // `compiler`: one of the caller's own instead of the one that the options would find.
  explicit Jit(JitOptions options, std::unique_ptr<Compiler> compiler = nullptr);
  Jit(const Jit&) = delete;
  Jit& operator=(const Jit&) = delete;

  // The machine code, from the cache or compiled; needs no GPU. `spec.sm` says for which.
  Result<Binary> build(const KernelSpec& spec, Deadline deadline, BuildInfo* info = nullptr);

  // The kernel on the context's GPU; `spec.sm` 0 takes that GPU's architecture. The second time it
  // comes from memory.
  Result<Kernel> prepare(const cuda::Context& context, const KernelSpec& spec,
                         const PrepareOptions& options);
  // All or the first error; compiles side by side.
  Result<std::vector<Kernel>> prepare_all(const cuda::Context& context,
                                          std::span<const KernelSpec> specs,
                                          const PrepareOptions& options);
  // build() of each, side by side; results in the order of the specs.
  std::vector<Result<Binary>> build_all(std::span<const KernelSpec> specs, Deadline deadline);

  // Opened at the first need and then kept.
  Result<const Compiler*> compiler(Deadline deadline);
  [[nodiscard]] Cache& cache() { return cache_; }

  struct Counters {
    std::uint64_t compiled = 0;
    std::uint64_t loaded = 0;  // from the cache
    std::uint64_t corrupt = 0;
    std::uint64_t write_failures = 0;
  };
  [[nodiscard]] Counters counters() const;

 private:
  struct Sources {
    std::vector<SourceFile> files;
    Key key;
  };
  Result<Sources> sources(const KernelSpec& spec) const;
  Result<Binary> compile(const KernelSpec& spec, const Sources& sources, const Compiler& compiler,
                         Deadline deadline);
  Result<Binary> find_or_compile(const KernelSpec& spec, Deadline deadline, bool& compiled);
  std::optional<Kernel> loaded_kernel(const std::string& id) const;

  JitOptions options_;
  Cache cache_;
  mutable std::mutex mutex_;  // guards what follows; never held while compiling
  std::mutex compiler_mutex_;
  std::unique_ptr<Compiler> compiler_;
  std::map<std::string, Kernel> kernels_;  // by context and specification
  std::atomic<std::uint64_t> compiled_{0};
};

}  // namespace crossdock::jit
