// What a request leaves behind when it is over: its outcome, not its pages and not its peers.
// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <gtest/gtest.h>
#include <malloc.h>
#include <string>
#include <vector>

#include "kv/message.hpp"
#include "support/kv_cluster.hpp"
#include "support/relay.hpp"
#include "transport/transport.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::KvCluster;
using support::KvClusterOptions;

Deadline soon() {
  return Deadline::in(60s);
}

constexpr std::uint32_t kPages = 8'192;
constexpr std::size_t kRegions = 1'000;

KvClusterOptions many_small_pages() {
  KvClusterOptions options;
  options.shape = {"small", 1, 1, 8, 2, false};
  options.prefill_layout = options.decode_layout = {.num_pages = kPages, .page_tokens = 1};
  return options;
}

void hand_over(KvCluster& cluster, RequestId request) {
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(request, kPages, soon());
  ASSERT_TRUE(prefill.sender.push(request, 0).ok());
  ASSERT_TRUE(prefill.sender.finish(request).ok());
  ASSERT_TRUE(decode.receiver.wait(request, soon()).ok());
  ASSERT_TRUE(prefill.sender.wait(request, soon()).ok());
  ASSERT_TRUE(prefill.pool.release(request).ok());
  ASSERT_TRUE(decode.pool.release(request).ok());
}

std::size_t allocated_bytes() {
  const auto use = ::mallinfo2();
  return use.uordblks + use.hblkhd;
}

TEST(KvHistory, KeepsNoPagesOfWhatIsOver) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer's allocator does not tell how much it handed out";
#endif
  constexpr RequestId kRequests = 200;
  KvCluster cluster(many_small_pages());
  for (RequestId id = 1; id <= 10; ++id)
    ASSERT_NO_FATAL_FAILURE(hand_over(cluster, id));
  const std::size_t before = allocated_bytes();
  for (RequestId id = 11; id <= 10 + kRequests; ++id)
    ASSERT_NO_FATAL_FAILURE(hand_over(cluster, id));
  // One table of one side would be 6 MiB.
  EXPECT_LT(allocated_bytes(), before + kRequests * kPages * sizeof(PageId) / 2);
}

// A receiver with much memory takes a request and is cut off, so that it does not take that back:
// who holds the peer holds a note of each region.
void hand_over_to_one_that_is_cut_off(KvCluster& cluster, RequestId request) {
  auto& prefill = *cluster.prefill[0];
  auto engine = transfer::Engine::create({.name = "decode-" + std::to_string(request),
                                          .config = {{"log.level", "error"}}})
                    .value();
  auto answers = engine.mailbox("kv").value();
  const auto pool = PagePool::create(engine, prefill.pool.layout()).value();
  std::vector<std::byte> memory(kRegions * 16);
  std::vector<transfer::Region> regions;
  for (std::size_t i = 0; i < kRegions; ++i)
    regions.push_back(engine.register_memory(memory.data() + i * 16, 16).value());
  const testing::Relay relay(engine);  // by which the sender reaches it
  message::Ticket ticket;
  ticket.request = request;
  ticket.ticket = 1;
  ticket.shape = pool.layout().shape();
  ticket.layout = pool.layout().options();
  ticket.base = reinterpret_cast<std::uint64_t>(pool.base());
  ticket.expires_ms = 60'000;
  ticket.address = relay.name();
  ticket.total_pages = 1;
  ticket.pages = {0};
  prefill.pool.admit({.request = request, .num_pages = 1}).value();
  prefill.sender.push(request, 0).value();
  prefill.sender.finish(request).value();
  const auto peer = engine.open(prefill.engine.name(), soon()).value();
  engine.notify(peer, {"kv.sender", message::encode(ticket)}, soon()).value();
  answers.receive(soon()).value();  // Ready
  engine.notify(peer, {"kv.sender", message::encode(message::Go{request, 1, 0, 2})}, soon())
      .value();
  prefill.sender.wait(request, soon()).value();
  prefill.pool.release(request).value();
}

TEST(KvHistory, KeepsNoPeersOfWhatIsOver) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer's allocator does not tell how much it handed out";
#endif
  constexpr RequestId kReceivers = 20;
  KvCluster cluster(many_small_pages());
  for (RequestId id = 1; id <= 5; ++id)
    hand_over_to_one_that_is_cut_off(cluster, id);
  const std::size_t before = allocated_bytes();
  for (RequestId id = 6; id <= 5 + kReceivers; ++id)
    hand_over_to_one_that_is_cut_off(cluster, id);
  EXPECT_LT(allocated_bytes(),
            before + kReceivers * kRegions * sizeof(transport::RemoteRegion) / 4);
}

}  // namespace
}  // namespace crossdock::kv
