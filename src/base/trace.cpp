// Rings of trace events and the JSON writer.
//
// A ring has one writer, its thread, and is read by flush() while the writer may go on. Slots are
// relaxed atomic words under a sequence protocol:
//   writer of event n:  claimed = n + 1; release fence; words of slot n % size; written = n + 1
//   reader:             h = written; words of [h - size, h); acquire fence; c = claimed
//                       keeps event i only if i + size >= c: later ones may have been overwritten
// SPDX-License-Identifier: Apache-2.0
#include "base/trace.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <fmt/format.h>
#include <iterator>
#include <mutex>
#include <new>
#include <unistd.h>
#include <unordered_set>
#include <vector>

namespace crossdock::base {
namespace {

enum class Phase : std::uint8_t {
  kSpan,
  kInstant,
  kCounter,
  kFlowBegin,
  kFlowStep,
  kFlowEnd,
  kOverlapping
};

// More threads than this in the life of one tracer are counted and not shown.
constexpr std::size_t kMaxRings = 1024;
// Rows made by track() get thread ids from here up, out of reach of the kernel's (at most 2^22).
constexpr std::uint64_t kFirstTrackId = std::uint64_t{1} << 32;

std::uint64_t next_serial() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::string expand_pid(std::string file) {
  const auto at = file.find("%p");
  if (at != std::string::npos) file.replace(at, 2, std::to_string(::getpid()));
  return file;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += {'\\', c};
    else if (byte < 0x20)
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", byte);
    else
      out += byte < 0x80 ? c : '?';  // names are ASCII; anything else could be broken UTF-8
  }
  return out + '"';
}

Error unwritable(int error, const std::string& path) {
  return errno_error(error, fmt::format("write the trace file {}", path));
}

// The one that flush() writes and renames; no two tracers have the same.
std::string temporary_of(const std::string& path, std::uint64_t serial) {
  return fmt::format("{}.{}.{}.tmp", path, ::getpid(), serial);
}

Result<> replace_file(const std::string& path, const std::string& temporary,
                      std::string_view text) {
  FILE* file = std::fopen(temporary.c_str(), "we");
  if (file == nullptr) return unwritable(errno, path);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = written ? 0 : errno;
  if (std::fclose(file) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return {};
  std::remove(temporary.c_str());
  return unwritable(error, path);
}

}  // namespace

struct Tracer::Event {
  const char* name = nullptr;
  Phase phase = Phase::kInstant;
  TraceTrack track = {};
  std::uint64_t at_ns = 0;
  std::uint64_t value = 0;  // duration of a span, value of a counter, id of a flow
  TraceArg arg = {};
};

namespace {

// One thread's events.
template <class Event>
class Ring {
 public:
  Ring(std::size_t slots, std::uint64_t thread_id)
      : slots_(std::bit_ceil(slots)), thread_id_(thread_id), words_(slots_.size() * kWords) {}

  void push(const Event& event) noexcept {
    const std::uint64_t n = written_.load(std::memory_order_relaxed);
    claimed_.store(n + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // pairs with the fence in collect()
    const std::array<std::uint64_t, kWords> words = {
        std::bit_cast<std::uint64_t>(event.name),
        static_cast<std::uint64_t>(event.phase) | std::uint64_t{event.track.id} << 8,
        event.at_ns,
        event.value,
        std::bit_cast<std::uint64_t>(event.arg.name),
        event.arg.value};
    auto* slot = &words_[slots_.at(n) * kWords];
    for (std::size_t i = 0; i < kWords; ++i)
      slot[i].store(words[i], std::memory_order_relaxed);
    written_.store(n + 1, std::memory_order_release);  // pairs with the load in collect()
  }

  // The newest events, oldest first; `lost` counts the ones overwritten before.
  std::vector<Event> collect(std::uint64_t& lost) const {
    const std::uint64_t end = written_.load(std::memory_order_acquire);  // pairs with push()
    const std::uint64_t begin = end > slots_.size() ? end - slots_.size() : 0;
    std::vector<Event> events;
    events.reserve(end - begin);
    for (std::uint64_t i = begin; i < end; ++i)
      events.push_back(load(i));
    std::atomic_thread_fence(std::memory_order_acquire);  // pairs with the fence in push()
    const std::uint64_t claimed = claimed_.load(std::memory_order_relaxed);
    const std::uint64_t first = claimed > slots_.size() ? claimed - slots_.size() : 0;
    const std::uint64_t torn =
        std::min<std::uint64_t>(first > begin ? first - begin : 0, events.size());
    events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(torn));
    lost += begin + torn;
    return events;
  }

