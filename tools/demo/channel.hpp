// Worker processes and the sockets to them. spawn_worker() runs in the command before it has any
// thread; a worker is this executable again, with the hidden worker command.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "demo/pd.hpp"

namespace crossdock::tools::pd {

// One end of an event socket. send() may be called from any thread; receive() from one.
class Channel {
 public:
  explicit Channel(base::UniqueFd fd) : fd_(std::move(fd)) {}
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  // Fills in the time when it is 0. A peer that is gone is not an error: nobody is interested.
  void send(Event event);
  void send(Event::Kind kind, std::uint64_t request, std::uint32_t layer = 0,
            std::string_view text = {});
  // kPeerLost when the other process is gone, kDeadline when nothing came.
  Result<Event> receive(Deadline deadline);
  // The other process is told that nothing more comes; it may still send.
  void hang_up();

 private:
  base::UniqueFd fd_;
};

void set_text(Event& event, std::string_view text);

// A child process; killed, if it still runs, and reaped by the destructor.
class Worker {
 public:
  Worker(pid_t pid, Channel channel) : pid_(pid), channel_(std::move(channel)) {}
  Worker(Worker&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), channel_(std::move(other.channel_)) {}
  Worker& operator=(Worker&&) = delete;
  ~Worker();
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  Channel& channel() noexcept { return channel_; }
  void signal(int number) const;
  // Waits for its end, the status of waitpid(); nothing when it still runs at `deadline`.
  std::optional<int> wait(Deadline deadline);

 private:
  pid_t pid_;
  Channel channel_;
};

// `options` with role and pool size of the worker.
Result<Worker> spawn_worker(const Options& options);

}  // namespace crossdock::tools::pd
