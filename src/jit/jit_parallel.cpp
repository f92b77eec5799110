// Preparing many kernels side by side, and the options from the settings. See jit.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "jit/jit.hpp"

namespace crossdock::jit {
namespace {

// Calls work(0 .. count-1) on a few threads, the calling one among them. Where no thread can be
// made the caller does it all.
void run_parallel(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  const auto loop = [&] {
    for (std::size_t i = next++; i < count; i = next++)
      work(i);
  };
  std::vector<std::thread> helpers;
  const auto wanted = std::min<std::size_t>(threads, count);
  for (std::size_t i = 1; i < wanted; ++i) {
    try {
      helpers.emplace_back(loop);
    } catch (const std::system_error&) {
      break;
    }
  }
  loop();
  for (auto& helper : helpers)
    helper.join();
}

unsigned thread_count(unsigned wanted) {
  if (wanted != 0) return wanted;
  return std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
}

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

std::string default_cache_folder() {
  if (const auto xdg = environment("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/crossdock";
  if (const auto home = environment("HOME"); !home.empty()) return home + "/.cache/crossdock";
  return {};
}

}  // namespace

JitOptions JitOptions::from_config(const base::Config& config, base::Logger log) {
  JitOptions options;
  options.log = std::move(log);
  options.compiler.nvrtc = config.string("jit.nvrtc");
  options.compiler.nvcc = config.string("jit.nvcc");
  options.compiler.line_info = config.boolean("jit.line_info");
  options.compiler.cuda_home = environment("CUDA_HOME");
  if (options.compiler.cuda_home.empty()) options.compiler.cuda_home = environment("CUDA_PATH");
  options.threads = static_cast<unsigned>(config.integer("jit.threads"));
  const std::string& folder = config.string("jit.cache_dir");
  options.cache.max_bytes = config.size("jit.cache_bytes");
  if (folder == "none") return options;
  options.cache.folder = folder.empty() ? default_cache_folder() : folder;
  return options;
}

std::vector<Result<Binary>> Jit::build_all(std::span<const KernelSpec> specs, Deadline deadline) {
  std::vector<Result<Binary>> results(specs.size(),
                                      make_error(Code::kInternal, "this kernel was not reached"));
  run_parallel(specs.size(), thread_count(options_.threads),
               [&](std::size_t i) { results[i] = build(specs[i], deadline); });
  return results;
}

Result<std::vector<Kernel>> Jit::prepare_all(const cuda::Context& context,
                                             std::span<const KernelSpec> specs,
                                             const PrepareOptions& options) {
  std::vector<std::optional<Result<Kernel>>> results(specs.size());
  run_parallel(specs.size(), thread_count(options_.threads),
               [&](std::size_t i) { results[i] = prepare(context, specs[i], options); });
  std::vector<Kernel> kernels;
  for (auto& result : results) {
    CROSSDOCK_CHECK_OK(*result);
    kernels.push_back(std::move(**result));
  }
  return kernels;
}

}  // namespace crossdock::jit
