// The thread, and words of both backends. See watch.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/watch.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/worker_thread.hpp"
#include "cuda/memory.hpp"

namespace crossdock::coll {
namespace {

using namespace std::chrono_literals;

class CpuWords final : public Words {
 public:
  Result<> read(void* to, const void* from, u64 bytes) override { return move(to, from, bytes); }
  Result<> write(void* to, const void* from, u64 bytes) override { return move(to, from, bytes); }

 private:
  // Words are seen whole: lanes poll them.
  static Result<> move(void* to, const void* from, u64 bytes) {
    if (bytes == sizeof(u64)) {
      const u64 value = __atomic_load_n(static_cast<const u64*>(from), __ATOMIC_ACQUIRE);
      __atomic_store_n(static_cast<u64*>(to), value, __ATOMIC_RELEASE);
    } else {
      std::memcpy(to, from, bytes);
    }
    return {};
  }
};

// All accesses go through one buffer. One that ends at its deadline is still under way in it: reads
// come after that one anyway, writes wait for it before they put anything there.
class GpuWords final : public Words {
 public:
  GpuWords(cuda::Stream stream, cuda::PinnedMemory pinned, std::chrono::nanoseconds one_access)
      : stream_(std::move(stream)), pinned_(std::move(pinned)), one_access_(one_access) {}
  Result<> read(void* to, const void* from, u64 bytes) override {
    CROSSDOCK_CHECK_OK(copy(pinned_.device(), cuda::device_ptr(from), bytes));
    std::memcpy(to, pinned_.host(), bytes);
    return {};
  }
  Result<> write(void* to, const void* from, u64 bytes) override {
    CROSSDOCK_CHECK_OK(finish(Deadline::in(one_access_)));
    std::memcpy(pinned_.host(), from, bytes);
    return copy(cuda::device_ptr(to), pinned_.device(), bytes);
  }
  Result<> finish(Deadline deadline) override {
    if (!busy_) return {};
    CROSSDOCK_CHECK_OK(stream_.synchronize(deadline));
    busy_ = false;
    return {};
  }

 private:
  Result<> copy(cuda::DevicePtr to, cuda::DevicePtr from, u64 bytes) {
    busy_ = true;
    CROSSDOCK_CHECK_OK(cuda::copy_async(to, from, bytes, stream_));
    return finish(Deadline::in(one_access_));
  }

  cuda::Stream stream_;
  cuda::PinnedMemory pinned_;
  const std::chrono::nanoseconds one_access_;
  bool busy_ = false;
};

}  // namespace

Result<std::unique_ptr<Words>> make_words(const symm::Rank& rank,
                                          std::chrono::nanoseconds one_access) {
  const cuda::Context* const context = rank.device().context();
  if (context == nullptr) return std::unique_ptr<Words>(std::make_unique<CpuWords>());
  // Streams of one priority may share a queue of the GPU, where a stream that waits holds up the
  // others. This one must never stand behind one of those.
  CROSSDOCK_TRY(stream, cuda::Stream::create(*context, {.high_priority = true}));
  CROSSDOCK_TRY(pinned, cuda::PinnedMemory::allocate(*context, 64));
  return std::unique_ptr<Words>(
      std::make_unique<GpuWords>(std::move(stream), std::move(pinned), one_access));
}

Result<std::unique_ptr<Watch>> Watch::start(const Window& window, std::vector<Watched> ranks,
                                            std::chrono::nanoseconds wait) {
  std::unique_ptr<Watch> watch(new Watch(window, wait));
  for (Watched& watched : ranks)
    watch->states_.emplace_back(std::move(watched), num_sites(window.world));
  CROSSDOCK_TRY(thread,
                base::start_worker("xd-coll-watch", [self = watch.get()] { self->loop(); }));
  watch->thread_ = std::move(thread);
  return watch;
}

Watch::~Watch() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Often enough that a wait lasts little longer than it may; rarely enough not to be noticed.
void Watch::loop() {
  const auto rest = std::clamp<std::chrono::nanoseconds>(wait_ / 8, 1ms, 50ms);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    bool soon = false;
    const bool ending = ending_;
    if (!paused_) {
      looking_ = true;
      lock.unlock();
      soon = look_at_all();
      lock.lock();
      looking_ = false;
      changed_.notify_all();  // pause()
    }
    changed_.wait_for(lock, soon ? std::chrono::nanoseconds(1ms) : rest,
                      [&] { return stopping_ || ending != ending_; });
  }
}

// Whether what waits next has to be seen at once.
bool Watch::look_at_all() {
  bool soon = false;
  for (State& state : states_) {
    look(state);
    soon = over(state) || soon;
  }
  return soon;
}

