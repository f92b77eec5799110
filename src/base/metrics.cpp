// Histogram arithmetic and the Prometheus renderer. See the header for threads.
// SPDX-License-Identifier: Apache-2.0
#include "base/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <iterator>

#include "base/check.hpp"

namespace crossdock::base {
namespace {

// Powers of two at which the rendered histograms have a bucket: fixed, because series that come and
// go break rate(). 2^40 ns is 18 minutes; 2^40 bytes is 1 TiB.
constexpr unsigned kFirstPower = 0;
constexpr unsigned kLastPower = 40;
constexpr unsigned kPowerStep = 2;

constexpr std::array<std::string_view, 3> kKindNames = {"counter", "gauge", "histogram"};

bool is_name(std::string_view name, bool colons) {
  const auto good = [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (colons && c == ':') ||
           (c >= '0' && c <= '9');
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), good) &&
         !(name.front() >= '0' && name.front() <= '9');
}

void append_escaped(std::string& out, std::string_view text, bool quotes) {
  for (const char c : text) {
    if (c == '\\')
      out += "\\\\";
    else if (c == '\n')
      out += "\\n";
    else if (quotes && c == '"')
      out += "\\\"";
    else
      out += c;
  }
}

// {a="x",b="y"} with an optional last pair; nothing when there are no labels.
std::string label_text(const Labels& labels, std::string_view last_name = {},
                       std::string_view last_value = {}) {
  std::string out;
  const auto append = [&](std::string_view name, std::string_view value) {
    out += out.empty() ? '{' : ',';
    out += name;
    out += "=\"";
    append_escaped(out, value, true);
    out += '"';
  };
  for (const auto& [name, value] : labels)
    append(name, value);
  if (!last_name.empty()) append(last_name, last_value);
  if (!out.empty()) out += '}';
  return out;
}

template <class T>
std::string number_text(T value, double scale) {
  if (scale == 1) return fmt::format("{}", value);
  return fmt::format("{:.12g}", static_cast<double>(value) * scale);
}

struct Renderer {
  std::string& out;
  std::string_view name;
  double scale;
  const Labels& labels;

