// `crossdock bench jit`: what compiling each kernel variant costs the first time, and loading it
// the second time. Compiling needs no GPU; with one, the load includes the driver's.
// SPDX-License-Identifier: Apache-2.0
#include "jit/jit.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <thread>

#include "base/config.hpp"
#include "bench/commands.hpp"
#include "bench/figures.hpp"
#include "bench/statistics.hpp"
#include "cli.hpp"
#include "cuda/device.hpp"
#include "jit/kernel_list.hpp"

namespace crossdock::tools::bench {
namespace {

constexpr double kColdAimMs = 2000;
constexpr double kWarmAimMs = 5;

struct JitBench {
  std::string folder;
  int sm = 0;
  unsigned threads = 0;
  std::chrono::nanoseconds timeout = std::chrono::minutes(5);
  FigureOutput output = {};
};

// A folder that goes with the object, unless the caller named one.
class Folder {
 public:
  static Result<Folder> make(const std::string& named) {
    if (!named.empty()) return Folder(named, false);
    std::string pattern =
        (std::filesystem::temp_directory_path() / "crossdock-jit-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) return errno_error(errno, "make " + pattern);
    return Folder(pattern, true);
  }
  Folder(Folder&& other) noexcept
      : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, false)) {}
  Folder& operator=(Folder&&) = delete;
  ~Folder() {
    std::error_code ignored;
    if (temporary_) std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  Folder(std::string path, bool temporary) : path_(std::move(path)), temporary_(temporary) {}
  std::string path_;
  bool temporary_;
};

struct Timing {
  std::string title;
  double ms = 0;
};

// The slowest, by name, and the median.
void add_timings(const char* what, const std::vector<Timing>& timings, double aim,
                 FigureReport& report) {
  if (timings.empty()) return;
  const auto slowest = std::max_element(
      timings.begin(), timings.end(), [](const Timing& a, const Timing& b) { return a.ms < b.ms; });
  std::vector<double> ms;
  for (const Timing& t : timings)
    ms.push_back(t.ms);
  report.figures.push_back(
      {.name = fmt::format("{}, median", what), .value = median(ms), .unit = "ms"});
  report.figures.push_back({.name = fmt::format("{}, slowest: {}", what, slowest->title),
                            .value = slowest->ms,
                            .unit = "ms",
                            .aim = aim});
}

// The slowest variant of each kernel, by the kernel's name: most are far below the aim.
void add_kernels(const std::vector<Timing>& compiled, FigureReport& report) {
  std::map<std::string, double> slowest;
  for (const Timing& t : compiled) {
    double& ms = slowest[t.title.substr(0, t.title.find_first_of("{ "))];
    ms = std::max(ms, t.ms);
  }
  for (const auto& [kernel, ms] : slowest)
    report.figures.push_back({.name = fmt::format("compile {}, slowest variant", kernel),
                              .value = ms,
                              .unit = "ms",
                              .aim = kColdAimMs});
}

class Bench {
 public:
  Bench(const JitBench& options, std::string folder, const cuda::Driver* driver)
      : options_(options),
        folder_(std::move(folder)),
        driver_(driver),
        deadline_(Deadline::in(options.timeout)) {}

  Result<FigureReport> run() {
    CROSSDOCK_CHECK_OK(choose());
    FigureReport report{.schema = "crossdock.bench.jit/1"};
    add_gpu_facts(report, driver_);
    CROSSDOCK_TRY(cold, make());
    CROSSDOCK_TRY(compiler, cold->compiler(deadline_));
    report.facts.emplace_back("compiler", compiler->id());
    report.facts.emplace_back("variants", std::to_string(specs_.size()));
    report.facts.emplace_back("threads", std::to_string(threads()));
    CROSSDOCK_TRY(compiled, compile_all(*cold));
    add_timings("compile", compiled, kColdAimMs, report);
    add_kernels(compiled, report);
    CROSSDOCK_TRY(loaded, load_all());
    add_timings(driver_ ? "load from the cache into the driver" : "load from the cache", loaded,
                kWarmAimMs, report);
    return report;
  }

