// What both worker processes do alike: make their engine, fill and check pages, report the pool,
// end. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <crossdock/kv/page_pool.hpp>
#include <crossdock/transfer/engine.hpp>

#include "demo/channel.hpp"
#include "demo/pd.hpp"

namespace crossdock::tools::pd {

// How long a worker waits for what is not on trial: pages, the warm-up, the other one's first word.
inline constexpr std::chrono::seconds kPatience{60};
// How long a worker may prepare the peer's pool, before the requests that are measured. The
// library's own limit is for engines that must be ready soon; a pool that is not prepared shows its
// page faults, up to two seconds, as handoffs.
inline constexpr std::chrono::seconds kPopulate{30};

// What both stand on: an engine that uses the chosen transport only, and its pages.
struct Rank {
  transfer::Engine engine;
  kv::PagePool pool;
};
// Of its engine.
transfer::EngineOptions engine_options(const Options& options);
Result<Rank> make_rank(const Options& options, const Plan& plan);
// Tells the command where this rank is; returns its word to start.
Result<Event> say_hello(Channel& channel, const transfer::Engine& engine);

// The two requests that touch all pages and measure the link before the clock runs. Their ids are
// above those of any trace.
std::vector<Job> warm_up_jobs(std::uint32_t pages, std::uint32_t page_tokens);
bool is_warm_up(std::uint64_t request);

// Pages from `first_page` of the table on.
void fill_layer(kv::PagePool& pool, const Job& job, const kv::BlockTable& table,
                std::uint32_t layer, std::uint32_t first_page);
// Every byte of the layer; empty, or what differs first.
std::string check_layer(const kv::PagePool& pool, const Job& job, const kv::BlockTable& table,
                        std::uint32_t layer);

Event pool_event(const kv::PagePool& pool);
// The last word: the pool, what was moved, and the CPU time since `cpu_before` (process_cpu_ns).
void report_end(Channel& channel, const kv::PagePool& pool, std::uint64_t cpu_before,
                std::uint64_t bytes, std::uint64_t shared_pages = 0);

// Until the command closes its end.
void wait_for_end(Channel& channel);

using WorkerBody = std::function<Result<>(const Options&, Plan, Channel&)>;
// Plans, runs `body`, and tells the command when that failed.
int run_worker(const Options& options, const WorkerBody& body);

}  // namespace crossdock::tools::pd
