// SPDX-License-Identifier: Apache-2.0
#include "base/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/prometheus_parser.hpp"

namespace crossdock::base {
namespace {

using Layout = HistogramLayout;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

TEST(HistogramLayout, BucketsTileAllValues) {
  EXPECT_EQ(Layout::lowest(0), 0u);
  for (unsigned i = 0; i < Layout::kBuckets; ++i) {
    EXPECT_EQ(Layout::index(Layout::lowest(i)), i);
    EXPECT_EQ(Layout::index(Layout::highest(i)), i);
    if (i + 1 < Layout::kBuckets) {
      ASSERT_EQ(Layout::highest(i) + 1, Layout::lowest(i + 1));
    }
  }
  EXPECT_EQ(Layout::highest(Layout::kBuckets - 1), kMax);
  EXPECT_EQ(Layout::index(kMax), Layout::kBuckets - 1);
}

TEST(Histogram, QuantilesAreWithinABucketOfTheTruth) {
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> values;
  Histogram histogram;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(random() >> (random() % 60));
    histogram.record(values.back());
  }
  std::sort(values.begin(), values.end());
  const auto shot = histogram.snapshot();
  EXPECT_EQ(shot.count(), values.size());
  EXPECT_EQ(shot.min(), values.front());
  EXPECT_EQ(shot.max(), values.back());
  for (const double q : {0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    const auto rank = std::max<std::size_t>(1, static_cast<std::size_t>(std::ceil(q * 20000)));
    const auto truth = static_cast<double>(values[rank - 1]);
    EXPECT_NEAR(static_cast<double>(shot.quantile(q)), truth, truth / 32 + 1) << q;
  }
}

TEST(Histogram, EmptyAndSingle) {
  HistogramSnapshot shot;
  EXPECT_EQ(shot.quantile(0.5), 0u);
  EXPECT_EQ(shot.min(), 0u);
  EXPECT_EQ(shot.mean(), 0.0);
  shot.record(12345);
  EXPECT_EQ(shot.quantile(0), 12345u);
  EXPECT_EQ(shot.quantile(0.5), 12345u);
  EXPECT_EQ(shot.quantile(1), 12345u);
  EXPECT_EQ(shot.mean(), 12345.0);
}

TEST(Histogram, MergeIsTheSameAsRecordingInOne) {
  HistogramSnapshot a;
  HistogramSnapshot b;
  HistogramSnapshot both;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    (i % 3 == 0 ? a : b).record(i * i);
    both.record(i * i);
  }
  a.merge(b);
  EXPECT_EQ(a.count(), both.count());
  EXPECT_EQ(a.sum(), both.sum());
  for (const double q : {0.1, 0.5, 0.9, 0.99})
    EXPECT_EQ(a.quantile(q), both.quantile(q));
}

TEST(Histogram, CountUpToIsExactAtPowersOfTwo) {
  HistogramSnapshot shot;
  for (std::uint64_t i = 0; i < 5000; ++i)
    shot.record(i);
  for (const std::uint64_t bound : {0u, 1u, 3u, 31u, 63u, 1023u, 4095u})
    EXPECT_EQ(shot.count_up_to(bound), bound + 1);
}

TEST(Metrics, ManyThreadsLoseNothing) {
  Registry registry;
  const auto counter = registry.counter({"c_total", "c"});
  const auto gauge = registry.gauge({"g", "g"});
  const auto histogram = registry.histogram({"h", "h"});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < 10000; ++i) {
        counter->add();
        gauge->add(i % 2 == 0 ? 1 : -1);
        histogram->record(i);
      }
    });
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(counter->value(), 40000u);
  EXPECT_EQ(gauge->value(), 0);
  EXPECT_EQ(histogram->snapshot().count(), 40000u);
  EXPECT_EQ(histogram->snapshot().max(), 9999u);
}

TEST(Registry, SameNameAndLabelsIsTheSameMetric) {
  Registry registry;
  const MetricInfo info{"bytes_total", "Bytes."};
  EXPECT_EQ(registry.counter(info, {{"peer", "a"}}), registry.counter(info, {{"peer", "a"}}));
  EXPECT_NE(registry.counter(info, {{"peer", "a"}}), registry.counter(info, {{"peer", "b"}}));
}

