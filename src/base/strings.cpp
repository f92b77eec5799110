// Text helpers. See the header.
// SPDX-License-Identifier: Apache-2.0
#include "base/strings.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fmt/format.h>
#include <limits>
#include <optional>

namespace crossdock::base {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::uint64_t kKilo = 1000;
constexpr std::uint64_t kKibi = 1024;
// The first name of a factor is the one that format_size() writes.
constexpr std::array<Unit, 9> kSizeUnits{{{"B", 1},
                                          {"KiB", kKibi},
                                          {"MiB", kKibi* kKibi},
                                          {"GiB", kKibi* kKibi* kKibi},
                                          {"TiB", kKibi* kKibi* kKibi* kKibi},
                                          {"KB", kKilo},
                                          {"MB", kKilo* kKilo},
                                          {"GB", kKilo* kKilo* kKilo},
                                          {"TB", kKilo* kKilo* kKilo* kKilo}}};
constexpr std::array<Unit, 6> kTimeUnits{{{"ns", 1},
                                          {"us", kKilo},
                                          {"ms", kKilo* kKilo},
                                          {"s", kKilo* kKilo* kKilo},
                                          {"min", 60 * kKilo* kKilo* kKilo},
                                          {"h", 3600 * kKilo* kKilo* kKilo}}};

struct Quantity {
  std::uint64_t number = 0;
  std::string_view unit;
};

// Leading digits and what follows them; nothing when there is no digit or too many.
std::optional<Quantity> split_quantity(std::string_view text) {
  text = trim(text);
  Quantity quantity;
  const auto [end, status] =
      std::from_chars(text.data(), text.data() + text.size(), quantity.number);
  if (status != std::errc()) return std::nullopt;
  quantity.unit = trim(text.substr(static_cast<std::size_t>(end - text.data())));
  return quantity;
}

std::optional<std::uint64_t> times(std::uint64_t a, std::uint64_t b, std::uint64_t limit) {
  if (a != 0 && b > limit / a) return std::nullopt;
  return a * b;
}

const Unit* find_unit(std::span<const Unit> units, std::string_view name) {
  const auto it =
      std::find_if(units.begin(), units.end(), [&](const Unit& unit) { return unit.name == name; });
  return it == units.end() ? nullptr : &*it;
}

// The largest of the `first_n` units that divides `value`.
std::string format_exact(std::uint64_t value, std::span<const Unit> units) {
  const Unit* best = &units.front();
  for (const Unit& unit : units)
    if (value != 0 && value % unit.factor == 0) best = &unit;
  return fmt::format("{}{}", value / best->factor, best->name);
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the usual table: the one before the previous serves swaps.
  std::vector<std::size_t> older(b.size() + 1);
  std::vector<std::size_t> previous(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j)
    previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({previous[j] + 1, row[j - 1] + 1, change});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], older[j - 2] + 1);
    }
    std::swap(older, previous);
    std::swap(previous, row);
  }
  return previous[b.size()];
}

std::string_view closest(std::string_view name, std::span<const std::string_view> candidates) {
  std::string_view best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 4) + 1;
  for (const auto candidate : candidates) {
    const std::size_t distance = edit_distance(name, candidate);
    if (distance >= best_distance || distance >= std::max(name.size(), candidate.size())) continue;
    best_distance = distance;
    best = candidate;
  }
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> candidates) {
  const auto best = closest(name, candidates);
  return best.empty() ? std::string() : fmt::format(" (did you mean '{}'?)", best);
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto at = text.find(separator);
    parts.push_back(trim(text.substr(0, at)));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Result<std::uint64_t> parse_size(std::string_view text) {
  const auto quantity = split_quantity(text);
  const Unit* unit =
      quantity ? find_unit(kSizeUnits, quantity->unit.empty() ? "B" : quantity->unit) : nullptr;
  if (unit == nullptr)
    return invalid_argument(fmt::format(
        "'{}' is no size; write a whole number with B, KiB, MiB, GiB or TiB, as in 64KiB", text));
  const auto bytes =
      times(quantity->number, unit->factor, std::numeric_limits<std::uint64_t>::max());
  if (!bytes) return invalid_argument(fmt::format("size '{}' is beyond 2^64 bytes", text));
  return *bytes;
}

Result<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  const auto quantity = split_quantity(text);
  if (quantity && quantity->unit.empty() && quantity->number == 0)
    return std::chrono::nanoseconds(0);
  const Unit* unit = quantity ? find_unit(kTimeUnits, quantity->unit) : nullptr;
  if (unit == nullptr)
    return invalid_argument(fmt::format(
        "'{}' is no duration; write a whole number with ns, us, ms, s, min or h, as in 250ms",
        text));
  const auto ns = times(quantity->number, unit->factor, std::numeric_limits<std::int64_t>::max());
  if (!ns) return invalid_argument(fmt::format("duration '{}' is beyond 292 years", text));
  return std::chrono::nanoseconds(static_cast<std::int64_t>(*ns));
}

Result<std::int64_t> parse_int(std::string_view text) {
  text = trim(text);
  std::int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status == std::errc::result_out_of_range)
    return invalid_argument(fmt::format("'{}' does not fit into 64 bits", text));
  if (status != std::errc() || end != text.data() + text.size())
    return invalid_argument(fmt::format("'{}' is no whole number", text));
  return value;
}

Result<bool> parse_bool(std::string_view text) {
  text = trim(text);
  for (const auto yes : {"true", "1", "on", "yes"})
    if (text == yes) return true;
  for (const auto no : {"false", "0", "off", "no"})
    if (text == no) return false;
  return invalid_argument(fmt::format("'{}' is neither true nor false", text));
}

std::string format_size(std::uint64_t bytes) {
  return format_exact(bytes, std::span(kSizeUnits).first(5));
}

std::string format_duration(std::chrono::nanoseconds duration) {
  if (duration.count() < 0) return fmt::format("{}ns", duration.count());
  return format_exact(static_cast<std::uint64_t>(duration.count()), kTimeUnits);
}

}  // namespace crossdock::base
