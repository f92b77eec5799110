// See control_link.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/control_link.hpp"

#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/socket.hpp"
#include "wire/control.hpp"

namespace crossdock::transfer::detail {

ControlLink::ControlLink(base::EventLoop& loop, base::UniqueFd fd, wire::FrameReader reader)
    : loop_(loop),
      remote_(base::peer_name(fd.get())),
      reader_(std::move(reader)),
      fd_(std::make_shared<base::UniqueFd>(std::move(fd))) {}

ControlLink::~ControlLink() = default;

void ControlLink::start(OnFrame on_frame, OnClosed on_closed) {
  on_frame_ = std::make_shared<OnFrame>(std::move(on_frame));
  on_closed_ = std::move(on_closed);
  const auto watched =
      loop_.watch(fd_->get(), EPOLLIN, [weak = weak_from_this()](std::uint32_t events) {
        if (const auto self = weak.lock()) self->on_event(events);
      });
  if (!watched.ok()) return close(watched.error());
  consume();
}

void ControlLink::hand_over(OnFrame on_frame, OnClosed on_closed, std::uint32_t max_payload) {
  on_frame_ = std::make_shared<OnFrame>(std::move(on_frame));
  on_closed_ = std::move(on_closed);
  reader_.set_max_payload(max_payload);
}

Result<base::UniqueFd> ControlLink::detach() {
  const std::lock_guard lock(mutex_);
  if (reader_.buffered() != 0 || queued_.size() != queued_start_)
    return make_error(Code::kCorrupt, fmt::format("{} sent {} bytes ahead of the handshake",
                                                  remote_, reader_.buffered()));
  closed_ = true;
  if (silence_timer_) loop_.cancel(*silence_timer_);
  loop_.unwatch(fd_->get());
  // The handlers keep their owner alive, which keeps this link alive.
  on_frame_ = nullptr;
  on_closed_ = nullptr;
  base::UniqueFd fd = std::move(*fd_);
  fd_.reset();
  return fd;
}

void ControlLink::close(const Error& why) {
  if (closed_) return;
  closed_ = true;
  const auto keep = shared_from_this();
  if (silence_timer_) loop_.cancel(*silence_timer_);
  {
    const std::lock_guard lock(mutex_);
    loop_.unwatch(fd_->get());
    lingering_ = std::move(fd_);
    queued_.clear();
    queued_start_ = 0;
  }
  const auto on_closed = std::move(on_closed_);
  on_closed_ = nullptr;
  on_frame_ = nullptr;  // breaks the cycle owner -> link -> handler -> owner
  if (on_closed) on_closed(why);
  if (!on_gone_) lingering_.reset();
}

void ControlLink::linger(std::function<void()> on_gone) {
  on_gone_ = std::move(on_gone);
  // The peer is to see the end, and to answer with its own.
  ::shutdown(lingering_->get(), SHUT_WR);
  const auto watched = loop_.watch(lingering_->get(), EPOLLIN, [weak = weak_from_this()](auto) {
    if (const auto self = weak.lock()) self->drain_lingering();
  });
  // Without a watch nobody will ever know: the owner keeps waiting, which is the safe side.
  if (!watched.ok()) return;
}

void ControlLink::drain_lingering() {
  std::array<std::byte, 16 * 1024> chunk;
  const auto got = base::recv_now(lingering_->get(), chunk);
  if (got.ok() && (!got->has_value() || **got != 0)) return;  // level-triggered: comes again
  loop_.unwatch(lingering_->get());
  lingering_.reset();
  if (!got.ok()) end_by(got.error());
  if (got.ok() || ended_by_peer_) {
    const auto on_gone = std::move(on_gone_);
    on_gone_ = nullptr;
    on_gone();
  }
}

std::shared_ptr<const void> ControlLink::hold() const {
  const std::lock_guard lock(mutex_);
  return fd_;
}

// Only what the other end's kernel says counts: a timeout tells nothing of a peer that is stopped.
void ControlLink::end_by(const Error& error) {
  ended_by_peer_ = error.native.value == ECONNRESET || error.native.value == EPIPE;
}

void ControlLink::keep_alive(std::chrono::nanoseconds silence) {
  if (closed_ || silence.count() == 0) return;
  silence_ = silence;
  heard_ = Deadline::now();
  base::bound_silence(fd_->get(), silence);
  check_silence();
}

// Two pings may be lost to a busy peer. Only a silence that a Ping of ours was part of counts: this
// process may have been stopped itself.
void ControlLink::check_silence() {
  silence_timer_.reset();
  if (closed_) return;
  const std::chrono::nanoseconds quiet = Deadline::Clock::now() - heard_.when();
  if (quiet >= silence_ && pinged_)
    return close(Error{.code = Code::kPeerLost,
                       .scope = Scope::kPeer,
                       .retry = Retry::kAfterReconnect,
                       .message = fmt::format("{} has said nothing for {} ms (control.silence)",
                                              remote_, quiet / std::chrono::milliseconds(1))});
  const auto interval = silence_ / 3;
  if (quiet >= interval) {
    pinged_ = true;
    (void)send(wire::Ping{});
  }
  silence_timer_ = loop_.call_at(Deadline::in(interval), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check_silence();
  });
}

