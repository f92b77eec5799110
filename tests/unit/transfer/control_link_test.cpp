// One control connection by itself.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/control_link.hpp"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/socket.h>

#include "base/socket.hpp"
#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

using transfer::detail::ControlLink;

struct Linked {
  Linked() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    far.reset(ends[1]);
    link = std::make_shared<ControlLink>(*loop, base::UniqueFd(ends[0]), wire::FrameReader());
    loop->run([&] {
      link->start([](const wire::Frame&) { return Result<>(); },
                  [this](const Error& why) { ended = why; });
    });
  }
  ~Linked() {
    loop->run([&] { link->close(make_error(Code::kClosed, "the test is over")); });
  }

  std::unique_ptr<base::EventLoop> loop = std::move(base::EventLoop::create("test")).value();
  base::UniqueFd far;
  std::optional<Error> ended;
  std::shared_ptr<ControlLink> link;
};

// A reader that is always behind, so that the queue is never empty.
TEST(ControlLink, WhatWasSentIsNotKept) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer's allocator does not tell how much it handed out";
#endif
  constexpr std::size_t kMiB = 1 << 20, kBehind = 8, kTotal = 300;
  Linked linked;
  const auto before = ::mallinfo2();
  std::vector<std::byte> read(kMiB);
  for (std::size_t i = 0; i < kTotal; ++i) {
    const auto sent = linked.link->send(std::vector<std::byte>(kMiB, std::byte(i)));
    ASSERT_TRUE(sent.ok()) << sent.error().describe();
    if (i < kBehind) continue;
    ASSERT_TRUE(base::recv_exact(linked.far.get(), read, soon()).ok());
    ASSERT_EQ(read.front(), std::byte(i - kBehind));
    ASSERT_EQ(read.back(), std::byte(i - kBehind));
  }
  const auto after = ::mallinfo2();
  EXPECT_LT(after.uordblks + after.hblkhd, before.uordblks + before.hblkhd + 64 * kMiB);
}

TEST(ControlLink, TheEndOfThePeerIsToldFromOnesOwn) {
  {
    Linked linked;
    linked.loop->run(
        [&] { linked.link->close(make_error(Code::kCorrupt, "this end had enough")); });
    EXPECT_FALSE(linked.link->ended_by_peer());
    EXPECT_EQ(linked.ended->code, Code::kCorrupt);
  }
  Linked linked;
  linked.far.reset();
  const auto patience = soon();
  for (bool ended = false; !ended && !patience.passed();)
    linked.loop->run([&] { ended = linked.ended.has_value(); });
  linked.loop->run([&] { EXPECT_TRUE(linked.link->ended_by_peer()); });
}

// What holds the link keeps the other end from seeing that it is over.
TEST(ControlLink, AHeldDescriptorOutlivesTheLink) {
  Linked linked;
  auto held = linked.link->hold();
  linked.loop->run([&] { linked.link->close(make_error(Code::kClosed, "over")); });
  EXPECT_EQ(linked.link->send(std::vector<std::byte>(1)).code(), Code::kClosed);
  std::byte byte{};
  EXPECT_EQ(base::recv_some(linked.far.get(), std::span(&byte, 1), Deadline::in(50ms)).code(),
            Code::kDeadline);
  EXPECT_EQ(linked.link->hold(), nullptr) << "nothing that begins now can be held by it";
  held.reset();
  EXPECT_EQ(base::recv_some(linked.far.get(), std::span(&byte, 1), soon()).value(), 0u);
}

}  // namespace
}  // namespace crossdock::testing