 private:
  [[nodiscard]] unsigned threads() const {
    if (options_.threads > 0) return options_.threads;
    return std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u);
  }
  Result<> choose() {
    int sm = options_.sm;
    if (sm == 0 && driver_) {
      CROSSDOCK_TRY(device, cuda::query_device(*driver_, 0));
      sm = device.sm();
    }
    if (sm == 0) sm = 90;
    CROSSDOCK_TRY(all, jit::known_kernels());
    for (auto& spec : all)
      if (spec.sm == sm) specs_.push_back(std::move(spec));
    if (specs_.empty())
      return invalid_argument(fmt::format("this build has no kernel for sm_{}; try --sm 90", sm));
    if (driver_ && options_.sm != 0) driver_ = nullptr;  // perhaps not this GPU's code
    return {};
  }
  // With a fresh memory, on the folder of this bench.
  Result<std::unique_ptr<jit::Jit>> make() const {
    CROSSDOCK_TRY(config, base::Config::load());
    auto options = jit::JitOptions::from_config(config);
    options.cache.folder = folder_;
    if (driver_) options.compiler.newest_cuda = driver_->version;
    return std::make_unique<jit::Jit>(std::move(options));
  }
  // Each thread compiles one variant at a time; its own time counts.
  Result<std::vector<Timing>> compile_all(jit::Jit& jit) const {
    std::vector<Timing> timings(specs_.size());
    std::vector<Result<void>> outcomes(specs_.size());
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> workers;
    for (unsigned t = 0; t < threads(); ++t)
      workers.emplace_back([&] {
        for (std::size_t i = next++; i < specs_.size(); i = next++) {
          jit::BuildInfo info;
          const auto built = jit.build(specs_[i], deadline_, &info);
          if (!built.ok())
            outcomes[i] = built.error();
          else if (!info.compiled)
            outcomes[i] = make_error(Code::kBusy, fmt::format("{} is in the cache already: give an "
                                                              "empty --cache-dir",
                                                              specs_[i].title()));
          timings[i] = {specs_[i].title(), info.milliseconds};
        }
      });
    for (auto& worker : workers)
      worker.join();
    for (auto& outcome : outcomes)
      CROSSDOCK_CHECK_OK(std::move(outcome));
    return timings;
  }
  // As a process that starts: nothing is in memory, everything in the cache.
  Result<std::vector<Timing>> load_all() const {
    CROSSDOCK_TRY(warm, make());
    CROSSDOCK_TRY(compiler, warm->compiler(deadline_));
    static_cast<void>(compiler);
    std::optional<cuda::Context> context;
    if (driver_) {
      CROSSDOCK_TRY(made, cuda::Context::primary(*driver_, 0));
      context = std::move(made);
    }
    std::vector<Timing> timings;
    for (const auto& spec : specs_) {
      const auto start = std::chrono::steady_clock::now();
      if (context) {
        CROSSDOCK_TRY(kernel, warm->prepare(*context, spec, {.deadline = deadline_}));
        CROSSDOCK_TRY(info, kernel.function().info());  // the driver loads at the first need
        static_cast<void>(info);
      } else {
        CROSSDOCK_TRY(binary, warm->build(spec, deadline_));
      }
      timings.push_back({spec.title(), since(start)});
    }
    if (warm->counters().compiled > 0)
      return make_error(Code::kInternal,
                        "a kernel was compiled again although it was in the cache");
    return timings;
  }
  static double since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  }

  JitBench options_;
  std::string folder_;
  const cuda::Driver* driver_;
  Deadline deadline_;
  std::vector<jit::KernelSpec> specs_;
};

int bench_jit(const JitBench& options) {
  const auto config = base::Config::load();
  if (!config.ok()) return report(config.error());
  const auto driver = cuda::Driver::load({.library = config->string("cuda.driver")});
  auto folder = Folder::make(options.folder);
  if (!folder.ok()) return report(folder.error());
  const auto result = Bench(options, folder->path(), driver.ok() ? *driver : nullptr).run();
  if (!result.ok()) return report(result.error());
  const auto printed = print_figures(*result, options.output);
  return printed.ok() ? kDone : report(printed.error());
}

}  // namespace

void add_jit(CLI::App& group) {
  const auto options = std::make_shared<JitBench>();
  CLI::App* sub =
      group.add_subcommand("jit", "Compiling every kernel variant, and loading it from the cache");
  sub->add_option("--cache-dir", options->folder,
                  "an empty folder, which then holds the kernels; default is a temporary one");
  sub->add_option("--sm", options->sm, "architecture, as in 90; default is that of GPU 0, or 90");
  sub->add_option("--threads", options->threads, "compile so many at a time; 0: half the CPUs");
  add_duration(*sub, "--timeout", options->timeout, "when to give up");
  add_figure_output(*sub, options->output);
  sub->callback(run(options, bench_jit));
}

}  // namespace crossdock::tools::bench