  [[nodiscard]] std::uint64_t thread_id() const noexcept { return thread_id_; }
  std::string name;  // guarded by the tracer's mutex

 private:
  static constexpr std::size_t kWords = 6;
  struct Slots {
    explicit Slots(std::size_t count) : mask(count - 1) {}
    [[nodiscard]] std::size_t size() const noexcept { return mask + 1; }
    [[nodiscard]] std::size_t at(std::uint64_t n) const noexcept { return n & mask; }
    std::size_t mask;
  };

  Event load(std::uint64_t n) const noexcept {
    const auto* slot = &words_[slots_.at(n) * kWords];
    std::array<std::uint64_t, kWords> w{};
    for (std::size_t i = 0; i < kWords; ++i)
      w[i] = slot[i].load(std::memory_order_relaxed);
    return {.name = std::bit_cast<const char*>(w[0]),
            .phase = static_cast<Phase>(w[1] & 0xff),
            .track = {static_cast<std::uint32_t>(w[1] >> 8)},
            .at_ns = w[2],
            .value = w[3],
            .arg = {std::bit_cast<const char*>(w[4]), w[5]}};
  }

  const Slots slots_;
  const std::uint64_t thread_id_;
  std::atomic<std::uint64_t> claimed_{0};
  std::atomic<std::uint64_t> written_{0};
  std::vector<std::atomic<std::uint64_t>> words_;
};

}  // namespace

struct Tracer::Impl {
  using EventRing = Ring<Event>;
  std::string file;
  std::size_t events_per_thread = 0;
  std::string process_name;
  const std::uint64_t serial = next_serial();  // tells two tracers at one address apart
  std::mutex mutex;
  std::mutex flushing;  // two engines may close at once
  std::vector<std::unique_ptr<EventRing>> rings;
  std::vector<std::string> tracks;
  std::unordered_set<std::string> interned;
  std::uint64_t lost_threads = 0;

  // The ring of this thread: from a one-entry cache, or by search under the lock.
  EventRing* ring_of_thread() {
    struct Cache {
      std::uint64_t serial = 0;
      EventRing* ring = nullptr;
    };
    thread_local Cache cache;
    if (cache.serial != serial) cache = {serial, find_or_make_ring()};
    return cache.ring;
  }

  // A thread id that the kernel reuses simply continues the old ring: its first owner is gone.
  EventRing* find_or_make_ring() {
    const auto id = static_cast<std::uint64_t>(::gettid());
    const std::lock_guard lock(mutex);
    for (const auto& ring : rings)
      if (ring->thread_id() == id) return ring.get();
    if (rings.size() == kMaxRings) {
      ++lost_threads;
      return nullptr;
    }
    rings.push_back(std::make_unique<EventRing>(events_per_thread, id));
    return rings.back().get();
  }

