// Words for people: who a fiber is, where it waits, and the groups of a deadlock report.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <fmt/format.h>
#include <map>
#include <string>

#include "twin/runtime.hpp"

namespace crossdock::twin {

namespace {

constexpr std::size_t kMaxGroups = 40;

std::string waiting_operation(const Fiber& fiber) {
  const WaitNote& note = fiber.note;
  if (fiber.state == FiberState::kReady)
    return fmt::format("runnable, last waited: {} at {}", note.what, describe(note.site));
  std::string object;
  if (std::strncmp(note.what, "bar.", 4) == 0 || std::strcmp(note.what, "__syncthreads") == 0) {
    const NamedBarrier& barrier = fiber.cta->barriers[note.object & 15];
    object = fmt::format(" {} ({} of {} threads)", note.object, barrier.arrived, barrier.count);
  } else if (std::strcmp(note.what, "mbarrier.try_wait") == 0) {
    object = fmt::format(" [shared+{:#x}] parity {}", note.object, note.detail);
    for (const Mbarrier& barrier : fiber.cta->mbarriers)
      if (barrier.valid && barrier.offset == note.object)
        object +=
            fmt::format(" (phase {}, {} of {} arrivals to come, {} bytes to come)", barrier.phase,
                        barrier.pending, barrier.expected, barrier.transactions);
  } else if (note.object != 0) {
    object = fmt::format(" [{:#x}]", note.object);
  }
  return fmt::format("{}{} at {}", note.what, object, describe(note.site));
}

// Thread indices as ranges: "0-31,64".
class Ranges {
 public:
  void add(std::uint32_t t) {
    ++count_;
    if (count_ > 1 && t == last_ + 1) {
      last_ = t;
      return;
    }
    flush();
    first_ = last_ = t;
    open_ = true;
  }
  std::string text() {
    flush();
    return text_;
  }
  [[nodiscard]] std::uint32_t count() const { return count_; }

 private:
  void flush() {
    if (!open_) return;
    open_ = false;
    if (!text_.empty()) text_ += ',';
    text_ += first_ == last_ ? fmt::format("{}", first_) : fmt::format("{}-{}", first_, last_);
  }
  std::string text_;
  std::uint32_t first_ = 0;
  std::uint32_t last_ = 0;
  std::uint32_t count_ = 0;
  bool open_ = false;
};

}  // namespace

std::string describe(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return fmt::format("{}:{}", slash != nullptr ? slash + 1 : site.file, site.line);
}

std::string describe(const Fiber& fiber) {
  const std::uint32_t thread = fiber.thread.thread_index;
  return fmt::format("rank {} cta {} thread {} (warp {} lane {})", fiber.thread.rank,
                     fiber.thread.block_index, thread, thread / 32, fiber.lane);
}

std::string describe_waiting(const std::vector<Stream>& streams) {
  std::map<std::string, Ranges> groups;
  std::uint64_t done = 0;
  std::uint64_t total = 0;
  for (const Stream& stream : streams) {
    if (stream.active == nullptr) continue;
    for (const Cta& cta : stream.active->ctas) {
      total += cta.size;
      for (std::uint32_t i = 0; i < cta.size; ++i) {
        const Fiber& fiber = cta.fibers[i];
        if (fiber.state == FiberState::kDone) {
          ++done;
          continue;
        }
        groups[fmt::format("rank {} cta {} of {}: {}", cta.rank, cta.index, cta.kernel->config.name,
                           waiting_operation(fiber))]
            .add(i);
      }
    }
  }
  std::string text = fmt::format("{} of {} threads have ended; the others:", done, total);
  std::size_t shown = 0;
  for (auto& [what, ranges] : groups) {
    if (shown++ == kMaxGroups) {
      text += fmt::format("\n  ... and {} more groups", groups.size() - kMaxGroups);
      break;
    }
    const std::uint32_t count = ranges.count();
    text +=
        fmt::format("\n  {} [{} thread{}: {}]", what, count, count == 1 ? "" : "s", ranges.text());
  }
  return text;
}

}  // namespace crossdock::twin
