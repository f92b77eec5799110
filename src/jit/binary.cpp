// The file form of compiled kernels. See binary.hpp for the format.
// SPDX-License-Identifier: Apache-2.0
#include "jit/binary.hpp"

#include <bit>
#include <charconv>
#include <cstring>
#include <fmt/format.h>
#include <map>

namespace crossdock::jit {
namespace {

static_assert(std::endian::native == std::endian::little, "the file format is little-endian");

constexpr std::string_view kMagic = "XDKERNEL";
constexpr std::size_t kSealedBytes = 64;  // of the header, before its own checksum

struct Header {
  char magic[8];
  std::uint32_t format;
  std::uint32_t header_bytes;
  std::uint64_t metadata_bytes;
  std::uint64_t image_bytes;
  std::uint8_t key[16];
  std::uint8_t content_hash[16];
  std::uint8_t header_hash[16];
};
static_assert(sizeof(Header) == 80 && offsetof(Header, header_hash) == kSealedBytes);

Error corrupt(std::string_view what) {
  return make_error(Code::kCorrupt, fmt::format("compiled kernel: {}", what));
}

std::string metadata_text(const Binary& b) {
  return fmt::format(
      "kernel\t{}\nentry\t{}\nconfig_type\t{}\nconfig\t{}\nsm\t{}\ncompiler\t{}\nsymbol\t{}\n"
      "registers\t{}\nstack\t{}\nspill\t{}\nshared\t{}\n",
      b.spec.name, b.spec.entry, b.spec.config_type, b.spec.config, b.spec.sm, b.compiler, b.symbol,
      b.use.registers, b.use.stack_bytes, b.use.spill_bytes, b.use.shared_bytes);
}

using Metadata = std::map<std::string_view, std::string_view>;

Metadata parse_metadata(std::string_view text) {
  Metadata fields;
  while (!text.empty()) {
    const auto end = text.find('\n');
    const auto line = text.substr(0, end);
    if (const auto tab = line.find('\t'); tab != std::string_view::npos)
      fields.emplace(line.substr(0, tab), line.substr(tab + 1));
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return fields;
}

Result<void> take(const Metadata& fields, std::string_view name, std::string& target) {
  const auto found = fields.find(name);
  if (found == fields.end()) return corrupt(fmt::format("no field {}", name));
  target = found->second;
  return {};
}

Result<void> take(const Metadata& fields, std::string_view name, int& target) {
  std::string text;
  CROSSDOCK_CHECK_OK(take(fields, name, text));
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), target);
  if (problem != std::errc() || end != text.data() + text.size())
    return corrupt(fmt::format("field {} is no number", name));
  return {};
}

Result<void> fill_fields(const Metadata& fields, Binary& binary) {
  CROSSDOCK_CHECK_OK(take(fields, "kernel", binary.spec.name));
  CROSSDOCK_CHECK_OK(take(fields, "entry", binary.spec.entry));
  CROSSDOCK_CHECK_OK(take(fields, "config_type", binary.spec.config_type));
  CROSSDOCK_CHECK_OK(take(fields, "config", binary.spec.config));
  CROSSDOCK_CHECK_OK(take(fields, "sm", binary.spec.sm));
  CROSSDOCK_CHECK_OK(take(fields, "compiler", binary.compiler));
  CROSSDOCK_CHECK_OK(take(fields, "symbol", binary.symbol));
  CROSSDOCK_CHECK_OK(take(fields, "registers", binary.use.registers));
  CROSSDOCK_CHECK_OK(take(fields, "stack", binary.use.stack_bytes));
  CROSSDOCK_CHECK_OK(take(fields, "spill", binary.use.spill_bytes));
  return take(fields, "shared", binary.use.shared_bytes);
}

Result<Header> checked_header(std::span<const std::byte> file) {
  Header header{};
  if (file.size() < sizeof header) return corrupt("shorter than its header");
  std::memcpy(&header, file.data(), sizeof header);
  if (std::string_view(header.magic, sizeof header.magic) != kMagic) return corrupt("wrong magic");
  if (header.format != kBinaryFormat)
    return make_error(Code::kIncompatible, fmt::format("compiled kernel of format {}, this library "
                                                       "reads format {}",
                                                       header.format, kBinaryFormat));
  const Key sealed = hash_bytes(file.first(kSealedBytes));
  if (std::memcmp(sealed.bytes.data(), header.header_hash, sizeof header.header_hash) != 0)
    return corrupt("the header's checksum does not match");
  const std::size_t content = file.size() - sizeof header;
  if (header.header_bytes != sizeof header || header.metadata_bytes > content ||
      header.image_bytes != content - header.metadata_bytes)
    return corrupt("its size is not what the header says");
  return header;
}

}  // namespace

std::vector<std::byte> encode(const Binary& binary) {
  const std::string metadata = metadata_text(binary);
  std::vector<std::byte> file(sizeof(Header) + metadata.size() + binary.image.size());
  std::memcpy(file.data() + sizeof(Header), metadata.data(), metadata.size());
  if (!binary.image.empty())
    std::memcpy(file.data() + sizeof(Header) + metadata.size(), binary.image.data(),
                binary.image.size());
  Header header{};
  std::memcpy(header.magic, kMagic.data(), sizeof header.magic);
  header.format = kBinaryFormat;
  header.header_bytes = sizeof header;
  header.metadata_bytes = metadata.size();
  header.image_bytes = binary.image.size();
  std::memcpy(header.key, binary.key.bytes.data(), sizeof header.key);
  const Key content = hash_bytes(std::span(file).subspan(sizeof header));
  std::memcpy(header.content_hash, content.bytes.data(), sizeof header.content_hash);
  std::memcpy(file.data(), &header, sizeof header);
  const Key sealed = hash_bytes(std::span(file).first(kSealedBytes));
  std::memcpy(file.data() + kSealedBytes, sealed.bytes.data(), sealed.bytes.size());
  return file;
}

Result<Binary> decode(std::span<const std::byte> file) {
  CROSSDOCK_TRY(header, checked_header(file));
  const auto content = file.subspan(sizeof header);
  if (std::memcmp(hash_bytes(content).bytes.data(), header.content_hash,
                  sizeof header.content_hash) != 0)
    return corrupt("the content's checksum does not match");
  Binary binary;
  std::memcpy(binary.key.bytes.data(), header.key, sizeof header.key);
  const std::string_view metadata(reinterpret_cast<const char*>(content.data()),
                                  header.metadata_bytes);
  CROSSDOCK_CHECK_OK(fill_fields(parse_metadata(metadata), binary));
  const auto image = content.subspan(header.metadata_bytes);
  binary.image.assign(image.begin(), image.end());
  return binary;
}

}  // namespace crossdock::jit
