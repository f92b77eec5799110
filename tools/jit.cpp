// `crossdock jit`: the cache of compiled kernels, from outside: list, warm, verify, prune; and of
// every kernel variant the register budget and the machine code. Works without a GPU; all but list,
// verify and prune need a compiler. SPDX-License-Identifier: Apache-2.0
#include "jit/jit.hpp"

#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/config.hpp"
#include "base/strings.hpp"
#include "cli.hpp"
#include "commands.hpp"
#include "jit/kernel_list.hpp"

namespace crossdock::tools {
namespace {

using jit::Jit;
using jit::JitOptions;
using jit::KernelSpec;

// The exit code that test drivers read as "skipped".
constexpr int kSkipped = 77;

Result<JitOptions> load_options(const std::string& folder) {
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(log, base::Logger::create("warn"));
  JitOptions options = JitOptions::from_config(config, log);
  if (!folder.empty()) options.cache.folder = folder;
  return options;
}

// The variants of this build for these architectures and kernels; empty lists take all.
Result<std::vector<KernelSpec>> chosen_kernels(const std::vector<int>& archs,
                                               const std::vector<std::string>& names) {
  CROSSDOCK_TRY(all, jit::known_kernels());
  const auto has = [](const auto& list, const auto& value) {
    return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
  };
  std::vector<KernelSpec> chosen;
  for (auto& spec : all)
    if (has(archs, spec.sm) && has(names, spec.name)) chosen.push_back(std::move(spec));
  if (chosen.empty())
    return invalid_argument(
        "no kernel of this build fits --sm and --kernel; `crossdock jit warm "
        "--dry-run` lists them all");
  return chosen;
}

struct CacheChoice {
  std::string folder;
};

void add_folder(CLI::App& app, std::string& folder) {
  app.add_option("--cache-dir", folder, "Cache folder; default is the setting jit.cache_dir");
}

// --- list ---

void print_entry(const jit::CacheEntry& entry) {
  const auto binary = jit::Cache::read(entry.path);
  if (!binary.ok()) {
    fmt::print("{}\n    unreadable: {}\n", entry.path.filename().string(), binary.error().message);
    return;
  }
  fmt::print("{}\n    {}, {} registers, {} bytes spilled, {}, {}\n", entry.path.filename().string(),
             binary->spec.title(), binary->use.registers, binary->use.spill_bytes,
             base::format_size(entry.bytes), binary->compiler);
}

int list(const CacheChoice& choice) {
  const auto options = load_options(choice.folder);
  if (!options.ok()) return report(options.error());
  const jit::Cache cache(options->cache);
  const auto entries = cache.entries();
  std::uint64_t bytes = 0;
  for (const auto& entry : entries) {
    print_entry(entry);
    bytes += entry.bytes;
  }
  fmt::print("{} kernels, {} bytes in {}\n", entries.size(), bytes, cache.folder().string());
  return kDone;
}

// --- warm ---

struct WarmOptions {
  std::string folder;
  std::vector<int> archs;
  std::vector<std::string> names;
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  bool dry_run = false;
};

int print_results(const std::vector<KernelSpec>& specs,
                  const std::vector<Result<jit::Binary>>& results) {
  int failed = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (results[i].ok()) {
      fmt::print("ready   {}\n", specs[i].title());
    } else {
      ++failed;
      fmt::print("failed  {}: {}\n", specs[i].title(), results[i].error().message);
    }
  }
  return failed;
}

int warm(const WarmOptions& wanted) {
  auto options = load_options(wanted.folder);
  if (!options.ok()) return report(options.error());
  const auto specs = chosen_kernels(wanted.archs, wanted.names);
  if (!specs.ok()) return report(specs.error());
  if (wanted.dry_run) {
    for (const auto& spec : *specs)
      fmt::print("{}\n", spec.title());
    return kDone;
  }
  const auto deadline = Deadline::in(wanted.timeout);
  Jit jit(*options);
  if (const auto compiler = jit.compiler(deadline); !compiler.ok()) return report(compiler.error());
  const int failed = print_results(*specs, jit.build_all(*specs, deadline));
  const auto counters = jit.counters();
  fmt::print("{} compiled, {} were there, {} failed, in {}\n", counters.compiled,
             specs->size() - counters.compiled - static_cast<std::size_t>(failed), failed,
             jit.cache().folder().string());
  if (counters.write_failures > 0) return kFailed;
  return failed == 0 ? kDone : kFailed;
}

// --- verify ---

int verify(const CacheChoice& choice) {
  const auto options = load_options(choice.folder);
  if (!options.ok()) return report(options.error());
  const jit::Cache cache(options->cache);
  const auto entries = cache.entries();
  int bad = 0;
  for (const auto& entry : entries) {
    const auto binary = jit::Cache::read(entry.path);
    if (binary.ok()) continue;
    ++bad;
    fmt::print("{}: {}\n", entry.path.filename().string(), binary.error().message);
  }
  fmt::print("{} kernels, {} damaged, in {}\n", entries.size(), bad, cache.folder().string());
  if (bad > 0) fmt::print("a damaged kernel is dropped and compiled again when it is next used\n");
  return bad == 0 ? kDone : kFailed;
}

// --- prune ---

struct PruneOptions {
  std::string folder;
  std::uint64_t max_bytes = 0;
  std::chrono::nanoseconds max_age = std::chrono::nanoseconds(0);
};

int prune(const PruneOptions& wanted) {
  const auto options = load_options(wanted.folder);
  if (!options.ok()) return report(options.error());
  jit::Cache cache(options->cache);
  jit::PruneLimits limits{.max_bytes = wanted.max_bytes};
  if (wanted.max_age.count() > 0) {
    limits.max_age = std::chrono::duration_cast<std::chrono::seconds>(wanted.max_age);
    if (wanted.max_bytes == 0) limits.max_bytes = UINT64_MAX;
  }
  const auto outcome = cache.prune(limits);
  fmt::print("removed {} kernels, {} bytes; {} bytes stay in {}\n", outcome.removed,
             outcome.removed_bytes, outcome.kept_bytes, cache.folder().string());
  return kDone;
}

// --- dump ---

struct DumpOptions {
  std::string folder;
  std::vector<int> archs;
  std::vector<std::string> names;
};

// The title of a variant as a file name: "grouped_gemm.tile_rows=128.stages=4.sm_90a.cubin".
std::string file_name(const KernelSpec& spec) {
  std::string name = spec.name;
  for (const char c : spec.config)
    if (c != '{' && c != '}' && c != ' ' && c != ',') name += c;
  return name + "." + spec.arch() + ".cubin";
}

int dump(const DumpOptions& wanted) {
  auto options = load_options({});
  if (!options.ok()) return report(options.error());
  const auto specs = chosen_kernels(wanted.archs, wanted.names);
  if (!specs.ok()) return report(specs.error());
  const auto deadline = Deadline::in(std::chrono::minutes(20));
  Jit jit(*options);
  const auto compiler = jit.compiler(deadline);
  if (!compiler.ok()) {
    fmt::print("skipped: {}\n", compiler.error().message);
    return kSkipped;
  }
  const auto results = jit.build_all(*specs, deadline);
  for (std::size_t i = 0; i < specs->size(); ++i) {
    if (!results[i].ok()) return report(results[i].error());
    const std::string path = wanted.folder + "/" + file_name((*specs)[i]);
    std::ofstream file(path, std::ios::trunc | std::ios::binary);
    const auto& image = results[i]->image;
    file.write(reinterpret_cast<const char*>(image.data()),
               static_cast<std::streamsize>(image.size()));
    file.flush();
    if (!file) return report(make_error(Code::kDenied, fmt::format("cannot write {}", path)));
    fmt::print("{}\n", path);
  }
  return kDone;
}

// --- budget ---

struct BudgetOptions {
  std::string file;
  std::vector<int> archs;
  std::vector<std::string> names;
  bool update = false;
};

Result<jit::Budgets> read_budgets(const std::string& path) {
  std::ifstream file(path);
  if (!file) return make_error(Code::kNotFound, fmt::format("cannot read {}", path));
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return jit::parse_budgets(text);
}

// Empty, or what is over the budget.
std::string breach(const KernelSpec& spec, const jit::Binary& binary, const jit::Budgets& budgets) {
  std::string wrong = budget_breach(spec, binary.use, budgets);
  if (!wrong.empty()) return wrong;
  const auto bytes = jit::code_bytes(binary.image);
  return bytes.ok() ? code_breach(spec, *bytes, budgets) : bytes.error().message;
}

// Prints a line a variant; returns how many are over.
int check_budgets(const std::vector<KernelSpec>& specs,
                  const std::vector<Result<jit::Binary>>& results, const jit::Budgets& budgets) {
  int over = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& result = results[i];
    const std::string wrong =
        result.ok() ? breach(specs[i], *result, budgets) : result.error().message;
    const int registers = result.ok() ? result->use.registers : 0;
    const int spilled = result.ok() ? result->use.spill_bytes : 0;
    fmt::print("{}  {}: {} registers, {} bytes spilled{}{}\n", wrong.empty() ? "ok  " : "OVER",
               specs[i].title(), registers, spilled, wrong.empty() ? "" : ": ", wrong);
    over += !wrong.empty();
  }
  return over;
}

