// Reads request traces: one flat JSON object a line with `input_length` and `hash_ids`. Any
// process. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "demo/pd.hpp"

namespace crossdock::tools::pd {

// One line. kInvalidArgument says what is wrong with it.
Result<Job> parse_trace_line(std::string_view line);
// kInvalidArgument names file and line; kNotFound when the file cannot be opened.
Result<std::vector<Job>> read_trace(const std::string& path);
// Where the shipped excerpt lies: beside the source tree, or installed, as seen from the
// executable.
Result<std::string> find_excerpt();

}  // namespace crossdock::tools::pd
