// Hashing. See key.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/key.hpp"

#include <cstring>
#include <fmt/format.h>
#include <xxhash.h>

namespace crossdock::jit {
namespace {

// Changes when the meaning of the hashed fields changes.
constexpr std::string_view kScheme = "crossdock kernel 1";

Key from_hash(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Key key;
  static_assert(sizeof canonical.digest == sizeof key.bytes);
  std::memcpy(key.bytes.data(), canonical.digest, key.bytes.size());
  return key;
}

// A canonical text of fields: each with its length, so that no two lists of fields read alike.
class Fields {
 public:
  Fields& add(std::string_view field) {
    text_ += fmt::format("{}:", field.size());
    text_ += field;
    return *this;
  }
  [[nodiscard]] Key key() const { return from_hash(XXH3_128bits(text_.data(), text_.size())); }

 private:
  std::string text_;
};

}  // namespace

std::string Key::hex() const {
  std::string text;
  for (const auto byte : bytes)
    text += fmt::format("{:02x}", byte);
  return text;
}

Key hash_bytes(std::span<const std::byte> bytes) {
  return from_hash(XXH3_128bits(bytes.data(), bytes.size()));
}

Key source_key(const KernelSpec& spec, std::span<const SourceFile> files) {
  Fields fields;
  fields.add(kScheme).add(spec.header()).add(spec.expression()).add(spec.arch());
  for (const auto& file : files)
    fields.add(file.path).add(file.content);
  return fields.key();
}

Key binary_key(const Key& source, std::string_view compiler) {
  return Fields().add(kScheme).add(source.hex()).add(compiler).key();
}

}  // namespace crossdock::jit
