// The common part of the demo's worker processes.
// SPDX-License-Identifier: Apache-2.0
#include "demo/worker.hpp"

#include <fmt/format.h>

#include "base/clock.hpp"
#include "kv/pattern.hpp"

namespace crossdock::tools::pd {
namespace {

constexpr std::uint64_t kWarmUp = std::uint64_t{1} << 60;

kv::pattern::PageContent content_of(const kv::PagePool& pool, const Job& job, std::size_t page) {
  const std::uint32_t tokens = pool.layout().options().page_tokens;
  const std::size_t first = page * tokens;
  return {job.hashes[first / kHashTokens], static_cast<std::uint32_t>(first % kHashTokens)};
}

}  // namespace

transfer::EngineOptions engine_options(const Options& options) {
  transfer::EngineOptions engine_options;
  engine_options.listen = "127.0.0.1:0";
  engine_options.config["transport.enabled"] = options.transport;
  engine_options.config["transport.shm.populate"] = fmt::format("{}s", kPopulate.count());
  return engine_options;
}

Result<Rank> make_rank(const Options& options, const Plan& plan) {
  CROSSDOCK_TRY(engine, transfer::Engine::create(engine_options(options)));
  CROSSDOCK_TRY(layout, kv::PageLayout::create(plan.shape, plan.layout));
  CROSSDOCK_TRY(pool, kv::PagePool::create(engine, layout));
  return Rank{std::move(engine), std::move(pool)};
}

Result<Event> say_hello(Channel& channel, const transfer::Engine& engine) {
  channel.send(Event::Kind::kHello, 0, 0, engine.name());
  return channel.receive(Deadline::in(kPatience));
}

std::vector<Job> warm_up_jobs(std::uint32_t pages, std::uint32_t page_tokens) {
  std::vector<Job> jobs(2);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].id = kWarmUp + i;
    jobs[i].num_tokens = pages * page_tokens;
    // Never equal to a hash of a trace, and different in both, so that stale pages would be found.
    for (std::uint64_t at = 0; at < jobs[i].num_tokens; at += kHashTokens)
      jobs[i].hashes.push_back(kWarmUp + (i << 32) + at);
  }
  return jobs;
}

bool is_warm_up(std::uint64_t request) {
  return request >= kWarmUp;
}

void fill_layer(kv::PagePool& pool, const Job& job, const kv::BlockTable& table,
                std::uint32_t layer, std::uint32_t first_page) {
  for (std::size_t i = first_page; i < table.pages.size(); ++i)
    kv::pattern::fill_page(pool.layout(), pool.base(), layer, table.pages[i],
                           content_of(pool, job, i));
}

std::string check_layer(const kv::PagePool& pool, const Job& job, const kv::BlockTable& table,
                        std::uint32_t layer) {
  for (std::size_t i = 0; i < table.pages.size(); ++i) {
    const auto mismatch = kv::pattern::check_page(pool.layout(), pool.base(), layer, table.pages[i],
                                                  content_of(pool, job, i));
    if (mismatch) return fmt::format("request {}: {}", job.id, mismatch->describe());
  }
  return {};
}

Event pool_event(const kv::PagePool& pool) {
  const kv::PoolStats stats = pool.stats();
  Event event;
  event.kind = Event::Kind::kPool;
  event.pages = stats.in_use | std::uint64_t{stats.quarantined} << 32;
  event.bytes = stats.total;
  return event;
}

void report_end(Channel& channel, const kv::PagePool& pool, std::uint64_t cpu_before,
                std::uint64_t bytes, std::uint64_t shared_pages) {
  channel.send(pool_event(pool));
  Event event;
  event.kind = Event::Kind::kSummary;
  event.bytes = bytes;
  event.pages = shared_pages;
  event.value = static_cast<double>(base::process_cpu_ns() - cpu_before) / 1e9;
  channel.send(event);
}

void wait_for_end(Channel& channel) {
  while (channel.receive(Deadline::in(std::chrono::minutes(1))).code() == Code::kDeadline) {
  }
}

int run_worker(const Options& options, const WorkerBody& body) {
  Channel channel{base::UniqueFd(options.event_fd)};
  auto plan = make_plan(options);
  const Result<> result =
      plan.ok() ? body(options, std::move(*plan), channel) : Result<>(plan.error());
  if (result.ok()) return 0;
  channel.send(Event::Kind::kFatal, 0, 0, result.error().describe());
  return 1;
}

}  // namespace crossdock::tools::pd
