// The target's end of a data lane against hand-made bytes: hostile, cut off, slow, reset, expired.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <linux/sockios.h>
#include <semaphore>
#include <sys/ioctl.h>

#include "support/fragile.hpp"
#include "transport/tcp/lane_in.hpp"
#include "unit/transport/tcp_support.hpp"

namespace crossdock::transport::tcp::test {
namespace {

using Bytes = std::vector<std::byte>;

// Keeps a worker inside a turn: what a stopped process looks like to its peer.
class Blocker final : public Pollable {
 public:
  Turn on_ready() noexcept override {
    if (first_.exchange(false)) {
      inside_.release();
      leave_.acquire();
    }
    return Turn::kIdle;
  }
  void wait_inside() { inside_.acquire(); }
  void leave() { leave_.release(); }

 private:
  std::atomic<bool> first_{true};
  std::binary_semaphore inside_{0};
  std::binary_semaphore leave_{0};
};

class TcpTarget : public ::testing::Test {
 protected:
  TcpTarget() : memory_(1 << 20) {
    const mem::NewRegion region{memory_.data(), memory_.size(), {}};
    record_ = regions_.add({&region, 1}, {}).value().front();
    worker_ = Worker::start(0).value();
  }
  ~TcpTarget() override {
    if (lane_) lane_->sever();
  }
  // A new lane; the other end is `fd_`.
  void open() { open(tcp_pair()); }
  void open(SocketPair pair) {
    fd_ = std::move(pair.initiator);
    LaneInInit init;
    init.lane = {std::move(pair.target), "initiator", 1, 0};
    init.options = options_;
    init.worker = worker_.get();
    init.regions = &regions_;
    lane_ = LaneIn::create(std::move(init)).value();
  }
  Bytes write_head(std::uint64_t id, std::span<const wire::Descriptor> ranges,
                   std::uint32_t expiry_ms = 0) {
    Bytes out(wire::kMaxDataHeadBytes);
    out.resize(
        wire::encode_write({.request_id = id, .expiry_ms = expiry_ms, .descriptors = ranges}, out)
            .value());
    return out;
  }
  wire::Descriptor at(std::size_t offset, std::uint32_t length) {
    return {address_of(memory_.data() + offset), length};
  }
  void send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(n));
        continue;
      }
      pollfd p{.fd = fd_.get(), .events = POLLOUT, .revents = 0};
      ASSERT_EQ(::poll(&p, 1, 10000), 1);
      ASSERT_FALSE(p.revents & (POLLERR | POLLHUP)) << "the target hung up";
    }
  }
  // Exactly `n` bytes, or fewer when the target ended the lane.
  Bytes receive(std::size_t n) {
    Bytes out;
    const Deadline deadline = in_seconds(10);
    while (out.size() < n && !deadline.passed()) {
      std::array<std::byte, 4096> part;
      const ssize_t got = ::recv(fd_.get(), part.data(), std::min(part.size(), n - out.size()), 0);
      if (got > 0) {
        out.insert(out.end(), part.begin(), part.begin() + got);
      } else if (got == 0 || errno != EAGAIN) {
        break;
      } else {
        pollfd p{.fd = fd_.get(), .events = POLLIN, .revents = 0};
        ::poll(&p, 1, deadline.remaining_ms());
      }
    }
    return out;
  }
  struct Ack {
    wire::DataHeader header;
    std::string message;
  };
  Ack receive_ack() {
    const Bytes head = receive(wire::kDataHeaderBytes);
    const auto header = wire::decode_data_header(head);
    EXPECT_TRUE(header.ok()) << header.error().message;
    if (!header.ok()) return {};
    const Bytes body = receive(header->body_bytes());
    const auto message = wire::decode_ack_message(*header, body);
    EXPECT_TRUE(message.ok()) << message.error().message;
    return {*header, std::string(message.ok() ? message.value() : std::string_view())};
  }
  void reset_from_initiator() { abort_connection(fd_); }
  bool lane_ends() {
    return eventually([&] { return lane_->over() && record_->leases.load() == 0; });
  }
  bool untouched() const {
    return std::all_of(memory_.begin(), memory_.end(),
                       [](std::byte b) { return b == std::byte{0}; });
  }

  TcpOptions options_;
  std::vector<std::byte> memory_;
  mem::RegionTable regions_;
  std::shared_ptr<mem::RegionRecord> record_;
  std::unique_ptr<Worker> worker_;
  std::shared_ptr<LaneIn> lane_;
  base::UniqueFd fd_;
};

