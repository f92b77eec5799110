// Small text helpers for messages and settings: edit distance ("did you mean"), sizes such as
// `64KiB`, durations such as `250ms`. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate nearest to `name`, or empty when none is near enough to be a likely typo.
std::string_view closest(std::string_view name, std::span<const std::string_view> candidates);

// " (did you mean 'x'?)" or nothing: ready to be put into a message.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> candidates);

std::string_view trim(std::string_view text);
// Parts between separators, trimmed; empty parts are kept. "" gives one empty part.
std::vector<std::string_view> split(std::string_view text, char separator);

// Whole numbers with B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000); a
// number alone is bytes. Spaces are allowed before the unit.
Result<std::uint64_t> parse_size(std::string_view text);
// Whole numbers with ns, us, ms, s, min or h. Only 0 may stand without a unit.
Result<std::chrono::nanoseconds> parse_duration(std::string_view text);
Result<std::int64_t> parse_int(std::string_view text);
// true/false, 1/0, on/off, yes/no.
Result<bool> parse_bool(std::string_view text);

// The shortest exact form: 65536 -> "64KiB", 65537 -> "65537B"; 250'000'000 ns -> "250ms".
std::string format_size(std::uint64_t bytes);
std::string format_duration(std::chrono::nanoseconds duration);

}  // namespace crossdock::base
