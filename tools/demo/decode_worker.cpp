// The decode worker process: admits requests in order as pages become free, asks prefill for them,
// and verifies every byte of each once it is complete. The main thread admits, a second one
// verifies; callbacks of the receiver run on engine threads and only report.
// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <deque>
#include <fmt/format.h>
#include <mutex>
#include <set>
#include <thread>

#include <crossdock/kv/receiver.hpp>
#include <crossdock/transfer/engine.hpp>

#include "base/clock.hpp"
#include "demo/worker.hpp"

namespace crossdock::tools::pd {
namespace {

using Kind = Event::Kind;

// A request on its way to the verifier.
struct Expected {
  const Job* job = nullptr;
  kv::BlockTable table;
};

class DecodeWorker {
 public:
  DecodeWorker(const Options& options, Plan plan, Channel& channel)
      : options_(options), plan_(std::move(plan)), channel_(channel) {}

  Result<> run() {
    CROSSDOCK_TRY(rank, make_rank(options_, plan_));
    transfer::Engine& engine = rank.engine;
    pool_ = rank.pool;
    kv::ReceiverOptions receiver_options;
    receiver_options.on_layer = [this](kv::RequestId request, std::uint32_t layer) {
      if (!is_warm_up(request)) channel_.send(Kind::kLayerArrived, request, layer);
    };
    receiver_options.on_done = [this](kv::RequestId request, const Result<>& result) {
      if (!is_warm_up(request) && result.ok()) channel_.send(Kind::kComplete, request);
    };
    CROSSDOCK_TRY(receiver, kv::KvReceiver::create(engine, *pool_, receiver_options));
    CROSSDOCK_TRY(start, say_hello(channel_, engine));
    sender_ = start.text;
    CROSSDOCK_CHECK_OK(warm_up(receiver));
    const std::uint64_t cpu_before = base::process_cpu_ns();
    const std::uint64_t received_before = receiver.stats().bytes_received;
    const auto played = play(receiver);
    if (broken_) channel_.send(pool_event(*pool_));  // before the pages come back
    const auto closed = receiver.close(Deadline::in(std::chrono::seconds(20)));
    report_end(channel_, *pool_, cpu_before, receiver.stats().bytes_received - received_before,
               shared_pages_);
    CROSSDOCK_CHECK_OK(played);
    if (!broken_) CROSSDOCK_CHECK_OK(closed);
    wait_for_end(channel_);
    return engine.close(Deadline::in(std::chrono::seconds(5)));
  }

 private:
  // Waits for pages of finished requests, and no longer than there is hope for any.
  Result<kv::BlockTable> admit(const Job& job) {
    const kv::Admission admission{job.id, job.num_pages(options_.page_tokens), job.hashes,
                                  kHashTokens / options_.page_tokens};
    const Deadline patience = Deadline::in(kPatience);
    for (;;) {
      auto table =
          pool_->admit(admission, earlier(patience, Deadline::in(std::chrono::milliseconds(200))));
      if (table.code() != Code::kDeadline || patience.passed() || is_broken()) return table;
    }
  }

  Result<kv::BlockTable> ask(kv::KvReceiver& receiver, const Job& job,
                             std::chrono::seconds patience) {
    CROSSDOCK_TRY(table, admit(job));
    kv::Expectation expectation;
    expectation.request = job.id;
    expectation.senders = {sender_};
    expectation.first_page = table.num_shared_pages;
    expectation.deadline = Deadline::in(patience);
    CROSSDOCK_CHECK_OK(receiver.expect(expectation));
    return table;
  }

  Result<> warm_up(kv::KvReceiver& receiver) {
    for (const Job& job : warm_up_jobs(options_.limit_pages, options_.page_tokens)) {
      CROSSDOCK_TRY(table, ask(receiver, job, kPatience));
      CROSSDOCK_CHECK_OK(receiver.wait(job.id, Deadline::in(kPatience)));
      for (std::uint32_t layer = 0; layer < plan_.shape.num_layers; ++layer)
        if (const auto bad = check_layer(*pool_, job, table, layer); !bad.empty())
          return make_error(Code::kCorrupt, bad);
      CROSSDOCK_CHECK_OK(pool_->release(job.id));
    }
    return {};
  }

  Result<> play(kv::KvReceiver& receiver) {
    std::thread verifier([&] { verify_all(receiver); });
    Result<> result;
    for (const Job& job : plan_.jobs) {
      if (is_broken()) break;
      auto table = ask(receiver, job, std::chrono::seconds(options_.timeout_s));
      if (!table.ok()) {
        if (!is_broken()) result = table.error();
        break;
      }
      shared_pages_ += table->num_shared_pages;
      const std::lock_guard lock(mutex_);
      queue_.push_back({&job, std::move(*table)});
      changed_.notify_all();
    }
    {
      const std::lock_guard lock(mutex_);
      all_asked_ = true;
      changed_.notify_all();
    }
    verifier.join();
    return result;
  }

  bool is_broken() {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

  std::optional<Expected> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return all_asked_ || !queue_.empty(); });
    if (queue_.empty()) return std::nullopt;
    Expected expected = std::move(queue_.front());
    queue_.pop_front();
    return expected;
  }

  void verify_all(kv::KvReceiver& receiver) {
    while (auto expected = next()) {
      const kv::RequestId id = expected->job->id;
      // The receiver ends every request by its deadline, and quiesces or quarantines it soon after.
      const auto arrived = receiver.wait(id, Deadline::in(std::chrono::minutes(10)));
      if (arrived.ok())
        verify(*expected);
      else
        fail(id, arrived.error().describe());
      static_cast<void>(pool_->release(id));
    }
  }

  void verify(const Expected& expected) {
    const Job& job = *expected.job;
    for (const kv::RequestId other : expected.table.depends_on)
      if (failed_.contains(other))
        return fail(job.id, fmt::format("request {} shares a prefix with request {}, which failed",
                                        job.id, other));
    Event event;
    event.kind = Kind::kVerified;
    event.request = job.id;
    for (std::uint32_t layer = 0; layer < plan_.shape.num_layers && event.text[0] == 0; ++layer)
      set_text(event, check_layer(*pool_, job, expected.table, layer));
    event.pages = expected.table.pages.size();
    event.bytes = event.pages * pool_->layout().page_bytes();
    static_cast<void>(pool_->mark_ready(job.id));
    channel_.send(event);
  }

  void fail(kv::RequestId id, const std::string& why) {
    failed_.insert(id);
    channel_.send(Kind::kFailed, id, 0, why);
    const std::lock_guard lock(mutex_);
    broken_ = true;
  }

  const Options& options_;
  const Plan plan_;
  Channel& channel_;
  std::optional<kv::PagePool> pool_;
  std::string sender_;
  std::uint64_t shared_pages_ = 0;
  std::set<kv::RequestId> failed_;  // verifier only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Expected> queue_;
  bool all_asked_ = false;
  bool broken_ = false;
};

}  // namespace

int run_decode(const Options& options) {
  return run_worker(options, [](const Options& o, Plan plan, Channel& channel) {
    return DecodeWorker(o, std::move(plan), channel).run();
  });
}

}  // namespace crossdock::tools::pd