TEST_F(TcpTarget, FramesCutOffAtEveryByteEndTheLaneAndNothingElse) {
  const std::array ranges = {at(100, 17), at(300, 5)};
  Bytes frame = write_head(0, ranges);
  const std::size_t head = frame.size();
  frame.resize(head + 22, std::byte{0xAB});
  for (std::size_t cut = 0; cut < frame.size(); ++cut) {
    std::fill(memory_.begin(), memory_.end(), std::byte{0});
    open();
    send(std::span(frame).first(cut));
    fd_.reset();
    ASSERT_TRUE(lane_ends()) << "cut at " << cut;
    ASSERT_TRUE(cut > head || untouched()) << "cut at " << cut;
    for (const std::size_t i : {99u, 117u, 299u, 305u})
      ASSERT_EQ(memory_[i], std::byte{0}) << "cut at " << cut;
  }
}

TEST_F(TcpTarget, AFlippedBitAnywhereInTheHeadEndsTheLaneWithNothingWritten) {
  const std::array ranges = {at(100, 17), at(300, 5)};
  const Bytes head = write_head(0, ranges);
  for (std::size_t i = 0; i < head.size(); ++i) {
    Bytes frame = head;
    frame[i] ^= static_cast<std::byte>(1u << (i % 8));
    frame.resize(head.size() + 22, std::byte{0xAB});
    open();
    send(frame);
    ASSERT_TRUE(lane_ends()) << "byte " << i;
    ASSERT_TRUE(untouched()) << "byte " << i;
  }
}

TEST_F(TcpTarget, FramesThatOnlyATargetSendsEndTheLane) {
  Bytes ack(wire::kMinDataHeadBytes);
  ASSERT_TRUE(wire::encode_ack({.request_id = 0, .bytes_applied = 1}, ack).ok());
  open();
  send(ack);
  EXPECT_TRUE(lane_ends());
  Bytes data(wire::kMinDataHeadBytes);
  ASSERT_TRUE(wire::encode_read_data({.request_id = 0, .payload_bytes = 8}, data).ok());
  open();
  send(data);
  EXPECT_TRUE(lane_ends());
}

TEST_F(TcpTarget, AnswersComeInOrderGoodAndBadMixed) {
  open();
  Bytes stream;
  constexpr std::uint64_t kFrames = 300;
  for (std::uint64_t id = 0; id < kFrames; ++id) {
    const bool bad = id % 3 == 1;
    const std::array range = {bad ? wire::Descriptor{4096, 64} : at(id * 64, 64)};
    const Bytes head = write_head(id, range);
    stream.insert(stream.end(), head.begin(), head.end());
    stream.insert(stream.end(), 64, static_cast<std::byte>(id % 251 + 1));
  }
  send(stream);
  for (std::uint64_t id = 0; id < kFrames; ++id) {
    const Ack ack = receive_ack();
    ASSERT_EQ(ack.header.type, wire::DataType::kAck);
    ASSERT_EQ(ack.header.request_id, id);
    ASSERT_EQ(ack.header.status, id % 3 == 1 ? Code::kInvalidArgument : Code::kOk);
    ASSERT_EQ(ack.header.payload_bytes, id % 3 == 1 ? 0u : 64u);
    ASSERT_EQ(ack.message.empty(), id % 3 != 1);
    const std::byte expected = id % 3 == 1 ? std::byte{0} : static_cast<std::byte>(id % 251 + 1);
    ASSERT_EQ(memory_[id * 64], expected);
    ASSERT_EQ(memory_[id * 64 + 63], expected);
  }
  EXPECT_EQ(record_->leases.load(), 0u);
}

TEST_F(TcpTarget, DrainsALargeRefusedPayload) {
  open();
  const std::array bad = {at(0, 1 << 19), wire::Descriptor{64, 8u << 20}};
  send(write_head(0, bad));
  send(Bytes((1 << 19) + (8u << 20), std::byte{0x55}));
  EXPECT_EQ(receive_ack().header.status, Code::kInvalidArgument);
  EXPECT_TRUE(untouched());
  const std::array good = {at(0, 4)};
  send(write_head(1, good));
  send(Bytes(4, std::byte{0x66}));
  EXPECT_EQ(receive_ack().header.status, Code::kOk);
  EXPECT_EQ(memory_[3], std::byte{0x66});
}