// The measured figures become the budget; a variant that spills or fails gets none.
int update_budgets(const std::string& path, const std::vector<KernelSpec>& specs,
                   const std::vector<Result<jit::Binary>>& results, jit::Budgets budgets) {
  int failed = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto bytes = results[i].ok() ? jit::code_bytes(results[i]->image) : results[i].error();
    if (!bytes.ok() || results[i]->use.spill_bytes > 0) {
      ++failed;
      continue;
    }
    const auto& use = results[i]->use;
    budgets[specs[i].title()] = {.registers = use.registers,
                                 .shared_bytes = use.shared_bytes,
                                 .code_bytes = jit::code_budget(*bytes)};
  }
  std::ofstream file(path, std::ios::trunc);
  file << jit::budgets_json(budgets);
  file.flush();
  if (!file) return report(make_error(Code::kDenied, fmt::format("cannot write {}", path)));
  fmt::print("{} budgets in {}\n", budgets.size(), path);
  return failed == 0 ? kDone : kFailed;
}

int budget(const BudgetOptions& wanted) {
  auto options = load_options({});
  if (!options.ok()) return report(options.error());
  options->cache.folder.clear();  // measured, not remembered
  const auto specs = chosen_kernels(wanted.archs, wanted.names);
  if (!specs.ok()) return report(specs.error());
  const auto deadline = Deadline::in(std::chrono::minutes(20));
  Jit jit(*options);
  const auto compiler = jit.compiler(deadline);
  if (!compiler.ok()) {
    fmt::print("skipped: {}\n", compiler.error().message);
    return kSkipped;
  }
  fmt::print("{} kernel variants by {}\n", specs->size(), (*compiler)->id());
  auto budgets = read_budgets(wanted.file);
  if (!budgets.ok() && !(wanted.update && budgets.code() == Code::kNotFound))
    return report(budgets.error());
  const auto results = jit.build_all(*specs, deadline);
  const auto known = budgets.ok() ? *budgets : jit::Budgets{};
  if (wanted.update) return update_budgets(wanted.file, *specs, results, known);
  const int over = check_budgets(*specs, results, known);
  fmt::print("{} of {} variants are over their budget\n", over, specs->size());
  return over == 0 ? kDone : kFailed;
}