  void append_event(std::string& out, const Event& event, std::uint64_t thread_id) const;
  void append_overlapping(std::string& out, const Event& event, std::uint64_t thread_id,
                          std::uint64_t id) const;
  void append_name(std::string& out, std::string_view kind, std::uint64_t thread_id,
                   std::string_view name) const;
  std::string render();
};

void Tracer::Impl::append_event(std::string& out, const Event& event,
                                std::uint64_t thread_id) const {
  constexpr std::array<char, 7> kPhaseLetters = {'X', 'i', 'C', 's', 't', 'f', 'b'};
  const auto to = std::back_inserter(out);
  const std::uint64_t row = event.track.id == 0 ? thread_id : kFirstTrackId + event.track.id;
  fmt::format_to(to, R"({{"ph":"{}","name":{},"cat":"crossdock","pid":{},"tid":{},"ts":{}.{:03})",
                 kPhaseLetters[static_cast<std::size_t>(event.phase)], json_string(event.name),
                 ::getpid(), row, event.at_ns / 1000, event.at_ns % 1000);
  switch (event.phase) {
    case Phase::kSpan:
      fmt::format_to(to, R"(,"dur":{}.{:03})", event.value / 1000, event.value % 1000);
      break;
    case Phase::kInstant:
      fmt::format_to(to, R"(,"s":"t")");
      break;
    case Phase::kOverlapping:  // by append_overlapping()
      break;
    case Phase::kCounter:
      fmt::format_to(to, R"(,"args":{{"value":{}}})", static_cast<std::int64_t>(event.value));
      break;
    case Phase::kFlowBegin:
    case Phase::kFlowStep:
      fmt::format_to(to, R"(,"id":"{:#x}")", event.value);
      break;
    case Phase::kFlowEnd:
      fmt::format_to(to, R"(,"id":"{:#x}","bp":"e")", event.value);
      break;
  }
  if (event.arg.name != nullptr)
    fmt::format_to(to, R"(,"args":{{{}:{}}})", json_string(event.arg.name), event.arg.value);
  out += "},\n";
}

// A pair of events that belong together by an id of this process ("id2": the id of another process
// is another one, also after a merge).
void Tracer::Impl::append_overlapping(std::string& out, const Event& event, std::uint64_t thread_id,
                                      std::uint64_t id) const {
  const auto append = [&](char letter, std::uint64_t at_ns, std::string_view args) {
    fmt::format_to(std::back_inserter(out),
                   R"({{"ph":"{}","name":{},"cat":"crossdock","pid":{},"tid":{},"ts":{}.{:03},)"
                   R"("id2":{{"local":"{:#x}"}}{}}},)"
                   "\n",
                   letter, json_string(event.name), ::getpid(), thread_id, at_ns / 1000,
                   at_ns % 1000, id, args);
  };
  append('b', event.at_ns,
         event.arg.name == nullptr
             ? ""
             : fmt::format(R"(,"args":{{{}:{}}})", json_string(event.arg.name), event.arg.value));
  append('e', event.at_ns + event.value, "");
}

void Tracer::Impl::append_name(std::string& out, std::string_view kind, std::uint64_t thread_id,
                               std::string_view name) const {
  fmt::format_to(std::back_inserter(out),
                 R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}},)"
                 "\n",
                 kind, ::getpid(), thread_id, json_string(name));
}

std::string Tracer::Impl::render() {
  std::string out = "{\"traceEvents\":[\n";
  std::uint64_t lost = 0, pairs = 0;
  const std::lock_guard lock(mutex);
  append_name(out, "process_name", 0, process_name);
  for (std::size_t i = 0; i < tracks.size(); ++i)
    append_name(out, "thread_name", kFirstTrackId + i + 1, tracks[i]);
  for (const auto& ring : rings) {
    if (!ring->name.empty()) append_name(out, "thread_name", ring->thread_id(), ring->name);
    for (const Event& event : ring->collect(lost)) {
      if (event.phase == Phase::kOverlapping)
        append_overlapping(out, event, ring->thread_id(), ++pairs);
      else
        append_event(out, event, ring->thread_id());
    }
  }
  out.erase(out.rfind(','), 1);
  fmt::format_to(std::back_inserter(out),
                 R"(],"displayTimeUnit":"ns","otherData":{{"lost_events":{},"lost_threads":{},)"
                 R"("clock_offset_ns":{}}}}})"
                 "\n",
                 lost, lost_threads, wall_ns() - now_ns());  // lines up traces of several hosts
  return out;
}

namespace {

// A tracer of a process: a forked child begins a timeline of its own.
struct KeptTracer {
  pid_t process;
  std::shared_ptr<Tracer> tracer;
  const KeptTracer* next;
};
// The newest first. Without a lock: a child that is forked while another thread has it would wait
// for ever. Never destroyed: engines of static lifetime may end after anything here would.
constinit std::atomic<const KeptTracer*> kept_tracers{nullptr};

// That of this process for `file`, among those from `kept` on and before `end`.
std::shared_ptr<Tracer> find_tracer(const KeptTracer* kept, const KeptTracer* end,
                                    const std::string& file) {
  for (; kept != end; kept = kept->next)
    if (kept->process == ::getpid() && kept->tracer->file() == file) return kept->tracer;
  return nullptr;
}

}  // namespace

Tracer::Tracer(TracerOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->file = expand_pid(std::move(options.file));
  impl_->events_per_thread = std::max<std::size_t>(options.events_per_thread, 1);
  impl_->process_name = std::move(options.process_name);
  on_.store(!impl_->file.empty(), std::memory_order_relaxed);
}

std::shared_ptr<Tracer> Tracer::of_process(TracerOptions options) {
  if (options.file.empty()) return std::make_shared<Tracer>(std::move(options));
  options.file = expand_pid(std::move(options.file));
  const KeptTracer* const newest = kept_tracers.load(std::memory_order_acquire);
  if (auto tracer = find_tracer(newest, nullptr, options.file)) return tracer;
  auto mine = std::make_unique<KeptTracer>(
      KeptTracer{::getpid(), std::make_shared<Tracer>(std::move(options)), newest});
  while (!kept_tracers.compare_exchange_weak(mine->next, mine.get(), std::memory_order_acq_rel,
                                             std::memory_order_acquire))
    if (auto tracer = find_tracer(mine->next, newest, mine->tracer->file())) {
      mine->tracer->on_.store(false, std::memory_order_relaxed);  // it has nothing to write
      return tracer;
    }
  return mine.release()->tracer;
}

Tracer::~Tracer() {
  (void)flush().ok();
}

const std::string& Tracer::file() const noexcept {
  return impl_->file;
}

// noexcept: running out of memory for the first event of a thread loses its events, nothing else.
void Tracer::record(const Event& event) noexcept {
  try {
    if (auto* ring = impl_->ring_of_thread()) ring->push(event);
  } catch (const std::bad_alloc&) {
    on_.store(false, std::memory_order_relaxed);
  }
}

void Tracer::span(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns, TraceArg arg,
                  TraceTrack track) noexcept {
  if (!on()) return;
  record({.name = name,
          .phase = Phase::kSpan,
          .track = track,
          .at_ns = begin_ns,
          .value = end_ns > begin_ns ? end_ns - begin_ns : 0,
          .arg = arg});
}

void Tracer::overlapping(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns,
                         TraceArg arg) noexcept {
  if (!on()) return;
  record({.name = name,
          .phase = Phase::kOverlapping,
          .at_ns = begin_ns,
          .value = end_ns > begin_ns ? end_ns - begin_ns : 0,
          .arg = arg});
}

void Tracer::instant(const char* name, TraceArg arg, TraceTrack track) noexcept {
  if (!on()) return;
  record({.name = name, .phase = Phase::kInstant, .track = track, .at_ns = now_ns(), .arg = arg});
}

void Tracer::counter(const char* name, std::int64_t value) noexcept {
  if (!on()) return;
  record({.name = name,
          .phase = Phase::kCounter,
          .at_ns = now_ns(),
          .value = static_cast<std::uint64_t>(value)});
}

void Tracer::flow_begin(const char* name, std::uint64_t id) noexcept {
  if (on()) record({.name = name, .phase = Phase::kFlowBegin, .at_ns = now_ns(), .value = id});
}
void Tracer::flow_step(const char* name, std::uint64_t id) noexcept {
  if (on()) record({.name = name, .phase = Phase::kFlowStep, .at_ns = now_ns(), .value = id});
}
void Tracer::flow_end(const char* name, std::uint64_t id) noexcept {
  if (on()) record({.name = name, .phase = Phase::kFlowEnd, .at_ns = now_ns(), .value = id});
}

TraceTrack Tracer::track(std::string_view name) {
  if (!on()) return {};
  const std::lock_guard lock(impl_->mutex);
  impl_->tracks.emplace_back(name);
  return {static_cast<std::uint32_t>(impl_->tracks.size())};
}

const char* Tracer::intern(std::string_view text) {
  if (!on()) return "";
  const std::lock_guard lock(impl_->mutex);
  return impl_->interned.emplace(text).first->c_str();
}

void Tracer::name_thread(std::string_view name) {
  if (!on()) return;
  auto* ring = impl_->ring_of_thread();
  if (ring == nullptr) return;
  const std::lock_guard lock(impl_->mutex);
  ring->name = name;
}

Result<> Tracer::flush() {
  if (!on()) return {};
  const std::lock_guard lock(impl_->flushing);
  return replace_file(impl_->file, temporary_of(impl_->file, impl_->serial), impl_->render());
}

Result<> Tracer::check_writable() const {
  if (!on()) return {};
  const std::lock_guard lock(impl_->flushing);
  const std::string temporary = temporary_of(impl_->file, impl_->serial);
  FILE* file = std::fopen(temporary.c_str(), "we");
  if (file == nullptr) return unwritable(errno, impl_->file);
  std::fclose(file);
  std::remove(temporary.c_str());
  return {};
}

}  // namespace crossdock::base
