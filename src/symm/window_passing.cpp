// Connections, messages, and whom to blame. See window_passing.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/window_passing.hpp"

#include <algorithm>
#include <cerrno>
#include <fmt/format.h>
#include <optional>
#include <poll.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cuda/fd_passing.hpp"
#include "wire/auth.hpp"

namespace crossdock::symm {
namespace {

using base::UniqueFd;

Error lost(const Agreement& agreement, std::uint32_t member) {
  return Error{.code = Code::kPeerLost,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format("the process of {} ended while windows were handed over",
                                      agreement.ranks_of(member))};
}

// One swap in progress.
class Swap {
 public:
  Swap(const Agreement& agreement, std::uint32_t member, Deadline deadline)
      : agreement_(agreement),
        member_(member),
        deadline_(deadline),
        sockets_(agreement.members.size()),
        got_(agreement.members.size()) {
    got_[member] = true;
  }

  Result<> send_to_all(const Descriptors& own) {
    std::vector<int> fds;
    message::Windows windows{.agreement = agreement_.digest, .member = member_};
    for (const auto& [rank, fd] : own) {
      windows.ranks.push_back(rank);
      fds.push_back(fd.get());
    }
    CROSSDOCK_TRY(payload, message::encode(windows));
    // To all of them, whatever happens: who gets nothing would take this process for dead.
    Result<> result;
    for (std::uint32_t peer = 0; peer < sockets_.size(); ++peer) {
      if (peer == member_) continue;
      auto sent = send_to(peer, fds, payload);
      if (result.ok()) result = std::move(sent);
    }
    return result;
  }

  Result<Descriptors> receive_from_all(int listener) {
    while (!std::all_of(got_.begin(), got_.end(), [](bool g) { return g; })) {
      // In this order: what a process sent before it ended is in the queue when its end is seen.
      CROSSDOCK_TRY(closed, wait(listener));
      CROSSDOCK_CHECK_OK(drain(listener));
      if (closed && !got_[*closed]) return lost(agreement_, *closed);
      if (deadline_.passed()) return late();
    }
    return std::move(received_);
  }

 private:
  Result<> send_to(std::uint32_t peer, const std::vector<int>& fds, std::string_view payload) {
    const std::string& name = agreement_.members[peer].socket;
    auto socket = cuda::connect_local(name, deadline_);
    if (socket.code() == Code::kUnreachable) return lost(agreement_, peer);
    if (!socket.ok()) return std::move(socket).error();
    sockets_[peer] = std::move(socket).value();
    const auto sent = cuda::send_fds(sockets_[peer].get(), fds, wire::as_bytes(payload), deadline_);
    if (sent.code() == Code::kPeerLost) return lost(agreement_, peer);
    return sent;
  }

  // Until something is in the queue, or a member that still owes its windows has closed its end:
  // then that member.
  Result<std::optional<std::uint32_t>> wait(int listener) {
    std::vector<pollfd> polled = {{listener, POLLIN, 0}};
    std::vector<std::uint32_t> owner = {member_};
    for (std::uint32_t peer = 0; peer < sockets_.size(); ++peer) {
      if (got_[peer]) continue;
      polled.push_back({sockets_[peer].get(), POLLIN, 0});
      owner.push_back(peer);
    }
    if (::poll(polled.data(), polled.size(), deadline_.remaining_ms()) < 0 && errno != EINTR)
      return errno_error(errno, "wait for windows of other processes");
    for (std::size_t i = 1; i < polled.size(); ++i)
      if (polled[i].revents != 0) return std::optional(owner[i]);
    return std::optional<std::uint32_t>();
  }

  // Takes everything that is in the queue now.
  Result<> drain(int listener) {
    for (;;) {
      auto socket = cuda::accept_local(listener, Deadline::now());
      if (socket.code() == Code::kDeadline) return {};
      if (socket.code() == Code::kDenied) continue;  // another user's process: not one of us
      if (!socket.ok()) return std::move(socket).error();
      CROSSDOCK_CHECK_OK(take(socket->get()));
    }
  }

  Result<> take(int socket) {
    auto received = cuda::receive_fds(socket, deadline_);
    if (received.code() == Code::kPeerLost) return {};  // gone before it said anything
    if (!received.ok()) return std::move(received).error();
    const auto windows = message::decode_windows(wire::as_text(received->payload));
    // Whoever does not know the agreement is not of this group.
    if (!windows.ok() || windows->agreement != agreement_.digest) return {};
    const std::uint32_t peer = windows->member;
    if (peer >= got_.size() || got_[peer]) return {};
    if (received->fds.size() != windows->ranks.size() ||
        windows->ranks.size() != agreement_.members[peer].ranks.size())
      return make_error(
          Code::kCorrupt,
          fmt::format("the process of {} sent {} descriptors for {} windows",
                      agreement_.ranks_of(peer), received->fds.size(), windows->ranks.size()));
    for (std::size_t i = 0; i < windows->ranks.size(); ++i) {
      const std::uint32_t rank = windows->ranks[i];
      if (rank >= agreement_.member_of_rank.size() || agreement_.member_of_rank[rank] != peer)
        return make_error(Code::kCorrupt, fmt::format("the process of {} sent a window of rank {}",
                                                      agreement_.ranks_of(peer), rank));
      received_[rank] = std::move(received->fds[i]);
    }
    got_[peer] = true;
    return {};
  }

  Error late() const {
    std::string who;
    for (std::uint32_t peer = 0; peer < got_.size(); ++peer)
      if (!got_[peer]) who += (who.empty() ? "" : "; ") + agreement_.ranks_of(peer);
    return Error{.code = Code::kDeadline,
                 .scope = Scope::kPeer,
                 .retry = Retry::kLater,
                 .message = "no windows came in time from the process of " + who};
  }

  const Agreement& agreement_;
  std::uint32_t member_;
  Deadline deadline_;
  std::vector<UniqueFd> sockets_;  // kept open: their closing tells of a death
  std::vector<bool> got_;
  Descriptors received_;
};

}  // namespace

Result<WindowPassing> WindowPassing::listen(std::uint32_t members) {
  CROSSDOCK_TRY(id, wire::random_id());
  std::string name = fmt::format("crossdock-symm-{}-{:016x}", ::getpid(), id);
  CROSSDOCK_TRY(listener, cuda::listen_local(name, static_cast<int>(members)));
  return WindowPassing(std::move(name), std::move(listener));
}

Result<Descriptors> WindowPassing::swap(const Agreement& agreement, std::uint32_t member,
                                        const Descriptors& own, Deadline deadline) {
  Swap swap(agreement, member, deadline);
  CROSSDOCK_CHECK_OK(swap.send_to_all(own));
  return swap.receive_from_all(listener_.get());
}

}  // namespace crossdock::symm