TEST_F(TcpTarget, TakesTheMostDescriptorsThatAFrameMayHave) {
  open();
  std::vector<wire::Descriptor> ranges;
  for (std::size_t i = 0; i < wire::kMaxDescriptors; ++i)
    ranges.push_back(at(i * 200, 100));
  send(write_head(0, ranges));
  Bytes payload(ranges.size() * 100);
  fill_pattern(payload, 4);
  send(payload);
  EXPECT_EQ(receive_ack().header.status, Code::kOk);
  for (std::size_t i = 0; i < ranges.size(); ++i)
    ASSERT_EQ(std::memcmp(memory_.data() + i * 200, payload.data() + i * 100, 100), 0) << i;
}

TEST_F(TcpTarget, ByteByByteIsAsGoodAsAtOnce) {
  open();
  const std::array ranges = {at(10, 30), at(900, 3)};
  Bytes frame = write_head(5, ranges);
  frame.resize(frame.size() + 33, std::byte{0x77});
  for (const std::byte b : frame)
    send({&b, 1});
  EXPECT_EQ(receive_ack().header.request_id, 5u);
  EXPECT_EQ(memory_[39], std::byte{0x77});
  EXPECT_EQ(memory_[902], std::byte{0x77});
  EXPECT_EQ(memory_[40], std::byte{0});
}

// The initiator gave up while the target was stopped with everything already in its socket.
TEST_F(TcpTarget, AppliesNothingOfAConnectionThatWasReset) {
  open();
  SocketPair other = tcp_pair();
  const auto blocker = std::make_shared<Blocker>();
  ASSERT_TRUE(worker_->add(blocker, other.target.get()).ok());
  blocker->wait_inside();
  const std::array range = {at(0, 64 << 10)};
  send(write_head(0, range));
  send(Bytes(64 << 10, std::byte{0x99}));
  reset_from_initiator();
  blocker->leave();
  EXPECT_TRUE(lane_ends());
  EXPECT_TRUE(untouched());
}

// The same with the head already taken and a part of the payload applied.
TEST_F(TcpTarget, StopsApplyingInTheMiddleOfAFrame) {
  open();
  const std::array range = {at(0, 64 << 10)};
  Bytes begun = write_head(0, range);
  begun.resize(begun.size() + 1000, std::byte{0x99});
  send(begun);
  ASSERT_TRUE(eventually([&] { return record_->leases.load() == 1; }));
  SocketPair other = tcp_pair();
  const auto blocker = std::make_shared<Blocker>();
  ASSERT_TRUE(worker_->add(blocker, other.target.get()).ok());
  blocker->wait_inside();
  send(Bytes((64 << 10) - 1000, std::byte{0x99}));
  reset_from_initiator();
  blocker->leave();
  EXPECT_TRUE(lane_ends());
  EXPECT_EQ(memory_[1000], std::byte{0});
}

TEST_F(TcpTarget, ExpiredFramesAreDrainedAndRefused) {
  open();
  const std::array range = {at(0, 1000)};
  send(write_head(0, range, 20));
  ASSERT_TRUE(eventually([&] { return record_->leases.load() == 1; }));
  ::poll(nullptr, 0, 30);  // the frame's life, not a synchronisation
  send(Bytes(1000, std::byte{0x11}));
  const Ack ack = receive_ack();
  EXPECT_EQ(ack.header.status, Code::kDeadline);
  EXPECT_TRUE(untouched());
  EXPECT_EQ(record_->leases.load(), 0u);
}

// A reader that asks and never reads holds its lease only until it is severed.
TEST_F(TcpTarget, SeverEndsAReadThatNobodyTakes) {
  open();
  std::vector<wire::Descriptor> ranges(64, at(0, 128 << 10));
  Bytes frame(wire::kMaxDataHeadBytes);
  for (std::uint64_t id = 0; id < 8; ++id) {
    const auto size = wire::encode_read({.request_id = id, .descriptors = ranges}, frame);
    ASSERT_TRUE(size.ok());
    send(std::span(frame).first(*size));
  }
  ASSERT_TRUE(eventually([&] { return record_->leases.load() == 1; }));
  lane_->sever();
  EXPECT_EQ(record_->leases.load(), 0u);
  EXPECT_TRUE(lane_->over());
}

