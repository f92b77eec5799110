// HTTP/1.1 heads and bodies (RFC 9112), bounded. No state outside HttpReader.
// SPDX-License-Identifier: Apache-2.0
#include "wire/http.hpp"

#include <charconv>
#include <fmt/format.h>

#include "wire/store_protocol.hpp"

namespace crossdock::wire {
namespace {

constexpr std::size_t kMaxParameters = 16;
constexpr std::size_t kMaxChunkLine = 256;

Error malformed(std::string message, Code code = Code::kCorrupt) {
  return Error{.code = code, .scope = Scope::kPeer, .message = std::move(message)};
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    c = lower(c);
  return out;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t'))
    text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t'))
    text.remove_suffix(1);
  return text;
}

bool is_token(std::string_view text) {
  for (const char c : text)
    if (c <= ' ' || c >= 0x7f || c == ':') return false;
  return !text.empty();
}

// Takes one line (ended by LF, a CR before it dropped) off the front; nothing when it is not whole.
std::optional<std::string_view> take_line(std::string_view& text) {
  const auto end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  std::string_view line = text.substr(0, end);
  if (line.ends_with('\r')) line.remove_suffix(1);
  text.remove_prefix(end + 1);
  return line;
}

// Where the head ends (after its empty line); npos when it is not whole.
std::size_t head_end(std::string_view text) {
  std::string_view rest = text;
  while (const auto line = take_line(rest))
    if (line->empty()) return text.size() - rest.size();
  return std::string_view::npos;
}

Result<> parse_header(std::string_view line, HttpMessage& out) {
  const auto colon = line.find(':');
  const std::string_view name = line.substr(0, colon);
  if (colon == std::string_view::npos || !is_token(name))
    return malformed("bad HTTP header line " + quote_bytes(as_bytes(line), 64));
  if (out.headers.size() == kMaxHttpHeaders)
    return malformed(fmt::format("more than {} HTTP headers", kMaxHttpHeaders));
  out.headers.emplace_back(lower(name), trim(line.substr(colon + 1)));
  return {};
}

std::string_view reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 412:
      return "Precondition Failed";
    case 413:
      return "Content Too Large";
    case 507:
      return "Insufficient Storage";
    default:
      return "Status";
  }
}

std::string format_message(std::string start, const HttpHeaders& headers, std::string_view body) {
  for (const auto& [name, value] : headers)
    start += fmt::format("{}: {}\r\n", name, value);
  start += fmt::format("Content-Length: {}\r\n\r\n", body.size());
  start += body;
  return start;
}

}  // namespace

std::optional<std::uint64_t> parse_u64(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

const std::string* HttpMessage::header(std::string_view name) const {
  for (const auto& [have, value] : headers)
    if (have == name) return &value;
  return nullptr;
}

bool HttpMessage::keep_alive() const {
  const std::string* connection = header("connection");
  const std::string option = connection != nullptr ? lower(*connection) : std::string();
  return minor_version >= 1 ? option != "close" : option == "keep-alive";
}

void HttpReader::feed(Bytes chunk) {
  if (!failed_) buffer_.append(as_text(chunk));
}

Result<std::optional<HttpMessage>> HttpReader::next() {
  if (failed_) return *failed_;
  Result<bool> whole = head_.has_value() ? Result<bool>(true) : read_head();
  if (whole.ok() && *whole) whole = read_body();
  if (!whole.ok()) {
    failed_ = std::move(whole).error();
    return *failed_;
  }
  if (!*whole) return std::optional<HttpMessage>{};
  return std::exchange(head_, std::nullopt);
}

Result<bool> HttpReader::read_head() {
  const auto end = head_end(std::string_view(buffer_).substr(0, kMaxHttpHeadBytes));
  if (end == std::string::npos) {
    if (buffer_.size() >= kMaxHttpHeadBytes)
      return malformed(fmt::format("HTTP head exceeds {} bytes", kMaxHttpHeadBytes));
    // Something else on the port need not send a line for us to notice.
    constexpr std::string_view kStart = "HTTP/1.";
    const auto known = std::string_view(buffer_).substr(0, kStart.size());
    if (side_ == Side::kResponses && !kStart.starts_with(known))
      return malformed("not an HTTP server (first bytes " + quote_bytes(as_bytes(buffer_)) + ")",
                       Code::kIncompatible);
    if (ended_ && !buffer_.empty()) return malformed("the connection ended inside an HTTP head");
    return false;
  }
  HttpMessage message;
  std::string_view head = std::string_view(buffer_).substr(0, end);
  CROSSDOCK_CHECK_OK(parse_start_line(*take_line(head), message));
  for (auto line = take_line(head); line && !line->empty(); line = take_line(head))
    CROSSDOCK_CHECK_OK(parse_header(*line, message));
  buffer_.erase(0, end);
  head_ = std::move(message);
  CROSSDOCK_CHECK_OK(choose_body());
  return true;
}

Result<> HttpReader::parse_start_line(std::string_view line, HttpMessage& out) const {
  constexpr std::string_view kVersion = "HTTP/1.";
  const Error bad = malformed("not HTTP/1.x (first line " + quote_bytes(as_bytes(line), 48) + ")",
                              Code::kIncompatible);
  std::string_view version;
  if (side_ == Side::kRequests) {
    const auto first = line.find(' ');
    const auto last = line.rfind(' ');
    if (first == std::string_view::npos || first == last) return bad;
    out.method = line.substr(0, first);
    out.target = line.substr(first + 1, last - first - 1);
    version = line.substr(last + 1);
    if (!is_token(out.method) || out.target.empty() || out.target[0] != '/') return bad;
  } else {
    version = line.substr(0, line.find(' '));
    const std::string_view rest = line.substr(std::min(line.size(), version.size() + 1));
    const auto status = parse_u64(rest.substr(0, 3));
    if (!status || *status < 100 || *status > 599) return bad;
    out.status = static_cast<int>(*status);
    out.reason = trim(rest.substr(3));
  }
  if (version.size() != kVersion.size() + 1 || !version.starts_with(kVersion)) return bad;
  if (version.back() < '0' || version.back() > '9') return bad;
  out.minor_version = version.back() - '0';
  return {};
}

Result<> HttpReader::choose_body() {
  in_trailer_ = false;
  const std::string* encoding = head_->header("transfer-encoding");
  const std::string* length = head_->header("content-length");
  if (encoding != nullptr) {
    if (lower(*encoding) != "chunked" || length != nullptr)
      return malformed("unsupported HTTP transfer encoding " +
                       quote_bytes(as_bytes(*encoding), 32));
    body_kind_ = Body::kChunked;
    body_left_ = 0;
    return {};
  }
  const bool never_a_body =
      head_->status == 204 || head_->status == 304 || head_->status / 100 == 1;
  if (length == nullptr) {
    const bool none = side_ == Side::kRequests || never_a_body;
    body_kind_ = none ? Body::kLength : Body::kUntilEnd;
    body_left_ = 0;
    return {};
  }
  const auto bytes = parse_u64(*length);
  if (!bytes) return malformed("bad Content-Length " + quote_bytes(as_bytes(*length), 32));
  if (*bytes > max_body_)
    return malformed(fmt::format("HTTP body of {} bytes, the limit is {}", *bytes, max_body_));
  body_kind_ = Body::kLength;
  body_left_ = never_a_body ? 0 : *bytes;
  return {};
}

Result<bool> HttpReader::read_body() {
  if (body_kind_ == Body::kChunked) return read_chunks();
  if (body_kind_ == Body::kUntilEnd) {
    if (head_->body.size() + buffer_.size() > max_body_)
      return malformed(fmt::format("HTTP body exceeds {} bytes", max_body_));
    head_->body += buffer_;
    buffer_.clear();
    return ended_;
  }
  const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(body_left_, buffer_.size()));
  head_->body.append(buffer_, 0, n);
  buffer_.erase(0, n);
  body_left_ -= n;
  if (body_left_ != 0 && ended_)
    return malformed(
        fmt::format("the connection ended {} bytes before the end of an HTTP body", body_left_));
  return body_left_ == 0;
}

