// Mailboxes by themselves: who may take their messages, and that no peer can fill memory with them.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/mailbox.hpp"

#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <crossdock/transfer/engine.hpp>

namespace crossdock::transfer {
namespace {

using detail::Mailboxes;
using Kind = Message::Kind;

Message note(std::uint64_t instance, std::string payload = "x") {
  return {.peer = "a", .peer_instance = instance, .payload = std::move(payload)};
}

Message loss(std::uint64_t instance) {
  return {.kind = Kind::kPeerLost, .peer = "a", .peer_instance = instance, .payload = "died"};
}

// "n7" for a message of instance 7, "l7" for its loss; empties the mailbox.
std::vector<std::string> contents(detail::MailboxCore& box) {
  std::vector<std::string> all;
  while (const auto message = box.try_receive())
    all.push_back((message->kind == Kind::kPeerLost ? "l" : "n") +
                  std::to_string(message->peer_instance));
  return all;
}

using Strings = std::vector<std::string>;

TEST(Mailbox, OneHandlerAtATimeAndOnlyItsOwnerEndsIt) {
  Mailboxes boxes({});
  const auto box = boxes.get("m");
  int first = 0, second = 0;
  const auto a = box->set_handler([&](const Message&) { ++first; });
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(box->set_handler([](const Message&) {}).code(), Code::kBusy);
  ASSERT_TRUE(boxes.deliver("m", note(1)).ok());
  box->clear_handler(*a);
  const auto b = box->set_handler([&](const Message&) { ++second; });
  ASSERT_TRUE(b.ok());
  box->clear_handler(*a);  // late, or twice
  ASSERT_TRUE(boxes.deliver("m", note(1)).ok());
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

// The thread inside the handler is the parent's: in the child nobody ever leaves it.
TEST(Mailbox, AForkedChildDoesNotWaitForAHandlerOfItsParent) {
  Mailboxes boxes({});
  const auto box = boxes.get("m");
  std::promise<void> inside, go_on;
  const auto token = box->set_handler([&, held = go_on.get_future().share()](const Message&) {
                          inside.set_value();
                          held.wait_for(std::chrono::minutes(1));
                        })
                         .value();
  std::thread delivers([&] { EXPECT_TRUE(boxes.deliver("m", note(1)).ok()); });
  inside.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    box->clear_handler(token);
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  go_on.set_value();
  delivers.join();
}

TEST(Mailbox, ASubscriptionThatIsReplacedLeavesTheNewOneInPlace) {
  auto engine = Engine::create({.config = {{"log.level", "error"}}}).value();
  auto other = Engine::create({.config = {{"log.level", "error"}}}).value();
  const auto soon = [] { return Deadline::in(std::chrono::seconds(20)); };
  const auto peer = other.open(engine.name(), soon()).value();
  auto mailbox = engine.mailbox("m").value();
  EXPECT_EQ(mailbox.on_message(nullptr).code(), Code::kInvalidArgument);
  int first = 0, second = 0;
  auto subscription = mailbox.on_message([&](const Message&) { ++first; }).value();
  EXPECT_EQ(mailbox.on_message([](const Message&) {}).code(), Code::kBusy);
  ASSERT_TRUE(other.notify(peer, {"m", "x"}, soon()).ok());
  subscription.end();
  // The moved-from and the assigned-over one end now, and nothing but themselves.
  subscription = mailbox.on_message([&](const Message&) { ++second; }).value();
  subscription = std::move(subscription);
  ASSERT_TRUE(other.notify(peer, {"m", "x"}, soon()).ok());
  subscription.end();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

TEST(Mailbox, AHandlerMayEndItselfAndALaterOneGetsTheRest) {
  Mailboxes boxes({});
  const auto box = boxes.get("m");
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(boxes.deliver("m", note(1)).ok());
  int first = 0;
  std::uint64_t token = 1;  // the first that is given out
  EXPECT_EQ(box->set_handler([&](const Message&) {
                 ++first;
                 box->clear_handler(token);
               })
                .value(),
            token);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(contents(*box).size(), 2u);
}

TEST(Mailbox, ALossIsToldOnceBehindWhatItsPeerSent) {
  Mailboxes boxes({});
  const auto box = boxes.get("m");
  boxes.broadcast(loss(1));
  ASSERT_TRUE(boxes.deliver("m", note(1)).ok());
  boxes.broadcast(loss(2));
  boxes.broadcast(loss(1));
  boxes.broadcast(loss(1));
  EXPECT_EQ(contents(*box), (Strings{"n1", "l2", "l1"}));
  boxes.broadcast(loss(1));
  EXPECT_EQ(contents(*box), (Strings{"l1"})) << "the next one, since the last was read";
}

TEST(Mailbox, ThoseNobodyAskedForHearOfPeersThatWroteToThem) {
  Mailboxes boxes({});
  ASSERT_TRUE(boxes.deliver("m", note(7)).ok());
  for (std::uint64_t instance = 0; instance < 1000; ++instance)
    boxes.broadcast(loss(instance));
  EXPECT_EQ(contents(*boxes.get("m")), (Strings{"n7", "l7"}));
}

TEST(Mailbox, LossesThatNobodyReadsDoNotPileUp) {
  Mailboxes boxes({});
  const auto box = boxes.get("m");
  ASSERT_TRUE(boxes.deliver("m", note(7)).ok());
  for (std::uint64_t instance = 1; instance <= 20'000; ++instance)
    boxes.broadcast(loss(instance));
  const auto all = contents(*box);
  ASSERT_EQ(all.size(), 4097u);
  EXPECT_EQ(all.front(), "n7") << "messages are never dropped";
  EXPECT_EQ(all.back(), "l20000");
}

TEST(Mailbox, BytesAreBounded) {
  Mailboxes boxes({.messages = 1000, .bytes = 64 * 1024});
  const auto box = boxes.get("m");
  const std::string payload(10 * 1024, 'x');
  int taken = 0;
  while (boxes.deliver("m", note(1, payload)).ok())
    ++taken;
  EXPECT_EQ(taken, 6);
  const auto refused = boxes.deliver("m", note(1, payload));
  EXPECT_EQ(refused.code(), Code::kWouldBlock);
  EXPECT_NE(refused.error().message.find("control.mailbox_bytes"), std::string::npos);
  ASSERT_TRUE(box->try_receive());
  EXPECT_TRUE(boxes.deliver("m", note(1, payload)).ok()) << "room again";
}

TEST(Mailbox, AllThatNobodyAskedForShareTheBytesOfOne) {
  Mailboxes boxes({.messages = 1000, .bytes = 64 * 1024});
  const auto fill = [&] {
    int taken = 0;
    for (int i = 0; i < 100; ++i)
      taken += boxes.deliver("m" + std::to_string(i), note(1, std::string(10 * 1024, 'x'))).ok();
    return taken;
  };
  EXPECT_EQ(fill(), 6);
  const auto asked = boxes.get("m0");  // has bounds of its own from now on, and so have the others
  EXPECT_EQ(fill(), 2) << "m0, and one of those that share";
  EXPECT_EQ(contents(*asked).size(), 2u);
}

TEST(Mailbox, WatchersAreToldAsLongAsTheyLive) {
  Mailboxes boxes({});
  Strings told;
  auto watcher = boxes.watch();
  ASSERT_TRUE(watcher
                  ->set_handler([&](const Message& message) {
                    told.push_back((message.kind == Kind::kLinkLost ? "link" : "l") +
                                   std::to_string(message.peer_instance));
                  })
                  .ok());
  boxes.broadcast(loss(3));
  boxes.tell_watchers({.kind = Kind::kLinkLost, .peer = "a", .peer_instance = 4, .payload = ""});
  watcher.reset();
  boxes.broadcast(loss(5));
  EXPECT_EQ(told, (Strings{"l3", "link4"}));
}

}  // namespace
}  // namespace crossdock::transfer