void Watch::look(State& state) {
  for (u32 site = 0; site < state.sites.size(); ++site)
    look_at(state, site);
}

void Watch::look_at(State& state, u32 i) {
  Site& site = state.sites[i];
  Mark& mark = state.watched.marks[i];
  u64 expected = Mark::kWaiting;
  const auto now = Deadline::Clock::now();
  // Acquire: pairs with the stream's write of the state, before which it has said what for.
  if (__atomic_compare_exchange_n(&mark.state, &expected, Mark::kWatched, false, __ATOMIC_ACQ_REL,
                                  __ATOMIC_ACQUIRE)) {
    site = {true, now};
  } else if (expected == Mark::kNone) {
    site.watched = false;
  }
  if (!site.watched) return;
  const u64 what = __atomic_load_n(&mark.what, __ATOMIC_ACQUIRE);
  // A peer that has said that it failed will not take it back.
  const bool sure = Awaited::unpack(what, 0).what == What::kFailed || over(state);
  if (!sure && now - site.since < wait_) return;
  const u64 value = __atomic_load_n(&mark.value, __ATOMIC_ACQUIRE);
  // The stream has gone on meanwhile: this is not what it waited for.
  if (__atomic_load_n(&mark.state, __ATOMIC_ACQUIRE) != Mark::kWatched) return;
  end_wait(state, Awaited::unpack(what, value));
}

void Watch::end_wait(State& state, const Awaited& awaited) {
  const symm::Rank& rank = *state.watched.rank;
  const std::vector<AwaitedWord> words = words_of(rank, window_, awaited);
  std::vector<u64> seen(words.size());
  bool all = true;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (const auto read = state.watched.words->read(&seen[i], words[i].word, sizeof(u64));
        !read.ok()) {
      put(state, read.error());
      return;
    }
    all = all && seen[i] == words[i].value;
  }
  if (all) return;  // just now
  put(state, explain(rank, awaited, words, seen, wait_));
  // Whoever has not been told would take what the stream leaves behind for good: it waits until the
  // next look.
  if (!tell(state).ok()) return;
  for (std::size_t i = 0; i < words.size(); ++i)
    if (seen[i] != words[i].value)
      (void)state.watched.words->write(words[i].word, &words[i].value, sizeof(u64));
}

// Before any word is released. All of it again where some of it has failed.
Result<> Watch::tell(State& state) {
  if (state.told) return {};
  const symm::Rank& rank = *state.watched.rank;
  Words& words = *state.watched.words;
  const u64 failed = u64{rank.rank()} + 1;
  for (u32 peer = 0; peer < window_.world; ++peer)
    if (peer != rank.rank())
      CROSSDOCK_CHECK_OK(words.write(rank.at<u64>(window_.failed, peer), &failed, sizeof failed));
  const u32 abort = device::abort_word(device::kNoPeer);
  CROSSDOCK_CHECK_OK(words.write(&rank.control()->abort.value, &abort, sizeof abort));
  state.told = true;
  return {};
}

Result<> Watch::check(std::size_t i) const {
  const std::scoped_lock lock(mutex_);
  if (states_[i].error) return *states_[i].error;
  return {};
}

void Watch::fail(std::size_t i, Error error) {
  put(states_[i], std::move(error));
}

void Watch::put(State& state, Error error) {
  const std::scoped_lock lock(mutex_);
  if (!state.error) state.error = std::move(error);
}

bool Watch::over(const State& state) const {
  const std::scoped_lock lock(mutex_);
  return ending_ || state.error.has_value();
}

void Watch::end_waits() {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
}

// What an access that ended at its deadline still writes would come into what a reset has zeroed.
Result<> Watch::pause(Deadline deadline) {
  std::unique_lock lock(mutex_);
  paused_ = true;
  bool rests = changed_.wait_until(lock, deadline.when(), [&] { return !looking_; });
  lock.unlock();
  for (State& state : states_)
    rests = rests && state.watched.words->finish(deadline).ok();
  if (rests) return {};
  resume();
  return make_error(Code::kDeadline,
                    "coll: words of a rank could not be read in time: its GPU does not answer");
}

void Watch::forget() {
  const std::scoped_lock lock(mutex_);
  for (State& state : states_) {
    state.error.reset();
    state.told = false;
    for (Site& site : state.sites)
      site = {};
  }
}

void Watch::resume() {
  {
    const std::scoped_lock lock(mutex_);
    paused_ = false;
  }
  changed_.notify_all();
}

}  // namespace crossdock::coll
