// Watch: gives the waits of streams their deadline. A wait of a stream for a word is for ever, so a
// thread looks at the marks of the local ranks (board.hpp). When one has lasted too long
//
//   it reads which words have not come        -> the error of the rank, for check()
//   sets `failed` in the windows of all peers    nobody takes data of this rank for good any more:
//                                                whoever copies it looks at `failed` afterwards
//   raises the rank's abort flag                 kernels of the group leave at once
//   writes the words itself                      the stream goes on; later waits are released
//                                                as soon as they are seen
//
// in this order. What a released stream does then harms nobody: it reads windows that stay mapped,
// and writes its own. Words are read and written past the streams that wait: on GPUs by a stream of
// high priority that does nothing else. That may take seconds on a GPU that hangs, so it is done
// without the mutex, and nobody who asks for the error waits for it. An access ends after 2 s all
// the same; the stream then waits until a later look has done the whole row, from the top.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "coll/board.hpp"
#include "symm/group.hpp"

namespace crossdock::coll {

// Words of one rank's memory and of windows, for the host while streams wait. Single-owner.
class Words {
 public:
  virtual ~Words() = default;
  virtual Result<> read(void* to, const void* from, u64 bytes) = 0;
  virtual Result<> write(void* to, const void* from, u64 bytes) = 0;
  // Until accesses that ended at their deadline are not under way any more either.
  virtual Result<> finish(Deadline) { return {}; }
};
// `one_access`: of a stream of the GPU that does nothing else.
Result<std::unique_ptr<Words>> make_words(
    const symm::Rank& rank, std::chrono::nanoseconds one_access = std::chrono::seconds(2));

class Watch {
 public:
  struct Watched {
    symm::Rank* rank = nullptr;
    Mark* marks = nullptr;  // as the host sees them
    std::unique_ptr<Words> words;
  };
  // The window, the ranks and their marks outlive it.
  static Result<std::unique_ptr<Watch>> start(const Window& window, std::vector<Watched> ranks,
                                              std::chrono::nanoseconds wait);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Of the i-th rank: why it has failed. Never waits: neither for peers nor for a look at the
  // marks. Thread-safe, as are fail() and end_waits().
  [[nodiscard]] Result<> check(std::size_t i) const;
  // Something else has failed on the rank.
  void fail(std::size_t i, Error error);
  // From now on every wait ends as soon as it is seen, like one that has lasted too long.
  void end_waits();
  // Until resume() it touches neither marks nor words. kDeadline: it is still at them.
  Result<> pause(Deadline deadline);
  // Forgets what has failed. Only between pause() and resume(), when no stream waits.
  void forget();
  void resume();

 private:
  struct Site {
    bool watched = false;
    Deadline::Clock::time_point since;
  };
  // What the thread alone uses while it looks, and forget() while it does not.
  struct State {
    State(Watched of, u32 num) : watched(std::move(of)), sites(num) {}
    Watched watched;
    std::vector<Site> sites;
    bool told = false;           // the peers
    std::optional<Error> error;  // by mutex_
  };
  Watch(const Window& window, std::chrono::nanoseconds wait) : window_(window), wait_(wait) {}
  void loop();
  bool look_at_all();
  void look(State& state);
  void look_at(State& state, u32 site);
  void end_wait(State& state, const Awaited& awaited);
  Result<> tell(State& state);
  // Whether the waits of the rank have no time left.
  [[nodiscard]] bool over(const State& state) const;
  void put(State& state, Error error);  // the first one stays

  const Window& window_;
  const std::chrono::nanoseconds wait_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<State> states_;
  bool stopping_ = false;
  bool ending_ = false;  // all waits
  bool paused_ = false;
  bool looking_ = false;
  std::thread thread_;
};

}  // namespace crossdock::coll
