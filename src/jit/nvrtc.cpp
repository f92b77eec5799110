// NVRTC, opened at run time: finding the library, and compiling one kernel with it. The library is
// never closed (it keeps state of its own). A running compilation cannot be interrupted; it takes
// well under the deadlines in use, and the deadline is looked at before it begins.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <dlfcn.h>
#include <fmt/format.h>
#include <optional>

#include "jit/compiler.hpp"

struct _nvrtcProgram;  // NOLINT: the library's own tag

namespace crossdock::jit {
namespace {

using ProgramHandle = ::_nvrtcProgram*;

constexpr int kSuccess = 0;
constexpr int kCompilationError = 6;  // NVRTC_ERROR_COMPILATION

// Types and names cannot stand in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)
struct Table {
#define CROSSDOCK_NVRTC_FUNCTION(name, result, parameters) result(*name) parameters = nullptr;
#include "jit/nvrtc_table.def"
#undef CROSSDOCK_NVRTC_FUNCTION
};
// NOLINTEND(bugprone-macro-parentheses)

// The folder this library's own code was loaded from: a wheel has NVIDIA's wheels beside it.
std::string own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || !info.dli_fname)
    return {};
  const std::string path = info.dli_fname;
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? std::string{} : path.substr(0, slash);
}

struct Place {
  std::string path;
  int cuda_major;  // 0: unknown
};

std::vector<Place> places_for(const std::string& folder) {
  return {{folder + "/libnvrtc.so.13", 13}, {folder + "/libnvrtc.so.12", 12}};
}

std::vector<Place> search_places(const CompilerOptions& options) {
  if (!options.nvrtc.empty()) return {{options.nvrtc, 0}};
  std::vector<Place> places;
  const auto add = [&](const std::string& folder) {
    for (auto& place : places_for(folder))
      places.push_back(std::move(place));
  };
  if (!options.cuda_home.empty()) {
    add(options.cuda_home + "/lib64");
    add(options.cuda_home + "/lib");
  }
  if (const std::string own = own_folder(); !own.empty()) {
    for (const char* up : {"/..", "/../.."}) {
      places.push_back({own + up + "/nvidia/cu13/lib/libnvrtc.so.13", 13});
      places.push_back({own + up + "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", 12});
    }
  }
  places.push_back({"libnvrtc.so.13", 13});
  places.push_back({"libnvrtc.so.12", 12});
  add("/usr/local/cuda/lib64");
  return places;
}

struct Opened {
  void* handle;
  std::string path;
};

// One that was passed over, which is another matter than none. Only opening tells whether a name
// without a folder is there.
std::optional<Error> find_newer(const CompilerOptions& options) {
  for (const auto& place : search_places(options)) {
    if (is_taken(place.cuda_major, options.newest_cuda)) continue;
    if (::dlopen(place.path.c_str(), RTLD_LAZY | RTLD_LOCAL))
      return too_new(fmt::format("NVRTC {} at {}", place.cuda_major, place.path),
                     options.newest_cuda);
  }
  return std::nullopt;
}

Result<Opened> open_library(const CompilerOptions& options) {
  if (options.nvrtc == "none") return make_error(Code::kUnsupported, "jit.nvrtc is none");
  std::string reason;
  for (const auto& place : search_places(options)) {
    if (!is_taken(place.cuda_major, options.newest_cuda)) continue;
    if (void* handle = ::dlopen(place.path.c_str(), RTLD_NOW | RTLD_LOCAL))
      return Opened{handle, place.path};
    const char* const text = ::dlerror();
    if (!options.nvrtc.empty() && text) reason = text;
  }
  if (!options.nvrtc.empty())
    return make_error(Code::kUnsupported, fmt::format("cannot open jit.nvrtc: {}", reason));
  if (const auto newer = find_newer(options)) return *newer;
  return make_error(Code::kUnsupported, "NVRTC (libnvrtc.so.13 or .12) was not found");
}

