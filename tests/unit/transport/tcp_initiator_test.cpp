// The initiator's end of a data lane against a target played by hand: lies, silence, slowness,
// endings in every stage.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <functional>

#include "transport/tcp/lane_out.hpp"
#include "unit/transport/tcp_support.hpp"

namespace crossdock::transport::tcp::test {
namespace {

using Bytes = std::vector<std::byte>;

class TcpInitiator : public ::testing::Test {
 protected:
  TcpInitiator() : memory_(64 << 20), worker_(Worker::start(0).value()) {
    fill_pattern(std::span(memory_).first(1 << 20), 2);
  }
  ~TcpInitiator() override {
    if (lane_) lane_->close();
    worker_.reset();
  }
  void open(const TcpOptions& options = {}) {
    SocketPair pair = tcp_pair();
    fd_ = std::move(pair.target);
    LaneOutInit init;
    init.fd = std::move(pair.initiator);
    init.peer = "north";
    init.options = options;
    init.worker = worker_.get();
    lane_ = LaneOut::create(std::move(init)).value();
  }
  Shard& shard(OwnedShard& owned, Op op, std::size_t bytes, std::size_t slice = 64 << 10) {
    for (std::size_t at = 0; at < bytes; at += slice)
      owned.slices.push_back({memory_.data() + at, 0x10000 + at, nullptr,
                              static_cast<std::uint32_t>(std::min(slice, bytes - at)), 0});
    return owned.make(op, sink_);
  }
  Bytes receive(std::size_t n) {
    Bytes out(n);
    std::size_t have = 0;
    const Deadline deadline = in_seconds(10);
    while (have < n && !deadline.passed()) {
      const ssize_t got = ::recv(fd_.get(), out.data() + have, n - have, 0);
      if (got > 0) {
        have += static_cast<std::size_t>(got);
      } else if (got == 0 || errno != EAGAIN) {
        break;
      } else {
        pollfd p{.fd = fd_.get(), .events = POLLIN, .revents = 0};
        ::poll(&p, 1, deadline.remaining_ms());
      }
    }
    EXPECT_EQ(have, n);
    out.resize(have);
    return out;
  }
  struct Request {
    wire::DataHeader header;
    std::vector<wire::Descriptor> ranges;
    Bytes payload;
  };
  Request receive_request() {
    Request r;
    r.header = wire::decode_data_header(receive(wire::kDataHeaderBytes)).value();
    r.ranges.resize(r.header.count);
    EXPECT_TRUE(wire::decode_descriptors(r.header, receive(r.header.body_bytes()), r.ranges).ok());
    r.payload = receive(r.header.trailing_bytes());
    return r;
  }
  void send(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static Bytes ack(std::uint64_t id, std::uint32_t bytes, Code status = Code::kOk,
                   std::string_view message = {}) {
    Bytes out(wire::kMaxAckBytes);
    out.resize(wire::encode_ack({id, status, bytes, message}, out).value());
    return out;
  }
  static Bytes read_data(std::uint64_t id, std::uint32_t bytes) {
    Bytes out(wire::kMinDataHeadBytes);
    EXPECT_TRUE(wire::encode_read_data({.request_id = id, .payload_bytes = bytes}, out).ok());
    out.resize(out.size() + bytes, std::byte{0x42});
    return out;
  }
  // The whole answer to a READ.
  static Bytes data_and_verdict(std::uint64_t id, std::uint32_t bytes) {
    Bytes out = read_data(id, bytes);
    const Bytes verdict = ack(id, bytes);
    out.insert(out.end(), verdict.begin(), verdict.end());
    return out;
  }
  // One request of 100 bytes is posted and taken; the answer must cost the lane.
  void expect_lost_by(Op op, const std::function<void()>& answer) {
    open();
    OwnedShard owned;
    const std::size_t before = sink_.count();
    ASSERT_TRUE(lane_->post(shard(owned, op, 100)).ok());
    receive_request();
    answer();
    ASSERT_TRUE(sink_.wait(before + 1));
    ASSERT_TRUE(sink_.error(before));
    EXPECT_EQ(sink_.error(before)->code, Code::kPeerLost);
    EXPECT_EQ(sink_.error(before)->scope, Scope::kPeer);
    EXPECT_NE(sink_.error(before)->message.find("north"), std::string::npos);
    OwnedShard later;
    EXPECT_EQ(lane_->post(shard(later, op, 1)).code(), Code::kPeerLost);
  }

  std::vector<std::byte> memory_;
  WaitingSink sink_;
  std::unique_ptr<Worker> worker_;
  std::shared_ptr<LaneOut> lane_;
  base::UniqueFd fd_;
};

TEST_F(TcpInitiator, IsDoneOnlyWhenTheTargetSaysSo) {
  open();
  OwnedShard owned;
  ASSERT_TRUE(lane_->post(shard(owned, Op::kWrite, 1000)).ok());
  const Request r = receive_request();
  EXPECT_EQ(r.header.type, wire::DataType::kWrite);
  EXPECT_TRUE(std::equal(r.payload.begin(), r.payload.end(), memory_.begin()));
  EXPECT_EQ(sink_.count(), 0u);
  EXPECT_EQ(lane_->queued_bytes(), 1000u);
  const Bytes answer = ack(r.header.request_id, 1000);
  for (const std::byte b : answer)  // in pieces: nothing depends on packets
    send({&b, 1});
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_FALSE(sink_.error(0));
  EXPECT_EQ(sink_.progress(), 1000u);
  EXPECT_EQ(owned.shard.slices_done, 1u);
}

TEST_F(TcpInitiator, EveryLieCostsTheLane) {
  expect_lost_by(Op::kWrite, [&] { send(ack(1, 100)); });        // not asked
  expect_lost_by(Op::kWrite, [&] { send(ack(0, 99)); });         // not all
  expect_lost_by(Op::kWrite, [&] { send(read_data(0, 100)); });  // another kind
  expect_lost_by(Op::kRead, [&] { send(ack(0, 100)); });         // no data
  expect_lost_by(Op::kRead, [&] { send(read_data(0, 101)); });   // too much
  expect_lost_by(Op::kRead, [&] { send(read_data(7, 100)); });   // not asked
  expect_lost_by(Op::kRead, [&] {                                // twice
    Bytes twice = read_data(0, 100);
    twice.insert(twice.end(), twice.begin(), twice.end());
    send(twice);
  });
  expect_lost_by(Op::kRead, [&] {  // a verdict on something else
    Bytes answer = read_data(0, 100);
    const Bytes verdict = ack(0, 99);
    answer.insert(answer.end(), verdict.begin(), verdict.end());
    send(answer);
  });
  expect_lost_by(Op::kRead, [&] {  // no verdict
    send(read_data(0, 100));
    fd_.reset();
  });
  expect_lost_by(Op::kWrite, [&] { send(Bytes(64, std::byte{0x20})); });  // noise
  expect_lost_by(Op::kWrite, [&] { fd_.reset(); });                       // goes away
  expect_lost_by(Op::kWrite, [&] { abort_connection(fd_); });
  expect_lost_by(Op::kRead, [&] {
    const Bytes whole = read_data(0, 100);
    send(std::span(whole).first(90));
    fd_.reset();
  });
  expect_lost_by(Op::kWrite, [&] {  // a request of a target
    Bytes frame(200);
    const std::array range = {wire::Descriptor{address_of(memory_.data()), 4}};
    frame.resize(wire::encode_read({.request_id = 0, .descriptors = range}, frame).value());
    send(frame);
  });
}

TEST_F(TcpInitiator, AnAnswerBeforeTheEndOfTheRequestIsALie) {
  open();
  OwnedShard owned;
  ASSERT_TRUE(lane_->post(shard(owned, Op::kWrite, 32 << 20)).ok());
  receive(wire::kDataHeaderBytes);  // the rest does not fit into the socket
  send(ack(0, 1 << 20));
  send(ack(1, 1 << 20));
  for (std::uint64_t id = 2; id < 16; ++id)
    if (::send(fd_.get(), ack(id, 1 << 20).data(), wire::kMinDataHeadBytes, MSG_NOSIGNAL) < 0)
      break;
  ASSERT_TRUE(sink_.wait(1));
  ASSERT_TRUE(sink_.error(0));
  EXPECT_EQ(sink_.error(0)->code, Code::kPeerLost);
}

TEST_F(TcpInitiator, ARefusalIsTheShardsErrorAndTheLaneGoesOn) {
  open();
  OwnedShard bad, good;
  ASSERT_TRUE(lane_->post(shard(bad, Op::kWrite, 100)).ok());
  receive_request();
  send(ack(0, 0, Code::kDenied, "region is read-only"));
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_EQ(sink_.error(0)->code, Code::kDenied);
  EXPECT_NE(sink_.error(0)->message.find("region is read-only"), std::string::npos);
  EXPECT_EQ(bad.shard.slices_done, 0u);
  ASSERT_TRUE(lane_->post(shard(good, Op::kRead, 100)).ok());
  receive_request();
  send(data_and_verdict(1, 100));
  ASSERT_TRUE(sink_.wait(2));
  EXPECT_FALSE(sink_.error(1));
  EXPECT_EQ(memory_[99], std::byte{0x42});
}

// The memory may have gone while it was sent: what came counts when the target says so afterwards.
TEST_F(TcpInitiator, TheDataOfAReadCountsWithItsVerdict) {
  open();
  OwnedShard spoiled, good;
  ASSERT_TRUE(lane_->post(shard(spoiled, Op::kRead, 100)).ok());
  ASSERT_TRUE(lane_->post(shard(good, Op::kRead, 200)).ok());
  receive_request();
  receive_request();
  send(read_data(0, 100));
  EXPECT_FALSE(sink_.wait(1, 1)) << "before the target said anything";
  EXPECT_EQ(sink_.progress(), 0u);
  send(ack(0, 0, Code::kInvalidArgument, "gone"));
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_EQ(sink_.error(0)->code, Code::kInvalidArgument);
  EXPECT_NE(sink_.error(0)->message.find("gone"), std::string::npos);
  for (const std::byte b : data_and_verdict(1, 200))  // in pieces: nothing depends on packets
    send({&b, 1});
  ASSERT_TRUE(sink_.wait(2));
  EXPECT_FALSE(sink_.error(1));
  EXPECT_EQ(sink_.progress(), 200u);
}

// A refused frame in the middle: later frames count, but the prefix ends there.
TEST_F(TcpInitiator, ReportsThePrefixThatIsInPlace) {
  TcpOptions options;
  options.frame_bytes = 64 << 10;
  open(options);
  OwnedShard owned;
  ASSERT_TRUE(lane_->post(shard(owned, Op::kWrite, 4 * (64 << 10))).ok());
  for (std::uint64_t id = 0; id < 4; ++id) {
    EXPECT_EQ(receive_request().header.request_id, id);
  }
  send(ack(0, 64 << 10));
  send(ack(1, 0, Code::kInvalidArgument, "no"));
  send(ack(2, 64 << 10));
  EXPECT_EQ(sink_.count(), 0u);  // one is in flight
  send(ack(3, 64 << 10));
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_EQ(sink_.error(0)->code, Code::kInvalidArgument);
  EXPECT_EQ(owned.shard.slices_done, 1u);
}

// A target that reads nothing: posting never waits, memory in flight is bounded, the queue too.
TEST_F(TcpInitiator, BackPressureInsteadOfWaiting) {
  TcpOptions options;
  options.window_bytes = 256 << 10;
  options.frame_bytes = 64 << 10;
  options.queue_shards = 100;
  open(options);
  std::vector<std::unique_ptr<OwnedShard>> posted;
  Code refused = Code::kOk;
  while (refused == Code::kOk && posted.size() < 500) {
    auto owned = std::make_unique<OwnedShard>();
    refused = lane_->post(shard(*owned, Op::kWrite, 64 << 10)).code();
    if (refused == Code::kOk) posted.push_back(std::move(owned));
  }
  EXPECT_EQ(refused, Code::kWouldBlock);
  EXPECT_GE(posted.size(), 100u);
  EXPECT_LE(posted.size(), 106u);  // and those in flight
  // Only the window comes without an answer.
  const std::size_t frame = wire::data_head_bytes(wire::kDescriptorBytes) + (64 << 10);
  receive(4 * frame);
  pollfd p{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&p, 1, 50), 0) << "more was sent than the window allows";
  send(ack(0, 64 << 10));
  ASSERT_TRUE(sink_.wait(1));
  receive_request();
  // The rest flows as it is answered.
  for (std::uint64_t id = 1; id < posted.size(); ++id) {
    send(ack(id, 64 << 10));
    if (id + 4 < posted.size()) receive_request();
  }
  ASSERT_TRUE(sink_.wait(posted.size()));
  for (std::size_t i = 0; i < posted.size(); ++i)
    EXPECT_FALSE(sink_.error(i));
}

TEST_F(TcpInitiator, CancelDropsWhatIsNotSentAndWaitsForWhatIs) {
  TcpOptions options;
  options.window_bytes = 128 << 10;
  options.frame_bytes = 64 << 10;
  open(options);
  OwnedShard flying, waiting;
  ASSERT_TRUE(lane_->post(shard(flying, Op::kWrite, 1 << 20)).ok());
  ASSERT_TRUE(lane_->post(shard(waiting, Op::kRead, 4096)).ok());
  waiting.stop = true;
  lane_->cancel();
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_EQ(sink_.shard(0), &waiting.shard);
  EXPECT_EQ(sink_.error(0)->code, Code::kCancelled);

  flying.stop = true;
  lane_->cancel();
  receive_request();
  receive_request();
  send(ack(0, 64 << 10));
  pollfd p{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&p, 1, 20), 0) << "a frame was sent after the cancel";
  EXPECT_EQ(sink_.count(), 1u) << "over while a frame is in flight";
  send(ack(1, 64 << 10));
  ASSERT_TRUE(sink_.wait(2));
  EXPECT_EQ(sink_.error(1)->code, Code::kCancelled);
  EXPECT_EQ(flying.shard.slices_done, 2u);
}

// A frame that has begun is completed: the stream stays in step for the next shard.
TEST_F(TcpInitiator, CancelInTheMiddleOfAFrameCompletesIt) {
  TcpOptions options;
  options.frame_bytes = 16 << 20;
  options.socket_buffer = 64 << 10;
  open(options);
  OwnedShard owned, next;
  ASSERT_TRUE(lane_->post(shard(owned, Op::kWrite, 32 << 20)).ok());
  const Bytes head = receive(wire::kDataHeaderBytes);
  owned.stop = true;
  lane_->cancel();
  EXPECT_EQ(sink_.count(), 0u);
  const wire::DataHeader header = wire::decode_data_header(head).value();
  receive(header.body_bytes() + header.trailing_bytes());
  send(ack(0, header.payload_bytes));
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_EQ(sink_.error(0)->code, Code::kCancelled);
  EXPECT_EQ(owned.shard.slices_done, (16u << 20) / (64u << 10));
  ASSERT_TRUE(lane_->post(shard(next, Op::kWrite, 10)).ok());
  EXPECT_EQ(receive_request().header.request_id, 1u);
  send(ack(1, 10));
  ASSERT_TRUE(sink_.wait(2));
  EXPECT_FALSE(sink_.error(1));
}

TEST_F(TcpInitiator, CancelOfAReadInFlightWaitsForItsData) {
  open();
  OwnedShard owned;
  ASSERT_TRUE(lane_->post(shard(owned, Op::kRead, 2 << 20)).ok());
  const std::uint32_t first = receive_request().header.payload_bytes;
  owned.stop = true;
  lane_->cancel();
  EXPECT_EQ(sink_.count(), 0u);
  // It may have been cut into frames before the stop: answer all of them.
  std::uint32_t answered = first;
  send(data_and_verdict(0, first));
  if (!sink_.wait(1, 1)) {
    const std::uint32_t second = receive_request().header.payload_bytes;
    send(data_and_verdict(1, second));
    answered += second;
    ASSERT_TRUE(sink_.wait(1));
  }
  EXPECT_EQ(sink_.progress(), answered);
}

// Gives the peer up in the middle of a frame: the peer sees a reset and the memory is free at once.
TEST_F(TcpInitiator, SeverResetsTheConnectionAndFinishesEverything) {
  open();
  std::array<OwnedShard, 3> owned;
  for (auto& o : owned)
    ASSERT_TRUE(lane_->post(shard(o, Op::kWrite, 32 << 20)).ok());
  receive(1000);
  lane_->sever(Error{.code = Code::kDeadline, .message = "north does not answer"});
  lane_->sever(Error{.code = Code::kInternal, .message = "the second reason"});
  ASSERT_TRUE(sink_.wait(3));
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(sink_.error(i));
    EXPECT_EQ(sink_.error(i)->code, Code::kDeadline);
    EXPECT_EQ(sink_.error(i)->message, "north does not answer");
  }
  EXPECT_EQ(lane_->queued_bytes(), 0u);
  OwnedShard late;
  EXPECT_EQ(lane_->post(shard(late, Op::kWrite, 1)).code(), Code::kDeadline);
  EXPECT_TRUE(connection_over(fd_.get()));
  int error = 0;
  socklen_t size = sizeof error;
  ASSERT_EQ(::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size), 0);
  EXPECT_EQ(error, ECONNRESET);
}

// post() from within a callback, as an engine does when a transfer ends.
TEST_F(TcpInitiator, ACallbackMayPost) {
  open();
  class Chain final : public ShardSink {
   public:
    std::function<void()> then;
    void shard_progress(Shard&, std::uint64_t) noexcept override {}
    void shard_finished(Shard&, const Error*) noexcept override { then(); }
  } chain;
  OwnedShard first, second;
  Result<> posted = make_error(Code::kInternal, "not called");
  chain.then = [&] { posted = lane_->post(shard(second, Op::kWrite, 64)); };
  first.slices.push_back({memory_.data(), 0x1000, nullptr, 64, 0});
  ASSERT_TRUE(lane_->post(first.make(Op::kWrite, chain)).ok());
  receive_request();
  send(ack(0, 64));
  receive_request();
  send(ack(1, 64));
  ASSERT_TRUE(sink_.wait(1));
  EXPECT_TRUE(posted.ok());
}

}  // namespace
}  // namespace crossdock::transport::tcp::test
