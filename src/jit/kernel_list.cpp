// Reading the kernel list and the budgets. The one file of this layer that knows JSON.
// SPDX-License-Identifier: Apache-2.0
#include "jit/kernel_list.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "jit/bundle.hpp"

namespace crossdock::jit {
namespace {

using Json = nlohmann::ordered_json;

Error bad_list(std::string_view what) {
  return invalid_argument(fmt::format("kernel list: {}", what));
}

Result<std::string> config_text(const Json& variant) {
  ConfigText text;
  for (const auto& [name, value] : variant.items()) {
    if (value.is_boolean()) {
      text.field(name, value.get<bool>());
    } else if (value.is_number_unsigned()) {
      text.field(name, value.get<std::uint64_t>());
    } else if (value.is_number_integer()) {
      text.field(name, value.get<std::int64_t>());
    } else {
      return bad_list(fmt::format("member {} must be a boolean or a whole number", name));
    }
  }
  return text.text();
}

bool is_text(const Json& object, const char* name) {
  return object.contains(name) && object[name].is_string();
}

bool is_array(const Json& object, const char* name) {
  return object.contains(name) && object[name].is_array();
}

Result<void> add_kernel(const Json& kernel, std::vector<KernelSpec>& specs) {
  if (!kernel.is_object() || !is_text(kernel, "name") || !is_text(kernel, "entry") ||
      !is_text(kernel, "config_type") || !is_array(kernel, "sm") || !is_array(kernel, "variants"))
    return bad_list("each kernel has name, entry, config_type, sm [..] and variants [..]");
  for (const auto& sm : kernel["sm"]) {
    if (!sm.is_number_integer()) return bad_list("sm must hold whole numbers such as 90");
    for (const auto& variant : kernel["variants"]) {
      if (!variant.is_object()) return bad_list("a variant is an object of members");
      CROSSDOCK_TRY(config, config_text(variant));
      KernelSpec spec{.name = kernel["name"],
                      .entry = kernel["entry"],
                      .config_type = kernel["config_type"],
                      .config = config,
                      .sm = sm.get<int>()};
      CROSSDOCK_CHECK_OK(validate(spec));
      specs.push_back(std::move(spec));
    }
  }
  return {};
}

}  // namespace

Result<std::vector<KernelSpec>> parse_kernel_list(std::string_view json) {
  const Json list = Json::parse(json, nullptr, false);
  if (list.is_discarded() || !list.is_object() || !is_array(list, "kernels"))
    return bad_list("not JSON of the form {\"kernels\": [..]}");
  std::vector<KernelSpec> specs;
  for (const auto& kernel : list["kernels"])
    CROSSDOCK_CHECK_OK(add_kernel(kernel, specs));
  return specs;
}

Result<std::vector<KernelSpec>> known_kernels() {
  return parse_kernel_list(embedded_kernel_list());
}

Result<Budgets> parse_budgets(std::string_view json) {
  const Json list = Json::parse(json, nullptr, false);
  if (list.is_discarded() || !list.is_object())
    return invalid_argument("budget file: not a JSON object");
  Budgets budgets;
  for (const auto& [title, entry] : list.items()) {
    if (!entry.is_object() || !entry.value("registers", Json()).is_number_integer() ||
        !entry.value("shared_bytes", Json()).is_number_integer())
      return invalid_argument(
          fmt::format("budget of {}: must have whole numbers registers and shared_bytes", title));
    const Json code = entry.value("code_bytes", Json(0u));
    if (!code.is_number_unsigned())
      return invalid_argument(
          fmt::format("budget of {}: code_bytes is a whole number, or is left out", title));
    budgets[title] = {
        .registers = entry["registers"], .shared_bytes = entry["shared_bytes"], .code_bytes = code};
  }
  return budgets;
}

std::uint64_t code_budget(std::uint64_t code_bytes) {
  constexpr std::uint64_t kStep = 4096;
  return (code_bytes + code_bytes / 20 + kStep - 1) / kStep * kStep;
}

std::string budgets_json(const Budgets& budgets) {
  Json list = Json::object();
  for (const auto& [title, budget] : budgets) {
    list[title] = {{"registers", budget.registers}, {"shared_bytes", budget.shared_bytes}};
    if (budget.code_bytes != 0) list[title]["code_bytes"] = budget.code_bytes;
  }
  return list.dump(2) + "\n";
}

std::string budget_breach(const KernelSpec& spec, const ResourceUse& use, const Budgets& budgets) {
  if (use.spill_bytes > 0)
    return fmt::format("spills {} bytes: use smaller tiles or more warps", use.spill_bytes);
  if (use.registers == 0) return "the compiler did not say how many registers it uses";
  const auto found = budgets.find(spec.title());
  if (found == budgets.end()) return "has no budget: add it with `crossdock jit budget --update`";
  if (use.registers > found->second.registers)
    return fmt::format("uses {} registers, its budget is {}", use.registers,
                       found->second.registers);
  if (use.shared_bytes > found->second.shared_bytes)
    return fmt::format("uses {} bytes of static shared memory, its budget is {}", use.shared_bytes,
                       found->second.shared_bytes);
  return {};
}

std::string code_breach(const KernelSpec& spec, std::uint64_t code_bytes, const Budgets& budgets) {
  const auto found = budgets.find(spec.title());
  const std::uint64_t most = found == budgets.end() ? 0 : found->second.code_bytes;
  if (most == 0 || code_bytes <= most) return {};
  return fmt::format(
      "has {} bytes of code, its budget is {}: so much takes long to compile; look "
      "for parts that are unrolled or inlined more than once (docs/design/device.md)",
      code_bytes, most);
}

}  // namespace crossdock::jit