Result<Table> resolve(const Opened& library) {
  Table table;
// NOLINTBEGIN(bugprone-macro-parentheses)
#define CROSSDOCK_NVRTC_FUNCTION(name, result, parameters)                             \
  table.name = reinterpret_cast<result(*) parameters>(::dlsym(library.handle, #name)); \
  if (!table.name)                                                                     \
    return make_error(Code::kUnsupported,                                              \
                      fmt::format("{} has no {}: install a newer NVRTC", library.path, #name));
#include "jit/nvrtc_table.def"
#undef CROSSDOCK_NVRTC_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)
  return table;
}

// One program of the library, destroyed at the end.
class Program {
 public:
  explicit Program(const Table& nvrtc) : nvrtc_(nvrtc) {}
  ~Program() {
    if (handle) static_cast<void>(nvrtc_.nvrtcDestroyProgram(&handle));
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ProgramHandle handle = nullptr;

 private:
  const Table& nvrtc_;
};

class Nvrtc final : public Compiler {
 public:
  struct Version {
    int major = 0;
    int minor = 0;
  };
  Nvrtc(const Table& table, std::string location, Version version, std::vector<int> archs,
        const CompilerOptions& options)
      : nvrtc_(table),
        location_(std::move(location)),
        version_(version),
        line_info_(options.line_info),
        id_(fmt::format("nvrtc {}.{} {}", version.major, version.minor, flags_of(options))),
        archs_(std::move(archs)) {}

  [[nodiscard]] const std::string& id() const override { return id_; }
  [[nodiscard]] const std::string& location() const override { return location_; }
  Result<Compiled> compile(const CompileRequest& request) const override;

 private:
  Result<void> check(int status, std::string_view what) const;
  Result<void> check_arch(const KernelSpec& spec) const;
  Result<void> create(Program& program, const CompileRequest& request) const;
  Result<std::string> run(const Program& program, const KernelSpec& spec) const;
  Result<Compiled> collect(const Program& program, const KernelSpec& spec,
                           std::string_view log) const;

  Table nvrtc_;
  std::string location_;
  Version version_;
  bool line_info_;
  std::string id_;
  std::vector<int> archs_;
};

Result<void> Nvrtc::check(int status, std::string_view what) const {
  if (status == kSuccess) return {};
  return Error{.code = Code::kInternal,
               .native = {Native::Domain::kNvrtc, status},
               .message = fmt::format("{}: {}", what, nvrtc_.nvrtcGetErrorString(status))};
}

Result<void> Nvrtc::check_arch(const KernelSpec& spec) const {
  if (std::find(archs_.begin(), archs_.end(), spec.sm) != archs_.end()) return {};
  return make_error(
      Code::kUnsupported,
      fmt::format("{} cannot compile for sm_{} (it knows sm_{} to sm_{}): install an NVRTC that "
                  "knows this GPU, or use a cache warmed by one",
                  id_, spec.sm, archs_.empty() ? 0 : archs_.front(),
                  archs_.empty() ? 0 : archs_.back()));
}

Result<void> Nvrtc::create(Program& program, const CompileRequest& request) const {
  // The library wants strings that end in a zero byte; the embedded text is a view.
  std::vector<std::string> texts;
  for (const auto& file : request.files) {
    texts.emplace_back(file.content);
    texts.emplace_back(file.path);
  }
  std::vector<const char*> contents;
  std::vector<const char*> names;
  for (std::size_t i = 0; i < texts.size(); i += 2) {
    contents.push_back(texts[i].c_str());
    names.push_back(texts[i + 1].c_str());
  }
  const std::string source = fmt::format("#include <{}>\n", request.spec.header());
  const std::string name = request.spec.name + ".cu";
  CROSSDOCK_CHECK_OK(check(
      nvrtc_.nvrtcCreateProgram(&program.handle, source.c_str(), name.c_str(),
                                static_cast<int>(contents.size()), contents.data(), names.data()),
      "create an NVRTC program"));
  return check(nvrtc_.nvrtcAddNameExpression(program.handle, request.spec.expression().c_str()),
               "name the kernel");
}

// Compiles and returns the log.
Result<std::string> Nvrtc::run(const Program& program, const KernelSpec& spec) const {
  const std::string arch = "--gpu-architecture=" + spec.arch();
  std::vector<const char*> options{kStandardFlag, arch.c_str(), "--ptxas-options=-v"};
  if (line_info_) options.push_back(kLinesFlag);
  // Since 12.9 code may come out of the driver's cache: the log is then silent about registers and
  // spills. Ours (cache.hpp) keeps them.
  if (version_.major > 12 || (version_.major == 12 && version_.minor >= 9))
    options.push_back("--no-cache");
  const int status =
      nvrtc_.nvrtcCompileProgram(program.handle, static_cast<int>(options.size()), options.data());
  std::size_t bytes = 0;
  std::string log;
  if (nvrtc_.nvrtcGetProgramLogSize(program.handle, &bytes) == kSuccess) {
    log.resize(bytes);
    if (bytes > 0) static_cast<void>(nvrtc_.nvrtcGetProgramLog(program.handle, log.data()));
  }
  if (status == kSuccess) return log;
  Error error = compile_error(spec, id_, log);
  error.native = {Native::Domain::kNvrtc, status};
  if (status != kCompilationError) {
    error.code = Code::kInternal;
    error.message += fmt::format(" ({})", nvrtc_.nvrtcGetErrorString(status));
  }
  return error;
}

Result<Compiled> Nvrtc::collect(const Program& program, const KernelSpec& spec,
                                std::string_view log) const {
  const char* name = nullptr;
  CROSSDOCK_CHECK_OK(
      check(nvrtc_.nvrtcGetLoweredName(program.handle, spec.expression().c_str(), &name),
            "ask the kernel's name in the machine code"));
  Compiled compiled{.image = {}, .symbol = name, .use = parse_ptxas_log(log)};
  std::size_t bytes = 0;
  CROSSDOCK_CHECK_OK(
      check(nvrtc_.nvrtcGetCUBINSize(program.handle, &bytes), "ask the code's size"));
  compiled.image.resize(bytes);
  CROSSDOCK_CHECK_OK(
      check(nvrtc_.nvrtcGetCUBIN(program.handle, reinterpret_cast<char*>(compiled.image.data())),
            "get the code"));
  CROSSDOCK_TRY(symbol, only_kernel(spec, compiled.image));
  if (symbol != compiled.symbol)
    return make_error(Code::kInternal, fmt::format("NVRTC names kernel {} {}, its code {}",
                                                   spec.title(), compiled.symbol, symbol));
  return compiled;
}

Result<Compiled> Nvrtc::compile(const CompileRequest& request) const {
  CROSSDOCK_CHECK_OK(check_arch(request.spec));
  if (request.deadline.passed())
    return make_error(Code::kDeadline,
                      fmt::format("no time left to compile kernel {}", request.spec.title()));
  Program program(nvrtc_);
  CROSSDOCK_CHECK_OK(create(program, request));
  CROSSDOCK_TRY(log, run(program, request.spec));
  return collect(program, request.spec, log);
}

Result<std::vector<int>> supported_archs(const Table& nvrtc) {
  int count = 0;
  if (nvrtc.nvrtcGetNumSupportedArchs(&count) != kSuccess || count <= 0)
    return make_error(Code::kUnsupported, "NVRTC does not say which architectures it knows");
  std::vector<int> archs(static_cast<std::size_t>(count));
  if (nvrtc.nvrtcGetSupportedArchs(archs.data()) != kSuccess)
    return make_error(Code::kUnsupported, "NVRTC does not say which architectures it knows");
  std::sort(archs.begin(), archs.end());
  return archs;
}

}  // namespace

Result<std::unique_ptr<Compiler>> open_nvrtc(const CompilerOptions& options) {
  CROSSDOCK_TRY(library, open_library(options));
  CROSSDOCK_TRY(table, resolve(library));
  Nvrtc::Version version;
  if (table.nvrtcVersion(&version.major, &version.minor) != kSuccess)
    return make_error(Code::kUnsupported,
                      fmt::format("{} does not tell its version", library.path));
  // That of jit.nvrtc is known only now.
  if (!is_taken(version.major, options.newest_cuda))
    return too_new(fmt::format("NVRTC {}.{} at {}", version.major, version.minor, library.path),
                   options.newest_cuda);
  CROSSDOCK_TRY(archs, supported_archs(table));
  return std::unique_ptr<Compiler>(
      std::make_unique<Nvrtc>(table, library.path, version, std::move(archs), options));
}

}  // namespace crossdock::jit
