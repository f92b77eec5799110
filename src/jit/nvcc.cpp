// nvcc as a compiler, for machines with a toolkit but no usable NVRTC: the sources are written to a
// private temporary folder, which goes at the end, and one child process compiles them.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <optional>
#include <unistd.h>

#include "jit/compiler.hpp"
#include "jit/process.hpp"

namespace crossdock::jit {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  static Result<TemporaryFolder> create() {
    std::error_code problem;
    const fs::path base = fs::temp_directory_path(problem);
    if (problem) return errno_error(problem.value(), "find the folder for temporary files");
    std::string name = (base / "crossdock-jit-XXXXXX").string();
    if (!::mkdtemp(name.data())) return errno_error(errno, fmt::format("create {}", name));
    return TemporaryFolder(name);
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {}
  fs::path path_;
};

Result<void> write_file(const fs::path& path, std::string_view content) {
  std::error_code problem;
  fs::create_directories(path.parent_path(), problem);
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.flush();
  if (problem || !file)
    return make_error(Code::kNoMemory,
                      fmt::format("cannot write {}: is its file system full?", path.string()));
  return {};
}

Result<std::vector<std::byte>> read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return make_error(Code::kInternal, fmt::format("nvcc left no {}", path.string()));
  std::vector<std::byte> bytes(static_cast<std::size_t>(file.tellg()));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) return make_error(Code::kInternal, fmt::format("cannot read {}", path.string()));
  return bytes;
}

// The folder's own path in messages says nothing to a person.
std::string without(std::string text, const std::string& prefix) {
  for (auto at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at))
    text.erase(at, prefix.size());
  return text;
}

class Nvcc final : public Compiler {
 public:
  Nvcc(std::string location, const std::string& version, const CompilerOptions& options)
      : location_(std::move(location)),
        line_info_(options.line_info),
        id_(fmt::format("nvcc {} {}", version, flags_of(options))) {}

  [[nodiscard]] const std::string& id() const override { return id_; }
  [[nodiscard]] const std::string& location() const override { return location_; }
  Result<Compiled> compile(const CompileRequest& request) const override;

 private:
  std::string location_;
  bool line_info_;
  std::string id_;
};

// Taking the kernel's address makes the compiler instantiate it.
std::string source_text(const KernelSpec& spec) {
  return fmt::format(
      "#include <{}>\n[[maybe_unused]] static void* const crossdock_kernel =\n"
      "    reinterpret_cast<void*>(&{});\n",
      spec.header(), spec.expression());
}

Result<Compiled> Nvcc::compile(const CompileRequest& request) const {
  CROSSDOCK_TRY(folder, TemporaryFolder::create());
  for (const auto& file : request.files)
    CROSSDOCK_CHECK_OK(write_file(folder.path() / file.path, file.content));
  const fs::path source = folder.path() / (request.spec.name + ".cu");
  const fs::path output = folder.path() / "kernel.cubin";
  CROSSDOCK_CHECK_OK(write_file(source, source_text(request.spec)));
  std::vector<std::string> command{
      location_,    "-cubin", kStandardFlag,   "-arch=" + request.spec.arch(),
      "-Xptxas=-v", "-o",     output.string(), "-I" + folder.path().string()};
  if (line_info_) command.emplace_back(kLinesFlag);
  command.push_back(source.string());
  CROSSDOCK_TRY(outcome, run_process(command, request.deadline));
  const std::string log = without(outcome.output, folder.path().string() + "/");
  if (log.find("Unsupported gpu architecture") != std::string::npos)
    return make_error(Code::kUnsupported,
                      fmt::format("{} cannot compile for {}: install a toolkit that knows this GPU",
                                  id_, request.spec.arch()));
  if (outcome.exit_code != 0) return compile_error(request.spec, id_, log);
  CROSSDOCK_TRY(image, read_file(output));
  CROSSDOCK_TRY(symbol, only_kernel(request.spec, image));
  return Compiled{
      .image = std::move(image), .symbol = std::move(symbol), .use = parse_ptxas_log(log)};
}

// "13.0.88" of "... release 13.0, V13.0.88"
std::string version_in(std::string_view text) {
  const auto at = text.find(", V");
  if (at == std::string_view::npos) return {};
  const auto rest = text.substr(at + 3);
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789.")));
}

std::vector<std::string> search_places(const CompilerOptions& options) {
  if (!options.nvcc.empty()) return {options.nvcc};
  std::vector<std::string> places;
  if (!options.cuda_home.empty()) places.push_back(options.cuda_home + "/bin/nvcc");
  places.emplace_back("nvcc");
  places.emplace_back("/usr/local/cuda/bin/nvcc");
  return places;
}

}  // namespace

Result<std::unique_ptr<Compiler>> open_nvcc(const CompilerOptions& options, Deadline deadline) {
  if (options.nvcc == "none") return make_error(Code::kUnsupported, "jit.nvcc is none");
  std::optional<Error> newer;
  for (const auto& place : search_places(options)) {
    const auto outcome = run_process({place, "--version"}, deadline);
    if (outcome.code() == Code::kDeadline) return outcome.error();
    if (!outcome.ok() || outcome->exit_code != 0) continue;
    const std::string version = version_in(outcome->output);
    if (version.empty()) continue;
    if (!is_taken(std::atoi(version.c_str()), options.newest_cuda)) {
      newer = too_new(fmt::format("nvcc {} at {}", version, place), options.newest_cuda);
      continue;
    }
    return std::unique_ptr<Compiler>(std::make_unique<Nvcc>(place, version, options));
  }
  if (newer) return *newer;
  return make_error(Code::kUnsupported, "nvcc was not found");
}

}  // namespace crossdock::jit