void add_warm(CLI::App& jit) {
  auto options = std::make_shared<WarmOptions>();
  CLI::App* sub = jit.add_subcommand("warm", "Compile the kernels of this build into the cache");
  add_folder(*sub, options->folder);
  sub->add_option("--sm", options->archs, "Architectures, as in 90; default is all");
  sub->add_option("--kernel", options->names, "Kernels by name; default is all");
  add_duration(*sub, "--timeout", options->timeout, "When to give up");
  sub->add_flag("--dry-run", options->dry_run, "Only print what would be compiled");
  sub->callback(run(options, warm));
}

void add_prune(CLI::App& jit) {
  auto options = std::make_shared<PruneOptions>();
  CLI::App* sub = jit.add_subcommand("prune", "Remove the least recently used kernels");
  add_folder(*sub, options->folder);
  add_size(*sub, "--max-size", options->max_bytes, "Size to keep; 0 removes all");
  add_duration(*sub, "--max-age", options->max_age,
               "Remove what was not used for this long; without --max-size only that");
  sub->callback(run(options, prune));
}

void add_budget(CLI::App& jit) {
  auto options = std::make_shared<BudgetOptions>();
  CLI::App* sub = jit.add_subcommand(
      "budget",
      "Compile every kernel variant; fail on spills, and on registers or code over the budget");
  sub->add_option("--file", options->file, "The budget file, device/budget.json")->required();
  sub->add_option("--sm", options->archs, "Architectures, as in 90; default is all");
  sub->add_option("--kernel", options->names, "Kernels by name; default is all");
  sub->add_flag("--update", options->update, "Write the measured figures to the file");
  sub->callback(run(options, budget));
}

void add_dump(CLI::App& jit) {
  auto options = std::make_shared<DumpOptions>();
  CLI::App* sub =
      jit.add_subcommand("dump", "Write the machine code of kernels, for a disassembler");
  sub->add_option("--folder", options->folder, "Where to; it exists")->required();
  sub->add_option("--sm", options->archs, "Architectures, as in 90; default is all");
  sub->add_option("--kernel", options->names, "Kernels by name; default is all");
  sub->callback(run(options, dump));
}

}  // namespace

void add_jit(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("jit", "The cache of compiled kernels");
  sub->require_subcommand(1);
  auto listed = std::make_shared<CacheChoice>();
  CLI::App* list_sub = sub->add_subcommand("list", "Show the compiled kernels");
  add_folder(*list_sub, listed->folder);
  list_sub->callback(run(listed, list));
  auto verified = std::make_shared<CacheChoice>();
  CLI::App* verify_sub = sub->add_subcommand("verify", "Check every compiled kernel's checksum");
  add_folder(*verify_sub, verified->folder);
  verify_sub->callback(run(verified, verify));
  add_warm(*sub);
  add_prune(*sub);
  add_budget(*sub);
  add_dump(*sub);
}

}  // namespace crossdock::tools