// Small answers fill a socket: the one that finds it full has not begun, and by the time that there
// is room nobody wants it. A local socket takes a small answer whole or not at all, where TCP's may
// take a part of it. Where the machine was slow the frame has come after the wait: another round.
TEST_F(TcpTarget, AReadThatExpiresBeforeItsFirstByteIsRefused) {
  constexpr std::uint64_t kReads = 64;  // several times what the target's socket holds
  constexpr std::uint64_t kRounds = 20;
  options_.socket_buffer = 4096;
  SocketPair pair = local_pair();
  const int target = pair.target.get();
  open(std::move(pair));
  const auto is_full = [&] {
    int queued = 0, room = 0;
    socklen_t size = sizeof room;
    return ::ioctl(target, SIOCOUTQ, &queued) == 0 &&
           ::getsockopt(target, SOL_SOCKET, SO_SNDBUF, &room, &size) == 0 && queued >= room;
  };
  const std::array range = {at(0, 8)};
  std::uint64_t refused = 0;
  for (std::uint64_t round = 0; round < kRounds && refused == 0; ++round) {
    Bytes frame(wire::kMaxDataHeadBytes);
    const std::uint64_t first = round * kReads;
    for (std::uint64_t id = first; id < first + kReads; ++id) {
      const auto size =
          wire::encode_read({.request_id = id, .expiry_ms = 5, .descriptors = range}, frame);
      send(std::span(frame).first(size.value()));
    }
    ASSERT_TRUE(eventually(is_full));
    ::poll(nullptr, 0, 50);  // the frames' life, not a synchronisation
    for (std::uint64_t id = first; id < first + kReads; ++id) {
      const auto header = wire::decode_data_header(receive(wire::kDataHeaderBytes)).value();
      ASSERT_EQ(header.request_id, id);
      receive(header.body_bytes());
      if (header.type == wire::DataType::kReadData) {
        ASSERT_EQ(receive(8).size(), 8u);
        ASSERT_EQ(receive_ack().header.payload_bytes, 8u);
        continue;
      }
      ASSERT_EQ(header.status, Code::kDeadline);
      ++refused;
    }
  }
  EXPECT_GE(refused, 1u);
  EXPECT_TRUE(eventually([&] { return record_->leases.load() == 0; }));
}

// The first half of a READ has left when the second turns out to be gone.
TEST_F(TcpTarget, AReadThatLosesItsMemoryIsCompletedAndTakenBack) {
  constexpr auto kBytes = static_cast<std::uint32_t>(crossdock::testing::Fragile::kBytes);
  const crossdock::testing::Fragile fragile;
  const mem::NewRegion region{fragile.data(), kBytes, {}};
  const auto record = regions_.add({&region, 1}, {}).value().front();
  fragile.lose_from(kBytes / 2);
  open();
  Bytes frame(wire::kMaxDataHeadBytes);
  const auto read = [&](std::uint64_t id, std::uint32_t length) {
    const std::array range = {wire::Descriptor{address_of(fragile.data()), length}};
    send(std::span(frame).first(
        wire::encode_read({.request_id = id, .descriptors = range}, frame).value()));
  };
  read(0, kBytes);
  const auto header = wire::decode_data_header(receive(wire::kDataHeaderBytes)).value();
  ASSERT_EQ(header.type, wire::DataType::kReadData);
  receive(header.body_bytes());
  const Bytes data = receive(kBytes);
  ASSERT_EQ(data.size(), kBytes);
  // The kernel takes whole chunks, so a little of what was still there did not leave.
  EXPECT_TRUE(std::all_of(data.begin(), data.begin() + kBytes / 4,
                          [](std::byte b) { return b == std::byte{1}; }));
  Ack verdict = receive_ack();
  EXPECT_EQ(verdict.header.request_id, 0u);
  EXPECT_EQ(verdict.header.status, Code::kInvalidArgument);
  EXPECT_EQ(verdict.header.payload_bytes, 0u);
  EXPECT_NE(verdict.message.find("not mapped"), std::string::npos);
  read(1, kBytes);  // now it is looked at first
  EXPECT_EQ(receive_ack().header.status, Code::kInvalidArgument);
  read(2, kBytes / 2);
  receive(wire::kMinDataHeadBytes + kBytes / 2);
  verdict = receive_ack();
  EXPECT_EQ(verdict.header.status, Code::kOk);
  EXPECT_EQ(verdict.header.payload_bytes, kBytes / 2);
  EXPECT_TRUE(eventually([&] { return record->leases.load() == 0; }));
}

TEST_F(TcpTarget, AReleasedRegionIsRefused) {
  open();
  regions_.begin_release(*record_);
  const std::array range = {at(0, 8)};
  send(write_head(0, range));
  send(Bytes(8, std::byte{0x22}));
  EXPECT_EQ(receive_ack().header.status, Code::kClosed);
  EXPECT_TRUE(untouched());
}

}  // namespace
}  // namespace crossdock::transport::tcp::test
