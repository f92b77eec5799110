// One control connection on the control loop: frames in, frames out. Sending is thread-safe and
// never blocks (what the socket does not take now is queued, bounded); receiving and closing happen
// on the loop. Knows nothing of what the frames mean, but for the Ping it sends into a silence.
//
// Who ended it matters: the end of the peer's socket is its word that nothing of it touches memory
// any more (see hold()), or the kernel's that it died. When this end gave up first, linger() waits
// for that word.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "wire/frame.hpp"

namespace crossdock::transfer::detail {

class ControlLink : public std::enable_shared_from_this<ControlLink> {
 public:
  // Bytes that may wait for a peer that does not read.
  static constexpr std::size_t kMaxQueued = 64u << 20;

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
  // Loop thread, after start() or hand_over(): a peer that says nothing for `silence`, not even in
  // answer to a Ping, is lost. 0: it may be silent for ever.
  void keep_alive(std::chrono::nanoseconds silence);
  // Loop thread: whether the connection ended because the peer's end was closed.
  [[nodiscard]] bool ended_by_peer() const noexcept { return ended_by_peer_; }
  // Loop thread, within `on_closed`: leaves the descriptor open until the peer closes its end.
  void linger(std::function<void()> on_gone);
  // Any thread: the peer does not see the end of a closed link while one of these is left. Rails
  // that touch its memory hold one. Null once the link is closed.
  [[nodiscard]] std::shared_ptr<const void> hold() const;

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
  void check_silence();
  void drain_lingering();
  void end_by(const Error& error);

  base::EventLoop& loop_;
  const std::string remote_;  // "127.0.0.1:7000", for messages
  wire::FrameReader reader_;
  std::shared_ptr<OnFrame> on_frame_;  // shared: it may be replaced while it runs
  OnClosed on_closed_;
  // Loop thread:
  bool closed_ = false;
  bool consuming_ = false;
  bool ended_by_peer_ = false;
  std::shared_ptr<base::UniqueFd> lingering_;
  std::function<void()> on_gone_;
  std::chrono::nanoseconds silence_{0};
  Deadline heard_ = Deadline::now();
  bool pinged_ = false;  // since heard_
  std::optional<base::EventLoop::TimerId> silence_timer_;

  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<base::UniqueFd> fd_;
  std::vector<std::byte> queued_;
  std::size_t queued_start_ = 0;
};

}  // namespace crossdock::transfer::detail
