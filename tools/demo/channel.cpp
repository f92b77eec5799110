// Spawning by fork and exec, and the event sockets. Between fork and exec only calls that are safe
// there are made.
// SPDX-License-Identifier: Apache-2.0
#include "demo/channel.hpp"

#include <algorithm>
#include <csignal>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/child_process.hpp"
#include "base/clock.hpp"

namespace crossdock::tools::pd {
namespace {

constexpr int kWorkerFd = 3;

std::vector<std::string> worker_arguments(const Options& o) {
  std::vector<std::string> args = {"crossdock",
                                   "demo",
                                   "pd-worker",
                                   "--role",
                                   o.role,
                                   "--event-fd",
                                   std::to_string(kWorkerFd),
                                   "--pool-bytes",
                                   std::to_string(o.pool_bytes),
                                   "--limit-pages",
                                   std::to_string(o.limit_pages),
                                   "--transport",
                                   o.transport,
                                   "--model",
                                   o.model,
                                   "--order",
                                   o.order,
                                   "--mode",
                                   o.mode,
                                   "--requests",
                                   std::to_string(o.requests),
                                   "--page-tokens",
                                   std::to_string(o.page_tokens),
                                   "--timeout",
                                   std::to_string(o.timeout_s)};
  if (o.tokens > 0) args.insert(args.end(), {"--tokens", std::to_string(o.tokens)});
  if (!o.trace.empty()) args.insert(args.end(), {"--trace", o.trace});
  if (!o.kv_shape.empty()) args.insert(args.end(), {"--kv-shape", o.kv_shape});
  return args;
}

// In the child. Never returns.
[[noreturn]] void become_worker(int fd, char* const* argv, pid_t parent) {
  // The worker must not outlive a command that is killed; it checks that this came in time.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  if (fd == kWorkerFd)
    ::fcntl(fd, F_SETFD, 0);
  else if (::dup2(fd, kWorkerFd) < 0)
    ::_exit(127);
  ::execv("/proc/self/exe", argv);
  ::_exit(127);
}

}  // namespace

void set_text(Event& event, std::string_view text) {
  const std::size_t length = std::min(text.size(), sizeof(event.text) - 1);
  text.copy(event.text, length);
  event.text[length] = '\0';
}

void Channel::send(Event event) {
  if (event.time_ns == 0) event.time_ns = base::now_ns();
  while (::send(fd_.get(), &event, sizeof(event), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

void Channel::send(Event::Kind kind, std::uint64_t request, std::uint32_t layer,
                   std::string_view text) {
  Event event;
  event.kind = kind;
  event.request = request;
  event.layer = layer;
  set_text(event, text);
  send(event);
}

Result<Event> Channel::receive(Deadline deadline) {
  for (;;) {
    pollfd wait{fd_.get(), POLLIN, 0};
    const int ready = ::poll(&wait, 1, deadline.remaining_ms());
    if (ready < 0 && errno != EINTR) return errno_error(errno, "poll the event socket");
    if (ready <= 0 && deadline.passed()) return make_error(Code::kDeadline, "no event came");
    if (ready <= 0) continue;
    Event event;
    const auto got = ::recv(fd_.get(), &event, sizeof(event), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(sizeof(event)))
      return make_error(Code::kPeerLost, "the other process is gone");
    event.text[sizeof(event.text) - 1] = '\0';
    return event;
  }
}

void Channel::hang_up() {
  ::shutdown(fd_.get(), SHUT_WR);
}

std::optional<int> Worker::wait(Deadline deadline) {
  if (pid_ < 0) return std::nullopt;
  const auto status = base::reap_child(pid_, deadline);
  if (status) pid_ = -1;
  return status;
}

Worker::~Worker() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Worker::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

Result<Worker> spawn_worker(const Options& options) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return errno_error(errno, "make the event socket of a worker");
  base::UniqueFd ours(ends[0]), theirs(ends[1]);
  auto args = worker_arguments(options);
  std::vector<char*> argv;
  for (std::string& arg : args)
    argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return errno_error(errno, "start a worker process");
  if (pid == 0) become_worker(theirs.get(), argv.data(), parent);
  return Worker(pid, Channel(std::move(ours)));
}

}  // namespace crossdock::tools::pd
