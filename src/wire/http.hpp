// As much of HTTP/1.1 as the metadata store needs: heads and bodies with limits, for both sides.
// HttpReader is fed what a socket gave and yields whole messages; it understands Content-Length,
// chunked bodies and bodies that end with the connection. No thread, no sockets; single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <crossdock/core/result.hpp>

#include "wire/codec.hpp"

namespace crossdock::wire {

inline constexpr std::size_t kMaxHttpHeadBytes = 16 * 1024;
inline constexpr std::size_t kMaxHttpHeaders = 100;

struct HttpMessage {
  // Requests: method and target ("/metadata?key=a"); responses: status and reason.
  std::string method = {};
  std::string target = {};
  int status = 0;
  std::string reason = {};
  int minor_version = 1;                                          // of HTTP/1.x
  std::vector<std::pair<std::string, std::string>> headers = {};  // names in lower case
  std::string body = {};

  // The first header of that (lower-case) name; nullptr when there is none.
  [[nodiscard]] const std::string* header(std::string_view name) const;
  // Whether the connection serves another message after this one.
  [[nodiscard]] bool keep_alive() const;
};

class HttpReader {
 public:
  enum class Side : std::uint8_t { kRequests, kResponses };
  HttpReader(Side side, std::uint64_t max_body_bytes) : side_(side), max_body_(max_body_bytes) {}

  void feed(Bytes chunk);
  // The peer closed its side: a body that ends with the connection is complete.
  void feed_end() { ended_ = true; }
  // The next message, nothing when more bytes are needed. Errors (kCorrupt, kIncompatible for what
  // is not HTTP) are final.
  [[nodiscard]] Result<std::optional<HttpMessage>> next();
  // Whether part of a message is waiting for its rest.
  [[nodiscard]] bool in_message() const { return !buffer_.empty() || head_.has_value(); }
  // Bytes held for messages that next() has not given out.
  [[nodiscard]] std::size_t buffered() const {
    return buffer_.size() + (head_ ? head_->body.size() : 0);
  }

 private:
  enum class Body : std::uint8_t { kLength, kChunked, kUntilEnd };

  Result<bool> read_head();
  Result<> choose_body();
  Result<bool> read_body();
  Result<bool> read_chunks();
  Result<> parse_start_line(std::string_view line, HttpMessage& out) const;

  Side side_;
  std::uint64_t max_body_;
  std::string buffer_;
  bool ended_ = false;
  std::optional<Error> failed_;
  std::optional<HttpMessage> head_;
  Body body_kind_ = Body::kLength;
  std::uint64_t body_left_ = 0;
  bool in_trailer_ = false;
};

// Splits "/path?key=a%20b&ttl_ms=5" into path and decoded parameters; at most 16 of them.
struct HttpTarget {
  std::string path = {};
  std::vector<std::pair<std::string, std::string>> parameters = {};
  [[nodiscard]] const std::string* parameter(std::string_view name) const;
};
[[nodiscard]] Result<HttpTarget> parse_target(std::string_view target);

// A decimal number without sign or blanks.
[[nodiscard]] std::optional<std::uint64_t> parse_u64(std::string_view text);

using HttpHeaders = std::vector<std::pair<std::string_view, std::string>>;
// Both add Content-Length. Header values must hold no line breaks.
[[nodiscard]] std::string format_request(std::string_view method, std::string_view target,
                                         const HttpHeaders& headers, std::string_view body);
[[nodiscard]] std::string format_response(int status, const HttpHeaders& headers,
                                          std::string_view body);

}  // namespace crossdock::wire
