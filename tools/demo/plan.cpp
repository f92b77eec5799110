// Options to plan: model, pool layout and the list of requests. Any process; the workers and the
// command come to the same list from the same options.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "demo/pd.hpp"
#include "demo/trace_file.hpp"

namespace crossdock::tools::pd {
namespace {

Result<kv::ModelShape> shape_of(const Options& options) {
  auto shape = kv::parse_model_shape(options.kv_shape.empty() ? options.model : options.kv_shape);
  if (shape.code() == Code::kNotFound) return invalid_argument(shape.error().message);  // a name
  return shape;
}

// Synthetic requests share nothing: hashes far above those of any trace.
std::vector<Job> synthetic_jobs(const Options& options) {
  std::vector<Job> jobs(options.requests);
  std::uint64_t hash = std::uint64_t{1} << 40;
  for (std::uint32_t i = 0; i < options.requests; ++i) {
    jobs[i].id = i + 1;
    jobs[i].num_tokens = options.tokens;
    jobs[i].hashes.resize((options.tokens + kHashTokens - 1) / kHashTokens);
    for (std::uint64_t& h : jobs[i].hashes)
      h = hash++;
  }
  return jobs;
}

Result<std::vector<Job>> trace_jobs(const Options& options) {
  if (!options.trace.empty()) return read_trace(options.trace);
  CROSSDOCK_TRY(path, find_excerpt());
  return read_trace(path);
}

}  // namespace

Result<std::uint32_t> pages_that_fit(const Options& options, std::uint64_t pool_bytes) {
  CROSSDOCK_TRY(shape, shape_of(options));
  const std::uint64_t page = shape.token_bytes() * options.page_tokens;
  if (page == 0 || pool_bytes / page == 0)
    return make_error(
        Code::kNoMemory,
        fmt::format("a pool of {} bytes does not hold one page of {} bytes; raise --memory (now "
                    "{} bytes; it takes units, as in 512MiB)",
                    pool_bytes, page, options.memory_bytes));
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(pool_bytes / page, 1u << 30));
}

Result<> check_page_tokens(const Options& options) {
  if (options.page_tokens != 0 && kHashTokens % options.page_tokens == 0) return {};
  return invalid_argument(
      fmt::format("--page-tokens {} must divide {}, the tokens of a prefix "
                  "block",
                  options.page_tokens, kHashTokens));
}

Result<Plan> make_plan(const Options& options) {
  CROSSDOCK_CHECK_OK(check_page_tokens(options));
  if (options.requests == 0) return invalid_argument("--requests 0 must be at least 1");
  Plan plan;
  CROSSDOCK_TRY(shape, shape_of(options));
  CROSSDOCK_TRY(pages, pages_that_fit(options, options.pool_bytes));
  plan.shape = shape;
  plan.layout.num_pages = pages;
  plan.layout.page_tokens = options.page_tokens;
  plan.layout.order =
      options.order == "block-first" ? kv::PoolOrder::kBlockFirst : kv::PoolOrder::kLayerFirst;
  CROSSDOCK_TRY(jobs, options.tokens > 0 ? Result<std::vector<Job>>(synthetic_jobs(options))
                                         : trace_jobs(options));
  for (Job& job : jobs) {
    if (plan.jobs.size() == options.requests) break;
    if (job.num_pages(options.page_tokens) > options.limit_pages)
      ++plan.skipped;
    else
      plan.jobs.push_back(std::move(job));
  }
  if (plan.jobs.empty())
    return make_error(Code::kNoMemory,
                      fmt::format("none of the requests fits into {} pages; raise --memory",
                                  options.limit_pages));
  return plan;
}

}  // namespace crossdock::tools::pd
