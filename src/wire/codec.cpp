// Error texts of the codec. Runs only after something failed; no state.
// SPDX-License-Identifier: Apache-2.0
#include "wire/codec.hpp"

#include <fmt/format.h>

namespace crossdock::wire {
namespace {

std::string fault_text(const CodecFault& fault) {
  switch (fault.kind) {
    case CodecFault::Kind::kNone:
      return "no fault";
    case CodecFault::Kind::kTruncated:
      return fmt::format("{} needs {} more than the {} bytes that are left", fault.field,
                         fault.value, fault.limit);
    case CodecFault::Kind::kOverLimit:
      return fmt::format("{} is {}, the limit is {}", fault.field, fault.value, fault.limit);
    case CodecFault::Kind::kBadValue:
      return fmt::format("{} has the bad value {}", fault.field, fault.value);
    case CodecFault::Kind::kNoSpace:
      return fmt::format("{} ({} bytes) does not fit the buffer given", fault.field, fault.value);
  }
  return "unknown fault";
}

}  // namespace

std::string quote_bytes(Bytes bytes, std::size_t limit) {
  std::string out = "\"";
  for (const std::byte b : bytes.first(std::min(limit, bytes.size()))) {
    const auto c = std::to_integer<unsigned char>(b);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c >= 0x20 && c < 0x7f) {
      out += static_cast<char>(c);
    } else {
      out += fmt::format("\\x{:02x}", c);
    }
  }
  out += '"';
  return out;
}

Error read_error(const CodecFault& fault, std::string_view what) {
  return Error{.code = Code::kCorrupt,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format("malformed {}: {}", what, fault_text(fault))};
}

Error write_error(const CodecFault& fault, std::string_view what) {
  return invalid_argument(fmt::format("cannot encode {}: {}", what, fault_text(fault)));
}

}  // namespace crossdock::wire
