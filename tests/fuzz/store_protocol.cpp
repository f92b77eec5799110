// The TCP store's messages, the file store's records, contributions to a gathering, and
// percent-encoded keys.
// SPDX-License-Identifier: Apache-2.0
#include "wire/store_protocol.hpp"

#include "fuzz.hpp"

namespace crossdock::fuzz {
namespace {

using namespace wire;

constexpr std::ptrdiff_t kHeader = kFrameHeaderBytes;

void run(Bytes input) {
  if (input.empty()) return;
  const auto choice = std::to_integer<int>(input[0]) % 6;
  const Bytes rest = input.subspan(1);
  if (choice == 0) {
    const auto request = decode_store_request(rest);
    if (!request.ok()) return;
    const auto again = encode_store_request(*request);
    CROSSDOCK_FUZZ_REQUIRE(again.ok());
    CROSSDOCK_FUZZ_REQUIRE(as_text(Bytes(*again).subspan(kHeader)) == as_text(rest));
  } else if (choice == 1) {
    const auto reply = decode_store_reply(rest);
    if (!reply.ok()) return;
    const auto again = encode_store_reply(*reply);
    CROSSDOCK_FUZZ_REQUIRE(again.ok());
    CROSSDOCK_FUZZ_REQUIRE(as_text(Bytes(*again).subspan(kHeader)) == as_text(rest));
  } else if (choice == 2) {
    const auto record = decode_store_record(rest);
    if (record.ok()) CROSSDOCK_FUZZ_REQUIRE(encode_store_record(*record).ok());
  } else if (choice == 3) {
    const auto part = decode_gather_part(as_text(rest));
    if (part.ok()) CROSSDOCK_FUZZ_REQUIRE(*encode_gather_part(*part) == as_text(rest));
  } else if (choice == 4) {
    const auto key = percent_decode(as_text(rest));
    if (key.ok()) CROSSDOCK_FUZZ_REQUIRE(*percent_decode(percent_encode(*key)) == *key);
  } else {
    FrameReader reader(kStoreProtocol);
    reader.feed(rest);
    for (auto frame = reader.next(); frame.ok() && frame->has_value(); frame = reader.next()) {
      (void)decode_store_request(**frame);
      (void)decode_store_reply(**frame);
    }
  }
}

Seeds seeds() {
  const std::string request = text_of(encode_store_request({.id = 1,
                                                            .op = StoreOp::kCompareAndPut,
                                                            .key = "a/b",
                                                            .value = "v",
                                                            .lease_ms = 5,
                                                            .expected_revision = 9})
                                          .value());
  const std::string reply = text_of(
      encode_store_reply({.id = 1, .message = "m", .found = true, .value = "v", .keys = {"a", "b"}})
          .value());
  return {std::string(1, '\0') + request.substr(kHeader),
          std::string("\1") + reply.substr(kHeader),
          std::string("\2") +
              text_of(encode_store_record({.key = "k", .value = "v", .revision = 3}).value()),
          std::string("\3") + encode_gather_part({.rank = 1, .world = 2, .bytes = "b"}).value(),
          std::string("\4") + "a%2Fb%20c",
          std::string("\5") + request + reply};
}

CROSSDOCK_FUZZ_TARGET("store_protocol", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
