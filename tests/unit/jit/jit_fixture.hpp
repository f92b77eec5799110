// What the JIT tests share: a temporary folder, a compiler that needs no toolkit, child processes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "base/fd.hpp"
#include "jit/compiler.hpp"

namespace crossdock::jit {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "crossdock-jit-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path path;
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

inline constexpr std::uint64_t kCodeBytes = 128;  // of each kernel, as make_cubin says
// The smallest cubin with kernels of these names: section names and sizes only.
inline std::vector<std::byte> make_cubin(const std::vector<std::string>& kernels) {
  std::string names(1, '\0');
  std::vector<Elf64_Shdr> sections(2);
  for (const auto& kernel : kernels) {
    Elf64_Shdr section{};
    section.sh_name = static_cast<Elf64_Word>(names.size());
    names += ".nv.constant0." + kernel + '\0';
    sections.push_back(section);
    Elf64_Shdr code{};
    code.sh_flags = SHF_ALLOC | SHF_EXECINSTR;
    code.sh_size = kCodeBytes;  // which these images do not have
    sections.push_back(code);
  }
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_machine = 190;
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = static_cast<Elf64_Half>(sections.size());
  header.e_shstrndx = 1;
  header.e_shoff = sizeof header + names.size();
  sections[1].sh_offset = sizeof header;
  sections[1].sh_size = names.size();
  std::vector<std::byte> image(header.e_shoff + sections.size() * sizeof(Elf64_Shdr));
  std::memcpy(image.data(), &header, sizeof header);
  std::memcpy(image.data() + sizeof header, names.data(), names.size());
  std::memcpy(image.data() + header.e_shoff, sections.data(), sections.size() * sizeof(Elf64_Shdr));
  return image;
}

// "Compiles" by wrapping the name; each compilation adds one byte to `tally`, which all processes
// of a test share.
class FakeCompiler final : public Compiler {
 public:
  explicit FakeCompiler(std::filesystem::path tally, std::string id = "fake 1.0 -std=c++20")
      : tally_(std::move(tally)), id_(std::move(id)) {}
  [[nodiscard]] const std::string& id() const override { return id_; }
  [[nodiscard]] const std::string& location() const override { return id_; }
  Result<Compiled> compile(const CompileRequest& request) const override {
    const base::UniqueFd fd(
        ::open(tally_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
    if (::write(fd.get(), "x", 1) != 1) return errno_error(errno, "count a compilation");
    if (during_compile) during_compile();
    return Compiled{
        .image = make_cubin({request.spec.name + "_code"}),
        .symbol = request.spec.name + "_code",
        .use = {.registers = 40, .stack_bytes = 0, .spill_bytes = 0, .shared_bytes = 16}};
  }
  std::function<void()> during_compile;

 private:
  std::filesystem::path tally_;
  std::string id_;
};

// Runs `body` in `count` child processes at once; returns their exit codes.
inline std::vector<int> in_processes(int count, const std::function<int(int)>& body) {
  std::vector<pid_t> children;
  for (int i = 0; i < count; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(body(i));
    children.push_back(pid);
  }
  std::vector<int> codes;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

inline KernelSpec fill_spec(unsigned threads = 256, int sm = 90) {
  return {.name = "fill",
          .entry = "crossdock::device::fill",
          .config_type = "crossdock::device::FillConfig",
          .config = ConfigText().field("threads", threads).text(),
          .sm = sm};
}

}  // namespace crossdock::jit
