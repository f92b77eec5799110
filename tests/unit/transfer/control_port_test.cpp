// The control port among strangers: rubbish, silence, other versions, wrong keys.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <thread>

#include <crossdock/core/version.hpp>

#include "base/socket.hpp"
#include "support/engines.hpp"
#include "wire/frame.hpp"

namespace crossdock::testing {
namespace {

base::UniqueFd connect_to(const Engine& engine) {
  const auto address = base::parse_host_port(engine.address()).value();
  return std::move(base::connect_tcp(address, soon())).value();
}

// Everything the other end sends until it closes, or until `deadline`.
std::string read_all(int fd, Deadline deadline) {
  std::string all;
  std::byte chunk[4096];
  while (true) {
    const auto got = base::recv_some(fd, chunk, deadline);
    if (!got.ok() || *got == 0) return all;
    all.append(reinterpret_cast<const char*>(chunk), *got);
  }
}

// A connection and a transfer still work.
void expect_serves(Engine& target) {
  std::vector<std::byte> a(64), b(64);
  auto source = make_engine("tcp");
  auto local = source.register_memory(a.data(), 64).value();
  auto remote = target.register_memory(b.data(), 64).value();
  const auto begin = std::chrono::steady_clock::now();
  auto peer = source.open(target.name(), soon());
  ASSERT_TRUE(peer.ok()) << peer.error().describe();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 2s);
  const Request request{Op::kWrite, a.data(), address_of(remote), 64};
  EXPECT_TRUE(source.transfer(*peer, std::span(&request, 1), {.deadline = soon()}).ok());
  EXPECT_TRUE(source.close(soon()).ok());
  EXPECT_TRUE(remote.release(soon()).ok());
}

TEST(ControlPort, RubbishClosesItsConnectionAndNothingElse) {
  auto target = make_engine("tcp");
  for (const std::string& rubbish :
       std::vector{std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                   std::string("\x16\x03\x01\x02", 4) + std::string(600, 'x'),
                   std::string(1000, '\0'), std::string(100'000, '\xff')}) {
    const auto fd = connect_to(target);
    (void)base::send_all(fd.get(), wire::as_bytes(rubbish), soon());
    (void)read_all(fd.get(), Deadline::in(2s));
    pollfd state{fd.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&state, 1, 5000), 1) << "the engine hangs up";
  }
  expect_serves(target);
}

TEST(ControlPort, SilentAndSlowClientsDelayNobody) {
  auto target = make_engine("tcp", {.config = {{"control.handshake_timeout", "500ms"}}});
  std::vector<base::UniqueFd> silent;
  for (int i = 0; i < 50; ++i)
    silent.push_back(connect_to(target));
  std::atomic<bool> stop{false};
  const auto slow = connect_to(target);
  std::thread loris([&] {
    const auto hello = wire::encode_frame(wire::Hello{.engine_name = "slow"}).value();
    for (std::size_t i = 0; i < hello.size() && !stop.load(); ++i) {
      if (!base::send_all(slow.get(), {&hello[i], 1}, soon()).ok()) break;
      std::this_thread::sleep_for(20ms);
    }
  });
  expect_serves(target);
  // Their time ends: the engine closes them, the slow one in the middle of its sentence too.
  for (const auto& fd : silent) {
    pollfd state{fd.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&state, 1, 10'000), 1);
  }
  pollfd state{slow.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&state, 1, 10'000), 1);
  stop.store(true);
  loris.join();
  expect_serves(target);
}

TEST(ControlPort, MoreHandshakesThanAllowedDisplaceTheOldest) {
  auto target = make_engine(
      "tcp", {.config = {{"control.max_handshakes", "4"}, {"control.handshake_timeout", "1min"}}});
  std::vector<base::UniqueFd> crowd;
  for (int i = 0; i < 40; ++i)
    crowd.push_back(connect_to(target));
  expect_serves(target);
}

// A frame as an engine of another version would send it.
std::vector<std::byte> frame_of_version(std::uint16_t version) {
  auto frame = wire::encode_frame(wire::Hello{.engine_name = "other"}).value();
  wire::store_le<std::uint16_t>(frame.data() + 4, version);
  return frame;
}

TEST(ControlPort, AClientOfAnotherVersionIsToldBoth) {
  auto target = make_engine("tcp");
  const auto fd = connect_to(target);
  ASSERT_TRUE(base::send_all(fd.get(), frame_of_version(77), soon()).ok());
  const std::string answer = read_all(fd.get(), Deadline::in(5s));
  wire::FrameReader reader;
  reader.feed(wire::as_bytes(answer));
  const auto frame = reader.next().value().value();
  const auto refused = wire::decode<wire::Refused>(frame.payload).value();
  EXPECT_EQ(refused.code, Code::kIncompatible);
  EXPECT_NE(refused.message.find("77"), std::string::npos) << refused.message;
  EXPECT_NE(refused.message.find(std::to_string(kWireVersion)), std::string::npos);
}

// A server that answers the first bytes it gets with `answer` and hangs up, or stays silent.
struct FakeServer {
  explicit FakeServer(std::vector<std::byte> answer, bool silent = false)
      : listener(base::listen_tcp(base::HostPort{"127.0.0.1", 0}, soon()).value()),
        thread([this, answer = std::move(answer), silent] {
          (void)base::wait_ready(listener.fd.get(), POLLIN, soon());
          auto fd = base::accept_tcp(listener.fd.get());
          if (!fd.ok() || !fd->has_value()) return;
          std::byte chunk[4096];
          (void)base::recv_some((*fd)->get(), chunk, soon());
          if (!silent) (void)base::send_all((*fd)->get(), answer, soon());
          if (silent) (void)base::recv_some((*fd)->get(), chunk, soon());
        }) {}
  ~FakeServer() { thread.join(); }
  [[nodiscard]] std::string name() const { return listener.address.to_string(); }
  base::Listener listener;
  std::thread thread;
};

TEST(ControlPort, AServerOfAnotherVersionIsIncompatible) {
  FakeServer server(frame_of_version(9));
  const auto opened = make_engine("tcp").open(server.name(), soon());
  ASSERT_EQ(opened.code(), Code::kIncompatible) << opened.error().describe();
  EXPECT_NE(opened.error().message.find("9"), std::string::npos) << opened.error().message;
}

TEST(ControlPort, SomethingElseBehindThePortIsSaidSo) {
  const auto http = wire::as_bytes("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
  FakeServer server({http.begin(), http.end()});
  const auto opened = make_engine("tcp").open(server.name(), soon());
  ASSERT_FALSE(opened.ok());
  EXPECT_NE(opened.error().message.find("not a crossdock"), std::string::npos)
      << opened.error().message;
}

TEST(ControlPort, ASilentServerCostsTheDeadlineOnly) {
  FakeServer server({}, true);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(make_engine("tcp").open(server.name(), Deadline::in(300ms)).code(), Code::kDeadline);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
}

// --- keys ---

EngineOptions with_key(const std::string& key) {
  return {.config = {{"control.secret", key}}};
}

TEST(ControlPort, TheSameKeyOpens) {
  Pair pair("tcp", 4096, false, with_key("s3cret"), with_key("s3cret"));
  EXPECT_TRUE(pair.run({pair.write(0, 64)}).ok()) << "data lanes are authenticated as well";
}

TEST(ControlPort, AWrongMissingOrUnaskedKeyIsDenied) {
  std::vector<std::byte> memory(64);
  auto locked = make_engine("tcp", with_key("right"));
  auto open_door = make_engine("tcp");
  auto region = locked.register_memory(memory.data(), 64, {.label = "hidden label"}).value();
  EXPECT_EQ(make_engine("tcp", with_key("wrong")).open(locked.name(), soon()).code(),
            Code::kDenied);
  EXPECT_EQ(make_engine("tcp").open(locked.name(), soon()).code(), Code::kDenied);
  EXPECT_EQ(make_engine("tcp", with_key("right")).open(open_door.name(), soon()).code(),
            Code::kDenied)
      << "a server that does not ask for the key may not be ours";
  EXPECT_TRUE(make_engine("tcp", with_key("right")).open(locked.name(), soon()).ok());
}

TEST(ControlPort, WithoutTheKeyNothingIsRevealed) {
  std::vector<std::byte> memory(64);
  auto locked = make_engine("tcp", {.name = "engine-name", .config = {{"control.secret", "k"}}});
  auto region = locked.register_memory(memory.data(), 64, {.label = "hidden label"}).value();
  const auto fd = connect_to(locked);
  const auto hello = wire::encode_frame(wire::Hello{.engine_name = "thief"}).value();
  const auto proof = wire::encode_frame(wire::AuthProof{}).value();
  ASSERT_TRUE(base::send_all(fd.get(), hello, soon()).ok());
  (void)base::send_all(fd.get(), proof, soon());
  const std::string answer = read_all(fd.get(), Deadline::in(5s));
  EXPECT_EQ(answer.find("engine-name"), std::string::npos);
  EXPECT_EQ(answer.find("hidden label"), std::string::npos);
  EXPECT_LT(answer.size(), 300u) << "a challenge and a refusal, no more";
}

TEST(ControlPort, ADataLaneNeedsALivingSession) {
  auto target = make_engine("tcp");
  const auto fd = connect_to(target);
  const auto hello =
      wire::encode_frame(
          wire::Hello{.engine_name = "x", .purpose = wire::Purpose::kData, .token = 42})
          .value();
  ASSERT_TRUE(base::send_all(fd.get(), hello, soon()).ok());
  const std::string answer = read_all(fd.get(), Deadline::in(5s));
  wire::FrameReader reader;
  reader.feed(wire::as_bytes(answer));
  const auto frame = reader.next().value().value();
  EXPECT_EQ(frame.type, wire::MessageType::kRefused);
}

}  // namespace
}  // namespace crossdock::testing
