// SPDX-License-Identifier: Apache-2.0
#include "wire/http.hpp"

#include <gtest/gtest.h>

namespace crossdock::wire {
namespace {

constexpr std::uint64_t kMaxBody = 1000;

// Feeds `text` in pieces of `chunk` bytes and, when `end`, the end of the connection.
Result<std::optional<HttpMessage>> read(HttpReader::Side side, std::string_view text,
                                        std::size_t chunk = 1000, bool end = false) {
  HttpReader reader(side, kMaxBody);
  for (std::size_t at = 0; at < text.size(); at += chunk) {
    reader.feed(as_bytes(text.substr(at, chunk)));
    auto message = reader.next();
    if (!message.ok() || message->has_value()) return message;
  }
  if (end) reader.feed_end();
  return reader.next();
}

Result<std::optional<HttpMessage>> response(std::string_view text, bool end = false) {
  return read(HttpReader::Side::kResponses, text, 1000, end);
}

TEST(Http, ResponsesOfEveryBodyKindInAnyChunks) {
  const std::vector<std::string> texts = {
      "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
      "2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nTrailer: t\r\n\r\n",
      "HTTP/1.0 200 OK\nX-A: b\n\nhello"};
  for (const std::string& text : texts)
    for (std::size_t chunk = 1; chunk <= text.size(); ++chunk) {
      const auto message = read(HttpReader::Side::kResponses, text, chunk, true);
      ASSERT_TRUE(message.ok()) << message.error().describe();
      ASSERT_TRUE(message->has_value()) << text;
      EXPECT_EQ((*message)->status, 200);
      EXPECT_EQ((*message)->body, "hello");
      ASSERT_NE((*message)->header("x-a"), nullptr);
      EXPECT_EQ(*(*message)->header("x-a"), "b");
    }
}

TEST(Http, RequestsFollowEachOtherOnOneConnection) {
  HttpReader reader(HttpReader::Side::kRequests, kMaxBody);
  reader.feed(
      as_bytes("PUT /m?key=a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
               "GET /m?key=a HTTP/1.0\r\n\r\n"));
  const auto put = reader.next().value().value();
  EXPECT_EQ(put.method, "PUT");
  EXPECT_EQ(put.target, "/m?key=a");
  EXPECT_EQ(put.body, "abc");
  EXPECT_TRUE(put.keep_alive());
  const auto get = reader.next().value().value();
  EXPECT_EQ(get.method, "GET");
  EXPECT_FALSE(get.keep_alive());
  EXPECT_FALSE(reader.next().value().has_value());
  EXPECT_FALSE(reader.in_message());
}

TEST(Http, EveryTruncationWaitsAndThenFailsAtTheEnd) {
  const std::vector<std::string> texts = {
      "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"};
  for (const std::string& text : texts)
    for (std::size_t n = 1; n < text.size(); ++n) {
      const auto waiting = response(text.substr(0, n));
      ASSERT_TRUE(waiting.ok()) << n;
      EXPECT_FALSE(waiting->has_value()) << n;
      EXPECT_EQ(response(text.substr(0, n), true).code(), Code::kCorrupt) << n;
    }
}

TEST(Http, WhatIsNotHttpIsNamed) {
  const auto ssh = response("SSH-2.0-OpenSSH");
  EXPECT_EQ(ssh.code(), Code::kIncompatible);
  EXPECT_NE(ssh.error().message.find("SSH-2.0"), std::string::npos);
  for (const char* text :
       {"HTTP/2 200 OK\r\n\r\n", "HTTP/1.1 abc OK\r\n\r\n", "HTTP/1.1 99 Low\r\n\r\n",
        "HTTP/1.1\r\n\r\n", "HTTP/1.x 200 OK\r\n\r\n"})
    EXPECT_EQ(response(text).code(), Code::kIncompatible) << text;
  for (const char* text : {"GET\r\n\r\n", "GET /\r\n\r\n", "GET x HTTP/1.1\r\n\r\n",
                           "G:T / HTTP/1.1\r\n\r\n", "GET / HTTP/3.0\r\n\r\n"})
    EXPECT_EQ(read(HttpReader::Side::kRequests, text).code(), Code::kIncompatible) << text;
}

TEST(Http, LimitsHold) {
  const std::string start = "HTTP/1.1 200 OK\r\n";
  EXPECT_EQ(response(start + "Content-Length: 1001\r\n\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(start + "Content-Length: 99999999999999999999\r\n\r\n").code(),
            Code::kCorrupt);
  EXPECT_EQ(response(start + "Content-Length: -1\r\n\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(start + "\r\n" + std::string(1001, 'x')).code(), Code::kCorrupt);
  const std::string chunked = start + "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(response(chunked + "3e9\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(chunked + "ffffffffffffffff\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(chunked + "zz\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(chunked + "1\r\nxx\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(chunked + std::string(300, '1')).code(), Code::kCorrupt);
  EXPECT_EQ(response(start + "Transfer-Encoding: gzip\r\n\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(response(start + "no colon\r\n\r\n").code(), Code::kCorrupt);
  std::string many = start;
  for (std::size_t i = 0; i <= kMaxHttpHeaders; ++i)
    many += "a: b\r\n";
  EXPECT_EQ(response(many + "\r\n").code(), Code::kCorrupt);
  EXPECT_EQ(read(HttpReader::Side::kResponses, start + "a: " + std::string(kMaxHttpHeadBytes, 'x'))
                .code(),
            Code::kCorrupt);
}

TEST(Http, TargetsAreSplitAndDecoded) {
  const auto target = parse_target("/a%20b?key=x%2Fy&ttl_ms=5&flag").value();
  EXPECT_EQ(target.path, "/a b");
  EXPECT_EQ(*target.parameter("key"), "x/y");
  EXPECT_EQ(*target.parameter("ttl_ms"), "5");
  EXPECT_EQ(*target.parameter("flag"), "");
  EXPECT_EQ(target.parameter("other"), nullptr);
  EXPECT_FALSE(parse_target("/?key=%").ok());
  std::string many = "/?";
  for (int i = 0; i < 17; ++i)
    many += "a=b&";
  EXPECT_EQ(parse_target(many).code(), Code::kInvalidArgument);
}

TEST(Http, WhatIsFormattedIsRead) {
  const std::string text = format_request("PUT", "/m?key=a", {{"Host", "h"}}, "body");
  const auto request = read(HttpReader::Side::kRequests, text).value().value();
  EXPECT_EQ(request.method, "PUT");
  EXPECT_EQ(request.body, "body");
  EXPECT_EQ(*request.header("host"), "h");
  const auto reply = response(format_response(412, {{"ETag", "\"1\""}}, "")).value().value();
  EXPECT_EQ(reply.status, 412);
  EXPECT_EQ(reply.reason, "Precondition Failed");
}

}  // namespace
}  // namespace crossdock::wire