  void line(std::string_view suffix, std::string_view label, std::string_view value) const {
    fmt::format_to(std::back_inserter(out), "{}{}{} {}\n", name, suffix, label, value);
  }
  void operator()(const std::shared_ptr<Counter>& counter) const {
    line("", label_text(labels), number_text(counter->value(), scale));
  }
  void operator()(const std::shared_ptr<Gauge>& gauge) const {
    line("", label_text(labels), number_text(gauge->value(), scale));
  }
  void operator()(const std::shared_ptr<Histogram>& histogram) const {
    const HistogramSnapshot shot = histogram->snapshot();
    for (unsigned power = kFirstPower; power <= kLastPower; power += kPowerStep) {
      const std::uint64_t bound = (std::uint64_t{1} << power) - 1;
      line("_bucket", label_text(labels, "le", number_text(bound, scale)),
           number_text(shot.count_up_to(bound), 1));
    }
    line("_bucket", label_text(labels, "le", "+Inf"), number_text(shot.count(), 1));
    line("_sum", label_text(labels), number_text(shot.sum(), scale));
    line("_count", label_text(labels), number_text(shot.count(), 1));
  }
};

void lower_to(std::atomic<std::uint64_t>& target, std::uint64_t value) noexcept {
  auto seen = target.load(std::memory_order_relaxed);
  while (value < seen && !target.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void raise_to(std::atomic<std::uint64_t>& target, std::uint64_t value) noexcept {
  auto seen = target.load(std::memory_order_relaxed);
  while (value > seen && !target.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void HistogramSnapshot::record(std::uint64_t value, std::uint64_t times) noexcept {
  if (times == 0) return;
  count_ += times;
  sum_ += value * times;
  min_ = std::min(min_, value);
  max_ = std::max(max_, value);
  buckets_[HistogramLayout::index(value)] += times;
}

void HistogramSnapshot::merge(const HistogramSnapshot& other) noexcept {
  count_ += other.count_;
  sum_ += other.sum_;
  min_ = std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  for (std::size_t i = 0; i < buckets_.size(); ++i)
    buckets_[i] += other.buckets_[i];
}

double HistogramSnapshot::mean() const noexcept {
  return count_ == 0 ? 0 : static_cast<double>(sum_) / static_cast<double>(count_);
}

std::uint64_t HistogramSnapshot::quantile(double q) const noexcept {
  if (count_ == 0) return 0;
  const double wanted = std::ceil(std::clamp(q, 0.0, 1.0) * static_cast<double>(count_));
  const auto rank = std::clamp<std::uint64_t>(static_cast<std::uint64_t>(wanted), 1, count_);
  if (rank == 1) return min();
  if (rank == count_) return max_;
  std::uint64_t below = 0;
  for (unsigned i = 0; i < HistogramLayout::kBuckets; ++i) {
    below += buckets_[i];
    if (below < rank) continue;
    const std::uint64_t low = HistogramLayout::lowest(i);
    return std::clamp(low + (HistogramLayout::highest(i) - low) / 2, min_, max_);
  }
  return max_;
}

std::uint64_t HistogramSnapshot::count_up_to(std::uint64_t value) const noexcept {
  const unsigned last = HistogramLayout::index(value);
  std::uint64_t total = 0;
  for (unsigned i = 0; i <= last; ++i)
    total += buckets_[i];
  return total;
}

void Histogram::record(std::uint64_t value) noexcept {
  buckets_[HistogramLayout::index(value)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
  lower_to(min_, value);
  raise_to(max_, value);
}

HistogramSnapshot Histogram::snapshot() const {
  HistogramSnapshot shot;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    shot.buckets_[i] = buckets_[i].load(std::memory_order_relaxed);
    shot.count_ += shot.buckets_[i];
  }
  shot.sum_ = sum_.load(std::memory_order_relaxed);
  shot.min_ = min_.load(std::memory_order_relaxed);
  shot.max_ = max_.load(std::memory_order_relaxed);
  return shot;
}

template <class T>
std::shared_ptr<T> Registry::find_or_make(const MetricInfo& info, const Labels& labels) {
  CROSSDOCK_CHECK(is_name(info.name, true), "malformed metric name " + info.name);
  for (const auto& [label, value] : labels)
    CROSSDOCK_CHECK(is_name(label, false) && label != "le", "malformed label name " + label);
  const std::size_t kind = Metric(std::shared_ptr<T>()).index();
  const std::lock_guard lock(mutex_);
  Family& family =
      families_
          .try_emplace(info.name,
                       Family{.help = info.help, .scale = info.scale, .kind = kind, .series = {}})
          .first->second;
  CROSSDOCK_CHECK(family.kind == kind, info.name + " already is a metric of another kind");
  const auto it = family.series.find(labels);
  if (it != family.series.end()) return std::get<std::shared_ptr<T>>(it->second);
  auto metric = std::make_shared<T>();
  family.series.emplace(labels, metric);
  return metric;
}

std::shared_ptr<Counter> Registry::counter(const MetricInfo& info, const Labels& labels) {
  return find_or_make<Counter>(info, labels);
}
std::shared_ptr<Gauge> Registry::gauge(const MetricInfo& info, const Labels& labels) {
  return find_or_make<Gauge>(info, labels);
}
std::shared_ptr<Histogram> Registry::histogram(const MetricInfo& info, const Labels& labels) {
  return find_or_make<Histogram>(info, labels);
}

std::size_t Registry::drop(std::string_view label, std::string_view value) {
  const auto matches = [&](const auto& series) {
    const Labels& labels = series.first;
    return std::any_of(labels.begin(), labels.end(), [&](const auto& pair) {
      return pair.first == label && pair.second == value;
    });
  };
  std::size_t gone = 0;
  const std::lock_guard lock(mutex_);
  for (auto& [name, family] : families_)
    gone += std::erase_if(family.series, matches);
  return gone;
}

std::string Registry::prometheus() const {
  std::string out;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, family] : families_) {
    if (family.series.empty()) continue;
    fmt::format_to(std::back_inserter(out), "# HELP {} ", name);
    append_escaped(out, family.help, false);
    fmt::format_to(std::back_inserter(out), "\n# TYPE {} {}\n", name, kKindNames[family.kind]);
    for (const auto& [labels, metric] : family.series)
      std::visit(Renderer{out, name, family.scale, labels}, metric);
  }
  return out;
}

}  // namespace crossdock::base
