// Building and loading kernels. See jit.hpp for threads.
//
//   prepare(spec)
//     refuse when the stream is captured
//     in memory?            -> done
//     key from sources, configuration, architecture, compiler
//     in the cache?         -> load
//     lock the key; in the cache now (another process was first)? -> load
//     not there though another has had the lock: unlock, it cannot be stored
//     compile, store, unlock; load
// SPDX-License-Identifier: Apache-2.0
#include "jit/jit.hpp"

#include <chrono>
#include <fmt/format.h>

namespace crossdock::jit {
namespace {

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

Jit::Jit(JitOptions options, std::unique_ptr<Compiler> compiler)
    : options_(std::move(options)),
      cache_(options_.cache, options_.log),
      compiler_(std::move(compiler)) {}

Result<const Compiler*> Jit::compiler(Deadline deadline) {
  const std::lock_guard lock(compiler_mutex_);
  if (!compiler_) {
    CROSSDOCK_TRY(opened, open_compiler(options_.compiler, deadline));
    compiler_ = std::move(opened);
    CROSSDOCK_LOG(options_.log, kDebug, "kernels are compiled by {} ({})", compiler_->id(),
                  compiler_->location());
  }
  return static_cast<const Compiler*>(compiler_.get());
}

Result<Jit::Sources> Jit::sources(const KernelSpec& spec) const {
  CROSSDOCK_CHECK_OK(validate(spec));
  CROSSDOCK_TRY(files, reachable_files(options_.files, spec.header()));
  const Key key = source_key(spec, files);
  return Sources{std::move(files), key};
}

Result<Binary> Jit::compile(const KernelSpec& spec, const Sources& sources,
                            const Compiler& compiler, Deadline deadline) {
  const auto start = std::chrono::steady_clock::now();
  CROSSDOCK_TRY(compiled,
                compiler.compile({.spec = spec, .files = sources.files, .deadline = deadline}));
  compiled_.fetch_add(1, std::memory_order_relaxed);
  CROSSDOCK_LOG(options_.log, kInfo, "compiled {} in {:.0f} ms: {} registers, {} bytes spilled",
                spec.title(), milliseconds_since(start), compiled.use.registers,
                compiled.use.spill_bytes);
  return Binary{.spec = spec,
                .key = binary_key(sources.key, compiler.id()),
                .compiler = compiler.id(),
                .symbol = std::move(compiled.symbol),
                .use = compiled.use,
                .image = std::move(compiled.image)};
}

Result<Binary> Jit::find_or_compile(const KernelSpec& spec, Deadline deadline, bool& compiled) {
  CROSSDOCK_TRY(source, sources(spec));
  const auto available = compiler(deadline);
  if (!available.ok()) {
    if (auto found = cache_.load_any(spec, source.key, options_.compiler.newest_cuda))
      return std::move(*found);
    return available.error();
  }
  const Compiler& with = **available;
  const std::string file = Cache::file_name(spec, source.key, with.id());
  const Key key = binary_key(source.key, with.id());
  if (auto found = cache_.load(file, key)) return std::move(*found);
  CROSSDOCK_TRY(lock, cache_.lock(file, deadline));
  if (auto found = cache_.load(file, key)) return std::move(*found);
  // Who had it could not store: one after the other, processes would wait for all before them.
  if (lock.waited()) lock.release();
  CROSSDOCK_TRY(binary, compile(spec, source, with, deadline));
  compiled = true;
  cache_.store(file, binary);
  return binary;
}

Result<Binary> Jit::build(const KernelSpec& spec, Deadline deadline, BuildInfo* info) {
  const auto start = std::chrono::steady_clock::now();
  BuildInfo own;
  auto binary = find_or_compile(spec, deadline, own.compiled);
  own.milliseconds = milliseconds_since(start);
  if (info) *info = own;
  return binary;
}

std::optional<Kernel> Jit::loaded_kernel(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto found = kernels_.find(id);
  return found == kernels_.end() ? std::nullopt : std::optional(found->second);
}

Result<Kernel> Jit::prepare(const cuda::Context& context, const KernelSpec& wanted,
                            const PrepareOptions& options) {
  KernelSpec spec = wanted;
  if (spec.sm == 0) spec.sm = context.device().sm();
  if (options.stream)
    CROSSDOCK_CHECK_OK(cuda::refuse_capture(context.driver(), options.stream->handle(),
                                            fmt::format("preparing kernel {}", spec.title())));
  if (spec.sm != context.device().sm())
    return invalid_argument(
        fmt::format("kernel {} cannot run on GPU {} ({}, sm_{}): leave sm at 0 to "
                    "compile for that GPU",
                    spec.title(), context.ordinal(), context.device().name, context.device().sm()));
  const std::string id = fmt::format("{} {} {} {}", static_cast<const void*>(context.handle()),
                                     spec.name, spec.expression(), options.dynamic_shared_bytes);
  if (auto kernel = loaded_kernel(id)) return std::move(*kernel);
  CROSSDOCK_TRY(binary, build(spec, options.deadline));
  CROSSDOCK_TRY(module, cuda::Module::load(context, binary.image, spec.name));
  CROSSDOCK_TRY(found, module.function(binary.symbol));
  // Error texts name the specification, not the mangled symbol.
  cuda::Function function(context, found.handle(), spec.title());
  if (options.dynamic_shared_bytes > 0)
    CROSSDOCK_CHECK_OK(function.set_max_dynamic_shared(options.dynamic_shared_bytes));
  Kernel kernel(std::make_shared<const Kernel::Code>(
      Kernel::Code{std::move(spec), binary.use, std::move(module), std::move(function)}));
  // Two threads may have built the same; the first one's handle is everybody's.
  const std::lock_guard lock(mutex_);
  return kernels_.emplace(id, std::move(kernel)).first->second;
}

Jit::Counters Jit::counters() const {
  const auto& cache = cache_.counters();
  return {.compiled = compiled_.load(std::memory_order_relaxed),
          .loaded = cache.hits.load(std::memory_order_relaxed),
          .corrupt = cache.corrupt.load(std::memory_order_relaxed),
          .write_failures = cache.write_failures.load(std::memory_order_relaxed)};
}

}  // namespace crossdock::jit
