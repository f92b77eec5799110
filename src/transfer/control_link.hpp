// One control connection on the control loop: frames in, frames out. Sending is thread-safe and
// never blocks (what the socket does not take now is queued, bounded); receiving and closing happen
// on the loop. Knows nothing of what the frames mean.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "wire/frame.hpp"

namespace crossdock::transfer::detail {

class ControlLink : public std::enable_shared_from_this<ControlLink> {
 public:
  // An error closes the connection with it.
  using OnFrame = std::function<Result<>(const wire::Frame&)>;
  // Once, after which no frame follows; not called after detach().
  using OnClosed = std::function<void(const Error&)>;

  ControlLink(base::EventLoop& loop, base::UniqueFd fd, wire::FrameReader reader);
  ~ControlLink();

  // Loop thread. Frames that `reader` holds already are handed over first.
  void start(OnFrame on_frame, OnClosed on_closed);
  // Loop thread: who gets frames from now on (a handshake that became a session).
  void hand_over(OnFrame on_frame, OnClosed on_closed, std::uint32_t max_payload);
  // Loop thread: gives the descriptor away; kCorrupt when bytes arrived that are not yet consumed.
  Result<base::UniqueFd> detach();
  // Loop thread. Idempotent.
  void close(const Error& why);

  // Any thread. kClosed after the end, kWouldBlock when the peer does not read and the queue is
  // full.
  Result<> send(std::vector<std::byte> frame);
  template <class M>
  Result<> send(const M& message) {
    CROSSDOCK_TRY(frame, wire::encode_frame(message));
    return send(std::move(frame));
  }
  // Any thread: sends what it can of `message` and ends the connection.
  template <class M>
  void send_last(const M& message) {
    (void)send(message);
    shut();
  }
  // Any thread: no byte goes out or comes in after it; the loop notices and calls `on_closed`.
  void shut();

  [[nodiscard]] const std::string& remote() const noexcept { return remote_; }

 private:
  void on_event(std::uint32_t events);
  void receive();
  void consume();
  void flush();
  void watch_output(bool on);

  static constexpr std::size_t kMaxQueued = 64u << 20;
  base::EventLoop& loop_;
  const std::string remote_;  // "127.0.0.1:7000", for messages
  wire::FrameReader reader_;
  std::shared_ptr<OnFrame> on_frame_;  // shared: it may be replaced while it runs
  OnClosed on_closed_;
  bool closed_ = false;  // loop thread
  bool consuming_ = false;

  std::mutex mutex_;  // guards what follows
  base::UniqueFd fd_;
  std::vector<std::byte> queued_;
  std::size_t queued_start_ = 0;
};

}  // namespace crossdock::transfer::detail
