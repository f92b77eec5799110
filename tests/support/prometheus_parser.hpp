// A strict reader of Prometheus text format 0.0.4 for tests: each sample needs a TYPE before it,
// each line must end, no sample may repeat, histograms must be cumulative and consistent.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace crossdock::support {

struct PrometheusText {
  using LabelMap = std::map<std::string, std::string>;
  std::string error;  // empty when all of it is well formed
  std::map<std::string, std::string> types;
  std::map<std::string, std::string> help;
  std::map<std::pair<std::string, LabelMap>, double> samples;

  double value(const std::string& name, const LabelMap& labels) const {
    const auto it = samples.find({name, labels});
    return it == samples.end() ? std::nan("") : it->second;
  }
};

namespace detail {

class PrometheusReader {
 public:
  explicit PrometheusReader(std::string_view text) : rest_(text) {}

  PrometheusText run() {
    try {
      while (!rest_.empty())
        line();
      check_histograms();
    } catch (const std::runtime_error& problem) {
      out_.error = problem.what();
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error(why + " before: " + std::string(rest_.substr(0, 40)));
  }
  bool take(std::string_view token) {
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }
  void need(std::string_view token) {
    if (!take(token)) fail("expected '" + std::string(token) + "'");
  }
  std::string until(char end) {
    const auto at = rest_.find(end);
    if (at == std::string_view::npos) fail(std::string("missing '") + end + "'");
    std::string part(rest_.substr(0, at));
    rest_.remove_prefix(at);
    return part;
  }
  std::string name(bool colons) {
    std::size_t n = 0;
    const auto good = [&](char c) {
      return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || (colons && c == ':') ||
             (n > 0 && std::isdigit(static_cast<unsigned char>(c)) != 0);
    };
    while (n < rest_.size() && good(rest_[n]))
      ++n;
    if (n == 0) fail("expected a name");
    std::string out(rest_.substr(0, n));
    rest_.remove_prefix(n);
    return out;
  }
  std::string quoted() {
    need("\"");
    std::string out;
    while (!take("\"")) {
      if (rest_.empty() || rest_.front() == '\n') fail("unterminated label value");
      if (take("\\\\"))
        out += '\\';
      else if (take("\\\""))
        out += '"';
      else if (take("\\n"))
        out += '\n';
      else if (rest_.front() == '\\')
        fail("unknown escape");
      else
        out += rest_.front(), rest_.remove_prefix(1);
    }
    return out;
  }
  static std::string unescape_help(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool escaped = text[i] == '\\' && i + 1 < text.size();
      if (escaped) ++i;
      out += escaped && text[i] == 'n' ? '\n' : text[i];
    }
    return out;
  }

  void line() {
    if (take("# HELP ")) {
      const auto family = name(true);
      need(" ");
      out_.help[family] = unescape_help(until('\n'));
    } else if (take("# TYPE ")) {
      const auto family = name(true);
      need(" ");
      const auto type = until('\n');
      static const std::set<std::string> kTypes = {"counter", "gauge", "histogram"};
      if (!kTypes.contains(type)) fail("unknown type " + type);
      if (!out_.types.emplace(family, type).second) fail("second TYPE of " + family);
    } else {
      sample();
    }
    need("\n");
  }

  void sample() {
    const auto metric = name(true);
    if (!has_type(metric)) fail("no TYPE for " + metric);
    PrometheusText::LabelMap labels;
    if (take("{")) {
      do {
        const auto label = name(false);
        need("=");
        if (!labels.emplace(label, quoted()).second) fail("second label " + label);
      } while (take(","));
      need("}");
    }
    need(" ");
    const auto number = until('\n');
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);
    if (number.empty() || *end != '\0') fail("'" + number + "' is no number");
    if (!out_.samples.emplace(std::pair(metric, labels), value).second) fail("repeated " + metric);
  }

  bool has_type(const std::string& metric) const {
    if (out_.types.contains(metric)) return out_.types.at(metric) != "histogram";
    for (const std::string_view suffix : {"_bucket", "_sum", "_count"}) {
      if (!metric.ends_with(suffix)) continue;
      const auto it = out_.types.find(metric.substr(0, metric.size() - suffix.size()));
      if (it != out_.types.end() && it->second == "histogram") return true;
    }
    return false;
  }

  void check_histograms() const {
    // series without le -> (le -> count)
    std::map<std::pair<std::string, PrometheusText::LabelMap>, std::map<double, double>> all;
    for (const auto& [key, value] : out_.samples) {
      auto [metric, labels] = key;
      if (!metric.ends_with("_bucket") || !labels.contains("le")) continue;
      const double le = std::strtod(labels.at("le").c_str(), nullptr);
      labels.erase("le");
      all[{metric.substr(0, metric.size() - 7), labels}][le] = value;
    }
    for (const auto& [key, buckets] : all) {
      double last = 0;
      for (const auto& [le, count] : buckets) {
        if (count < last) throw std::runtime_error(key.first + " is not cumulative");
        last = count;
      }
      if (!std::isinf(buckets.rbegin()->first)) throw std::runtime_error(key.first + " lacks +Inf");
      if (out_.value(key.first + "_count", key.second) != last)
        throw std::runtime_error(key.first + "_count differs from +Inf");
    }
  }

  std::string_view rest_;
  PrometheusText out_;
};

}  // namespace detail

inline PrometheusText parse_prometheus(std::string_view text) {
  return detail::PrometheusReader(text).run();
}

}  // namespace crossdock::support
