// Heads of data frames. The input's checksums are repaired first (unless its first byte is odd), so
// that the checks behind them are reached.
// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "fuzz.hpp"
#include "wire/checksum.hpp"
#include "wire/data.hpp"

namespace crossdock::fuzz {
namespace {

using namespace wire;

void repair(std::span<std::byte> frame) {
  if (frame.size() < kDataHeaderBytes) return;
  // Layout and seeds: data.hpp, data.cpp.
  const auto id = load_le<std::uint64_t>(frame.data() + 8);
  const auto count = load_le<std::uint16_t>(frame.data() + 4);
  const auto type = load_le<std::uint8_t>(frame.data() + 2);
  const std::size_t content = type == 4 ? count : type == 3 ? 0 : count * kDescriptorBytes;
  const std::size_t body = data_head_bytes(content) - kDataHeaderBytes;
  if (frame.size() - kDataHeaderBytes >= body) {
    const Bytes bytes = Bytes(frame).subspan(kDataHeaderBytes, body);
    store_le(frame.data() + 32, static_cast<std::uint32_t>(xxh3_64(bytes, id)));
  }
  store_le(frame.data() + 36, static_cast<std::uint32_t>(xxh3_64(frame.first(36), 0x6c616e65)));
}

void run(Bytes input) {
  if (input.empty()) return;
  std::vector<std::byte> frame(input.begin() + 1, input.end());
  if ((std::to_integer<int>(input[0]) & 1) == 0) repair(frame);
  const auto header = decode_data_header(frame);
  if (!header.ok()) return;
  CROSSDOCK_FUZZ_REQUIRE(header->payload_bytes <= kMaxDataPayload);
  CROSSDOCK_FUZZ_REQUIRE(header->count <= kMaxDescriptors);
  const Bytes rest = Bytes(frame).subspan(kDataHeaderBytes);
  if (rest.size() < header->body_bytes()) return;
  const Bytes body = rest.first(header->body_bytes());
  if (header->type == DataType::kAck) {
    (void)decode_ack_message(*header, body);
    return;
  }
  if (header->type == DataType::kReadData) return;
  static std::array<Descriptor, kMaxDescriptors> descriptors;
  if (!decode_descriptors(*header, body, descriptors).ok()) return;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < header->count; ++i) {
    const Descriptor& d = descriptors[i];
    CROSSDOCK_FUZZ_REQUIRE(d.length != 0 && d.addr + d.length >= d.addr);
    total += d.length;
  }
  CROSSDOCK_FUZZ_REQUIRE(total == header->payload_bytes);
}

Seeds seeds() {
  const std::array<Descriptor, 3> descriptors{
      {{0x1000, 64}, {0x7fff'0000'0000, 1 << 20}, {UINT64_MAX - 8, 8}}};
  std::vector<std::byte> out(kMaxDataHeadBytes);
  Seeds all;
  const auto add = [&](std::size_t size) {
    all.push_back(std::string(1, '\0') + std::string(as_text(Bytes(out).first(size))));
  };
  add(encode_write({.request_id = 7, .expiry_ms = 100, .descriptors = descriptors}, out).value());
  add(encode_read({.request_id = 8, .descriptors = descriptors, .has_checksum = true}, out)
          .value());
  add(encode_read_data({.request_id = 8, .payload_bytes = 12, .has_checksum = true}, out).value());
  add(encode_ack({.request_id = 7, .status = Code::kDenied, .message = "no"}, out).value());
  return all;
}

CROSSDOCK_FUZZ_TARGET("data_frames", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
