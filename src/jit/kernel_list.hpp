// The kernel variants that are built, warmed and measured: device/kernels.json, which travels in
// the library. Values. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "jit/binary.hpp"
#include "jit/spec.hpp"

namespace crossdock::jit {

// One specification per kernel, architecture and variant, in the order of the list.
Result<std::vector<KernelSpec>> parse_kernel_list(std::string_view json);
// The list of this build.
Result<std::vector<KernelSpec>> known_kernels();

// What each variant may use, by its title: device/budget.json.
struct Budget {
  int registers = 0;
  int shared_bytes = 0;
  std::uint64_t code_bytes = 0;  // 0: any
};
// What a variant with so much code gets: somewhat more, so that a line more is no breach.
std::uint64_t code_budget(std::uint64_t code_bytes);
using Budgets = std::map<std::string, Budget>;
Result<Budgets> parse_budgets(std::string_view json);
std::string budgets_json(const Budgets& budgets);
// Empty, or what is wrong with the variant: spills, or more than its budget, or no budget.
std::string budget_breach(const KernelSpec& spec, const ResourceUse& use, const Budgets& budgets);
// The same of its code, which decides how long it takes to compile.
std::string code_breach(const KernelSpec& spec, std::uint64_t code_bytes, const Budgets& budgets);

}  // namespace crossdock::jit