TEST(Registry, RendersWhatAStrictParserReads) {
  Registry registry;
  registry.counter({"x_bytes_total", "Bytes\nmoved \\ all."}, {{"peer", "a\"b\\c\nd"}})->add(7);
  registry.counter({"x_bytes_total", ""}, {{"peer", "e"}})->add(8);
  registry.gauge({"x_open", "Open."})->set(-5);
  const auto histogram =
      registry.histogram({.name = "x_seconds", .help = "Time.", .scale = 1e-9}, {{"op", "read"}});
  histogram->record(1);
  histogram->record(3'000'000'000);
  histogram->record(kMax / 2);
  const auto parsed = support::parse_prometheus(registry.prometheus());
  ASSERT_TRUE(parsed.error.empty()) << parsed.error << "\n" << registry.prometheus();

  EXPECT_EQ(parsed.types.at("x_bytes_total"), "counter");
  EXPECT_EQ(parsed.help.at("x_bytes_total"), "Bytes\nmoved \\ all.");
  EXPECT_EQ(parsed.value("x_bytes_total", {{"peer", "a\"b\\c\nd"}}), 7);
  EXPECT_EQ(parsed.value("x_bytes_total", {{"peer", "e"}}), 8);
  EXPECT_EQ(parsed.value("x_open", {}), -5);
  EXPECT_EQ(parsed.types.at("x_seconds"), "histogram");
  EXPECT_EQ(parsed.value("x_seconds_count", {{"op", "read"}}), 3);
  EXPECT_EQ(parsed.value("x_seconds_bucket", {{"op", "read"}, {"le", "+Inf"}}), 3);
  EXPECT_EQ(parsed.value("x_seconds_bucket", {{"op", "read"}, {"le", "0"}}), 0);
  // Cumulative, and 3 s lies between 2^30-1 and 2^32-1 ns.
  EXPECT_EQ(parsed.value("x_seconds_bucket", {{"op", "read"}, {"le", "1.073741823"}}), 1);
  EXPECT_EQ(parsed.value("x_seconds_bucket", {{"op", "read"}, {"le", "4.294967295"}}), 2);
}

TEST(Registry, DropForgetsThePeer) {
  Registry registry;
  const auto held = registry.counter({"a_total", "a"}, {{"peer", "x"}});
  registry.counter({"a_total", "a"}, {{"peer", "y"}})->add();
  registry.gauge({"b", "b"}, {{"peer", "x"}})->set(1);
  EXPECT_EQ(registry.drop("peer", "x"), 2u);
  held->add();
  const auto parsed = support::parse_prometheus(registry.prometheus());
  EXPECT_EQ(parsed.samples.size(), 1u);
  EXPECT_EQ(parsed.value("a_total", {{"peer", "y"}}), 1);
}

TEST(RegistryDeathTest, MisuseIsABug) {
  Registry registry;
  registry.counter({"a", "a"});
  EXPECT_DEATH(registry.gauge({"a", "a"}), "another kind");
  EXPECT_DEATH(registry.counter({"1a", "a"}), "malformed metric name 1a");
  EXPECT_DEATH(registry.counter({"b", "b"}, {{"x-y", ""}}), "malformed label name x-y");
}

// The parser is a test tool of its own: it must refuse what Prometheus refuses.
TEST(PrometheusParser, RefusesMalformedText) {
  for (const auto* text : {"a", "a 1 ", "a{b=\"c\" 1\n", "a{b=c} 1\n", "a{1b=\"c\"} 1\n", "1a 2\n",
                           "# TYPE a nothing\na 1\n", "a 1\n", "# TYPE a counter\na x\n",
                           "# TYPE a counter\na{b=\"\\q\"} 1\n", "# TYPE a counter\na 1\na 1\n"})
    EXPECT_FALSE(support::parse_prometheus(text).error.empty()) << text;
}

}  // namespace
}  // namespace crossdock::base