Result<> ControlLink::send(std::vector<std::byte> frame) {
  const std::lock_guard lock(mutex_);
  if (!fd_)
    return make_error(Code::kClosed, fmt::format("the connection to {} is closed", remote_));
  const bool idle = queued_.size() == queued_start_;
  std::size_t sent = 0;
  if (idle) {
    // A reset is reported by the loop, which sees it as well.
    if (const auto now = base::send_now(fd_->get(), frame); now.ok()) sent = *now;
    if (sent == frame.size()) return {};
    queued_.clear();
    queued_start_ = 0;
  } else if (queued_.size() - queued_start_ + frame.size() > kMaxQueued) {
    return Error{
        .code = Code::kWouldBlock,
        .retry = Retry::kLater,
        .message = fmt::format("{} does not read its control connection; {} bytes are waiting",
                               remote_, queued_.size() - queued_start_)};
  }
  queued_.insert(queued_.end(), frame.begin() + static_cast<std::ptrdiff_t>(sent), frame.end());
  if (idle)
    loop_.post([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->flush();
    });
  return {};
}

void ControlLink::shut() {
  const std::lock_guard lock(mutex_);
  if (fd_) ::shutdown(fd_->get(), SHUT_RDWR);
}

void ControlLink::watch_output(bool on) {
  if (fd_) loop_.change(fd_->get(), on ? (EPOLLIN | EPOLLOUT) : EPOLLIN);
}

void ControlLink::flush() {
  Result<std::size_t> sent = std::size_t{0};
  {
    const std::lock_guard lock(mutex_);
    if (!fd_) return;
    sent = base::send_now(fd_->get(), std::span(queued_).subspan(queued_start_));
    if (sent.ok()) {
      queued_start_ += *sent;
      const bool empty = queued_start_ == queued_.size();
      if (empty || queued_start_ > queued_.size() / 2) {
        // What was sent goes, even when a slow peer keeps the queue from ever being empty.
        queued_.erase(queued_.begin(),
                      queued_.begin() + static_cast<std::ptrdiff_t>(queued_start_));
        queued_start_ = 0;
      }
      return watch_output(!empty);
    }
  }
  end_by(sent.error());
  close(sent.error());
}

void ControlLink::on_event(std::uint32_t events) {
  const auto keep = shared_from_this();
  if ((events & EPOLLOUT) != 0) flush();
  if (!closed_ && (events & ~std::uint32_t{EPOLLOUT}) != 0) receive();
}

void ControlLink::receive() {
  std::array<std::byte, 64 * 1024> chunk;
  // A few rounds, so that one talkative peer does not starve the others.
  for (int round = 0; round < 4 && !closed_; ++round) {
    const auto got = base::recv_now(fd_->get(), chunk);
    if (!got.ok()) {
      end_by(got.error());
      return close(got.error());
    }
    if (!got->has_value()) return;
    ended_by_peer_ = **got == 0;
    if (ended_by_peer_)
      return close(Error{.code = Code::kPeerLost,
                         .scope = Scope::kPeer,
                         .retry = Retry::kAfterReconnect,
                         .message = fmt::format("{} closed the control connection", remote_)});
    heard_ = Deadline::now();
    pinged_ = false;
    reader_.feed(std::span(chunk).first(**got));
    consume();
  }
}

void ControlLink::consume() {
  if (consuming_) return;
  consuming_ = true;
  while (!closed_) {
    auto frame = reader_.next();
    if (!frame.ok()) {
      // The other end may be an engine of another version: tell it which we speak.
      if (frame.error().code == Code::kIncompatible)
        (void)send(wire::Refused{.code = Code::kIncompatible, .message = frame.error().message});
      close(frame.error());
      break;
    }
    if (!frame->has_value()) break;
    const auto handler = on_frame_;
    const auto handled = (*handler)(**frame);
    if (!handled.ok()) close(handled.error());
  }
  consuming_ = false;
}

}  // namespace crossdock::transfer::detail
