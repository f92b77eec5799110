// See control_link.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/control_link.hpp"

#include <array>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/socket.hpp"

namespace crossdock::transfer::detail {

ControlLink::ControlLink(base::EventLoop& loop, base::UniqueFd fd, wire::FrameReader reader)
    : loop_(loop),
      remote_(base::peer_name(fd.get())),
      reader_(std::move(reader)),
      fd_(std::move(fd)) {}

ControlLink::~ControlLink() = default;

void ControlLink::start(OnFrame on_frame, OnClosed on_closed) {
  on_frame_ = std::make_shared<OnFrame>(std::move(on_frame));
  on_closed_ = std::move(on_closed);
  const auto watched =
      loop_.watch(fd_.get(), EPOLLIN, [weak = weak_from_this()](std::uint32_t events) {
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
  loop_.unwatch(fd_.get());
  return std::move(fd_);
}

void ControlLink::close(const Error& why) {
  if (closed_) return;
  closed_ = true;
  const auto keep = shared_from_this();
  {
    const std::lock_guard lock(mutex_);
    loop_.unwatch(fd_.get());
    fd_.reset();
    queued_.clear();
  }
  const auto on_closed = std::move(on_closed_);
  on_closed_ = nullptr;
  on_frame_ = nullptr;  // breaks the cycle owner -> link -> handler -> owner
  if (on_closed) on_closed(why);
}

Result<> ControlLink::send(std::vector<std::byte> frame) {
  const std::lock_guard lock(mutex_);
  if (!fd_)
    return make_error(Code::kClosed, fmt::format("the connection to {} is closed", remote_));
  const bool idle = queued_.size() == queued_start_;
  std::size_t sent = 0;
  if (idle) {
    // A reset is reported by the loop, which sees it as well.
    if (const auto now = base::send_now(fd_.get(), frame); now.ok()) sent = *now;
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
  if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);
}

void ControlLink::watch_output(bool on) {
  if (fd_) loop_.change(fd_.get(), on ? (EPOLLIN | EPOLLOUT) : EPOLLIN);
}

void ControlLink::flush() {
  Result<std::size_t> sent = std::size_t{0};
  {
    const std::lock_guard lock(mutex_);
    if (!fd_) return;
    sent = base::send_now(fd_.get(), std::span(queued_).subspan(queued_start_));
    if (sent.ok()) {
      queued_start_ += *sent;
      const bool empty = queued_start_ == queued_.size();
      if (empty) {
        queued_.clear();
        queued_start_ = 0;
      }
      return watch_output(!empty);
    }
  }
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
    const auto got = base::recv_now(fd_.get(), chunk);
    if (!got.ok()) return close(got.error());
    if (!got->has_value()) return;
    if (**got == 0)
      return close(Error{.code = Code::kPeerLost,
                         .scope = Scope::kPeer,
                         .retry = Retry::kAfterReconnect,
                         .message = fmt::format("{} closed the control connection", remote_)});
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
