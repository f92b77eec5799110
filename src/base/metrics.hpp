// Metrics: counters, gauges and histograms with labels, and their Prometheus text. A Registry is an
// object that an engine owns; nothing is global. Updating a metric is lock-free (relaxed atomics);
// making one and rendering take the registry's lock. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace crossdock::base {

// Only grows. A cache line of its own, so that two hot counters do not disturb each other.
class alignas(64) Counter {
 public:
  void add(std::uint64_t n = 1) noexcept { value_.fetch_add(n, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t value() const noexcept {
    return value_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> value_{0};
};

class alignas(64) Gauge {
 public:
  void set(std::int64_t value) noexcept { value_.store(value, std::memory_order_relaxed); }
  void add(std::int64_t n) noexcept { value_.fetch_add(n, std::memory_order_relaxed); }
  [[nodiscard]] std::int64_t value() const noexcept {
    return value_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::int64_t> value_{0};
};

// Buckets of a log-linear histogram over all 64-bit values: each power of two is cut into 32 equal
// parts, so that a bucket is at most 1/32 (3.2 %) of its values wide; values below 32 are exact.
struct HistogramLayout {
  static constexpr unsigned kSubBits = 5;
  static constexpr unsigned kSub = 1u << kSubBits;
  static constexpr unsigned kBuckets = (64 - kSubBits + 1) * kSub;

  static constexpr unsigned index(std::uint64_t value) noexcept {
    if (value < kSub) return static_cast<unsigned>(value);
    const auto shift = static_cast<unsigned>(std::bit_width(value)) - 1 - kSubBits;
    return (shift << kSubBits) + static_cast<unsigned>(value >> shift);
  }
  // Smallest and largest value of a bucket.
  static constexpr std::uint64_t lowest(unsigned index) noexcept {
    if (index < 2 * kSub) return index;
    const unsigned shift = (index >> kSubBits) - 1;
    return static_cast<std::uint64_t>((index & (kSub - 1)) + kSub) << shift;
  }
  static constexpr std::uint64_t highest(unsigned index) noexcept {
    return index + 1 == kBuckets ? ~std::uint64_t{0} : lowest(index + 1) - 1;
  }
};

// What a histogram held at one moment; a plain value that adds up over threads and processes.
class HistogramSnapshot {
 public:
  HistogramSnapshot() : buckets_(HistogramLayout::kBuckets, 0) {}
  void record(std::uint64_t value, std::uint64_t times = 1) noexcept;
  void merge(const HistogramSnapshot& other) noexcept;

  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] std::uint64_t sum() const noexcept { return sum_; }
  [[nodiscard]] std::uint64_t min() const noexcept { return count_ == 0 ? 0 : min_; }
  [[nodiscard]] std::uint64_t max() const noexcept { return max_; }
  [[nodiscard]] double mean() const noexcept;
  // The value below which a share `q` (0 to 1) of the records lies, within 1/32 of it; 0 when
  // empty.
  [[nodiscard]] std::uint64_t quantile(double q) const noexcept;
  // Records that are at most `value`, where `value` + 1 is a power of two.
  [[nodiscard]] std::uint64_t count_up_to(std::uint64_t value) const noexcept;

 private:
  friend class Histogram;
  std::uint64_t count_ = 0;
  std::uint64_t sum_ = 0;
  std::uint64_t min_ = ~std::uint64_t{0};
  std::uint64_t max_ = 0;
  std::vector<std::uint64_t> buckets_;
};

class Histogram {
 public:
  // About 5 ns; 15 KiB of memory a histogram.
  void record(std::uint64_t value) noexcept;
  // Not a cut in time: records made meanwhile may be counted in part.
  [[nodiscard]] HistogramSnapshot snapshot() const;

 private:
  std::atomic<std::uint64_t> sum_{0};
  std::atomic<std::uint64_t> min_{~std::uint64_t{0}};
  std::atomic<std::uint64_t> max_{0};
  std::array<std::atomic<std::uint64_t>, HistogramLayout::kBuckets> buckets_{};
};

using Labels = std::vector<std::pair<std::string, std::string>>;

struct MetricInfo {
  std::string name;  // [a-zA-Z_:][a-zA-Z0-9_:]*; counters end in _total
  std::string help;
  // Multiplies values when rendered: 1e-9 shows nanoseconds as the seconds Prometheus wants.
  double scale = 1;
};

class Registry {
 public:
  Registry() = default;
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // The metric of that name and those labels, made at the first call. The same name as another
  // kind, or a malformed name, is a library bug. Label values may be any text.
  std::shared_ptr<Counter> counter(const MetricInfo& info, const Labels& labels = {});
  std::shared_ptr<Gauge> gauge(const MetricInfo& info, const Labels& labels = {});
  std::shared_ptr<Histogram> histogram(const MetricInfo& info, const Labels& labels = {});

  // Stops showing every metric with this label, as when a peer is closed; holders may go on using
  // theirs. Returns how many went.
  std::size_t drop(std::string_view label, std::string_view value);

  // Prometheus text exposition format 0.0.4.
  [[nodiscard]] std::string prometheus() const;

 private:
  using Metric =
      std::variant<std::shared_ptr<Counter>, std::shared_ptr<Gauge>, std::shared_ptr<Histogram>>;
  struct Family {
    std::string help;
    double scale = 1;
    std::size_t kind = 0;  // index into Metric
    std::map<Labels, Metric> series;
  };
  template <class T>
  std::shared_ptr<T> find_or_make(const MetricInfo& info, const Labels& labels);

  mutable std::mutex mutex_;
  std::map<std::string, Family, std::less<>> families_;
};

}  // namespace crossdock::base