// Chunk: size in hexadecimal, CRLF, bytes, CRLF; a chunk of size 0, trailers and an empty line end
// the body. body_left_ counts the bytes of the current chunk with its line end.
Result<bool> HttpReader::read_chunks() {
  std::string_view rest = buffer_;
  const auto keep = [&] { buffer_.erase(0, buffer_.size() - rest.size()); };
  for (;;) {
    if (body_left_ > 2) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(body_left_ - 2, rest.size()));
      head_->body.append(rest.substr(0, n));
      rest.remove_prefix(n);
      body_left_ -= n;
      if (body_left_ > 2) break;
    }
    std::string_view after = rest;
    const auto line = take_line(after);
    if (!line && rest.size() > kMaxChunkLine) return malformed("overlong HTTP chunk line");
    if (!line) break;
    rest = after;
    if (body_left_ == 2) {
      if (!line->empty()) return malformed("HTTP chunk longer than it says");
      body_left_ = 0;
    } else if (in_trailer_) {
      if (line->empty()) return keep(), true;
    } else {
      std::uint64_t size = 0;
      const auto digits = trim(line->substr(0, line->find(';')));
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), size, 16);
      if (error != std::errc() || end != digits.data() + digits.size())
        return malformed("bad HTTP chunk size " + quote_bytes(as_bytes(*line), 32));
      if (size > max_body_ - head_->body.size())
        return malformed(fmt::format("HTTP body exceeds {} bytes", max_body_));
      in_trailer_ = size == 0;
      body_left_ = size == 0 ? 0 : size + 2;
    }
  }
  keep();
  if (ended_) return malformed("the connection ended inside a chunked HTTP body");
  return false;
}

const std::string* HttpTarget::parameter(std::string_view name) const {
  for (const auto& [have, value] : parameters)
    if (have == name) return &value;
  return nullptr;
}

Result<HttpTarget> parse_target(std::string_view target) {
  HttpTarget out;
  const auto question = target.find('?');
  CROSSDOCK_TRY(path, percent_decode(target.substr(0, question)));
  out.path = std::move(path);
  if (question == std::string_view::npos) return out;
  std::string_view query = target.substr(question + 1);
  while (!query.empty()) {
    const auto end = query.find('&');
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(end == std::string_view::npos ? query.size() : end + 1);
    if (out.parameters.size() == kMaxParameters)
      return invalid_argument(fmt::format("more than {} query parameters", kMaxParameters));
    const auto equals = pair.find('=');
    CROSSDOCK_TRY(name, percent_decode(pair.substr(0, equals)));
    CROSSDOCK_TRY(value,
                  percent_decode(equals == std::string_view::npos ? std::string_view()
                                                                  : pair.substr(equals + 1)));
    out.parameters.emplace_back(std::move(name), std::move(value));
  }
  return out;
}

std::string format_request(std::string_view method, std::string_view target,
                           const HttpHeaders& headers, std::string_view body) {
  return format_message(fmt::format("{} {} HTTP/1.1\r\n", method, target), headers, body);
}

std::string format_response(int status, const HttpHeaders& headers, std::string_view body) {
  return format_message(fmt::format("HTTP/1.1 {} {}\r\n", status, reason_of(status)), headers,
                        body);
}

}  // namespace crossdock::wire
