// An engine to be opened that does only what a test tells it: it greets whoever comes, offers tcp
// and announces one region. What is sent on its data lanes stays unread, so that no write is ever
// acknowledged. Failures are gtest failures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <poll.h>
#include <thread>
#include <vector>

#include "base/socket.hpp"
#include "support/engines.hpp"
#include "wire/frame.hpp"
#include "wire/segment.hpp"

namespace crossdock::testing {

class RawServer {
 public:
  static constexpr std::uint64_t kAddress = 1 << 20, kLength = 4096;
  static constexpr std::uint32_t kRegion = 7;

  RawServer() : thread_([this] { run(); }) {}
  ~RawServer() { stop(); }
  [[nodiscard]] std::string name() const { return listener_.address.to_string(); }
  [[nodiscard]] static Request write_from(void* local, std::size_t length) {
    return {.op = Op::kWrite, .local = local, .remote = kAddress, .length = length};
  }

  // On the control connection, once an engine has opened it.
  template <class M>
  void send(const M& message) {
    while (!opened_.load())
      std::this_thread::yield();
    say(control_.get(), message);
  }
  // After send(): the next frame; its payload lives until the next call. Nothing when the engine
  // hung up.
  std::optional<wire::Frame> receive() { return next(control_.get(), reader_); }
  // Answers no more connections; with `refuse` they fail at once.
  void take_no_more(bool refuse) {
    stop();
    if (refuse) listener_.fd.reset();
  }
  // Takes no more connections; returns once something has arrived on the first data lane.
  void await_data() {
    stop();
    const auto came = base::wait_ready(lanes_.at(0).get(), POLLIN, soon());
    EXPECT_TRUE(came.ok() && *came);
  }
  // Takes no more connections, and ends the data lanes.
  void end_lanes() {
    stop();
    lanes_.clear();
  }

 private:
  void stop() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  template <class M>
  static void say(int fd, const M& message) {
    const auto frame = wire::encode_frame(message).value();
    if (const auto sent = base::send_all(fd, frame, soon()); !sent.ok())
      ADD_FAILURE() << sent.error().describe();
  }
  static std::optional<wire::Frame> next(int fd, wire::FrameReader& reader) {
    std::array<std::byte, 4096> chunk;
    while (true) {
      auto frame = reader.next();
      if (!frame.ok()) return std::nullopt;
      if (frame->has_value()) return **frame;
      const auto got = base::recv_some(fd, chunk, soon());
      if (!got.ok() || *got == 0) return std::nullopt;
      reader.feed(std::span(chunk).first(*got));
    }
  }

  void run() {
    while (!stop_.load()) {
      (void)base::wait_ready(listener_.fd.get(), POLLIN, Deadline::in(5ms));
      auto accepted = base::accept_tcp(listener_.fd.get());
      if (accepted.ok() && accepted->has_value()) greet(std::move(**accepted));
    }
  }

  void greet(base::UniqueFd fd) {
    wire::FrameReader reader;
    const auto frame = next(fd.get(), reader);
    if (!frame) return;
    const auto hello = wire::decode<wire::Hello>(frame->payload).value();
    say(fd.get(), wire::Welcome{.engine_name = "raw",
                                .instance_id = 7,
                                .data_token = 1,
                                .transports = {{.name = "tcp"}}});
    if (hello.purpose == wire::Purpose::kData) return lanes_.push_back(std::move(fd));
    const wire::RegionEntry region{
        .region_id = kRegion, .addr = kAddress, .length = kLength, .access = 3};
    for (const auto& page : wire::encode_segment(1, std::span(&region, 1)).value())
      if (!base::send_all(fd.get(), page, soon()).ok()) ADD_FAILURE() << "the segment";
    control_ = std::move(fd);
    reader_ = std::move(reader);
    opened_.store(true);
  }

  base::Listener listener_ = base::listen_tcp(base::HostPort{"127.0.0.1", 0}, soon()).value();
  std::atomic<bool> stop_{false};
  std::atomic<bool> opened_{false};
  // The thread's until then:
  base::UniqueFd control_;
  wire::FrameReader reader_;
  std::vector<base::UniqueFd> lanes_;  // the thread's until it has ended
  std::thread thread_;
};

}  // namespace crossdock::testing
