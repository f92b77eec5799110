// HTTP responses (what a client meets) and requests (what the server meets), in any chunks.
// SPDX-License-Identifier: Apache-2.0
#include "wire/http.hpp"

#include "fuzz.hpp"

namespace crossdock::fuzz {
namespace {

using namespace wire;

constexpr std::uint64_t kMaxBody = 4096;

void run(Bytes input) {
  if (input.empty()) return;
  const auto choice = std::to_integer<unsigned>(input[0]);
  input = input.subspan(1);
  HttpReader reader((choice & 1) != 0 ? HttpReader::Side::kRequests : HttpReader::Side::kResponses,
                    kMaxBody);
  const std::size_t chunk = (choice >> 1) + 1;
  bool alive = true;
  const auto drain = [&] {
    for (;;) {
      const auto message = reader.next();
      alive = message.ok();
      if (!alive || !message->has_value()) return;
      CROSSDOCK_FUZZ_REQUIRE((*message)->body.size() <= kMaxBody);
      CROSSDOCK_FUZZ_REQUIRE((*message)->headers.size() <= kMaxHttpHeaders);
      (void)parse_target((*message)->target);
    }
  };
  while (!input.empty() && alive) {
    const Bytes part = input.first(std::min(chunk, input.size()));
    input = input.subspan(part.size());
    reader.feed(part);
    drain();
  }
  reader.feed_end();
  if (alive) drain();
}

Seeds seeds() {
  return {std::string("\x20") + "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: \"3\"\r\n\r\nhello",
          std::string("\x04") +
              "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
              "2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: u\r\n\r\n",
          std::string("\xfe") + "HTTP/1.0 404 Not Found\n\nuntil the end",
          std::string("\x11") +
              "PUT /m?key=a%2Fb&ttl_ms=5 HTTP/1.1\r\nContent-Length: 3\r\n"
              "If-Match: \"7\"\r\n\r\nabcGET /?prefix= HTTP/1.0\r\n\r\n"};
}

CROSSDOCK_FUZZ_TARGET("http", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
