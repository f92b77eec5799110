// Reading what compilers produce: kernel names from a cubin's section table, resource figures from
// the assembler's log. Nothing here trusts a size or an offset. See binary.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>
#include <elf.h>
#include <fmt/format.h>

#include "jit/binary.hpp"

namespace crossdock::jit {
namespace {

constexpr std::uint16_t kElfMachineCuda = 190;
// Each kernel, and nothing else, has a section of its parameters.
constexpr std::string_view kKernelPrefix = ".nv.constant0.";

// A copy of the T at `offset`; false when it is not inside.
template <class T>
bool read_at(std::span<const std::byte> bytes, std::uint64_t offset, T& out) {
  if (offset > bytes.size() || sizeof(T) > bytes.size() - offset) return false;
  std::memcpy(&out, bytes.data() + offset, sizeof(T));
  return true;
}

std::string_view text_at(std::span<const std::byte> bytes, std::uint64_t offset) {
  if (offset >= bytes.size()) return {};
  const auto* const start = reinterpret_cast<const char*>(bytes.data()) + offset;
  return {start, ::strnlen(start, bytes.size() - offset)};
}

Error not_a_cubin() {
  return make_error(Code::kCorrupt, "the machine code is not an ELF file of the GPU");
}

// The number that stands right before `unit` on the line, or 0.
int number_before(std::string_view line, std::string_view unit) {
  const auto at = line.find(unit);
  if (at == std::string_view::npos || at == 0) return 0;
  auto start = at;
  while (start > 0 && line[start - 1] >= '0' && line[start - 1] <= '9')
    --start;
  int value = 0;
  std::from_chars(line.data() + start, line.data() + at, value);
  return value;
}

// Calls `visit(name, section)` for every section.
template <class Visit>
Result<void> each_section(std::span<const std::byte> cubin, const Visit& visit) {
  Elf64_Ehdr header{};
  if (!read_at(cubin, 0, header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kElfMachineCuda ||
      header.e_shentsize != sizeof(Elf64_Shdr))
    return not_a_cubin();
  const auto section_at = [&](unsigned index, Elf64_Shdr& section) {
    return read_at(cubin, header.e_shoff + std::uint64_t{index} * sizeof section, section);
  };
  Elf64_Shdr names{};
  if (header.e_shoff > cubin.size() || !section_at(header.e_shstrndx, names)) return not_a_cubin();
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section{};
    if (!section_at(i, section)) return not_a_cubin();
    if (names.sh_offset > cubin.size()) return not_a_cubin();
    visit(text_at(cubin.subspan(names.sh_offset), section.sh_name), section);
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> kernel_symbols(std::span<const std::byte> cubin) {
  std::vector<std::string> symbols;
  CROSSDOCK_CHECK_OK(each_section(cubin, [&](std::string_view name, const Elf64_Shdr&) {
    if (name.starts_with(kKernelPrefix)) symbols.emplace_back(name.substr(kKernelPrefix.size()));
  }));
  return symbols;
}

Result<std::uint64_t> code_bytes(std::span<const std::byte> cubin) {
  std::uint64_t bytes = 0;
  CROSSDOCK_CHECK_OK(each_section(cubin, [&](std::string_view, const Elf64_Shdr& section) {
    if ((section.sh_flags & SHF_EXECINSTR) != 0) bytes += section.sh_size;
  }));
  return bytes;
}

ResourceUse parse_ptxas_log(std::string_view log) {
  ResourceUse use;
  while (!log.empty()) {
    const auto end = log.find('\n');
    const auto line = log.substr(0, end);
    if (line.find("bytes stack frame") != std::string_view::npos) {
      use.stack_bytes = std::max(use.stack_bytes, number_before(line, " bytes stack frame"));
      use.spill_bytes +=
          number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    }
    if (line.find("Used ") != std::string_view::npos) {
      use.registers = std::max(use.registers, number_before(line, " registers"));
      use.shared_bytes = std::max(use.shared_bytes, number_before(line, " bytes smem"));
    }
    log = end == std::string_view::npos ? std::string_view{} : log.substr(end + 1);
  }
  return use;
}

}  // namespace crossdock::jit
