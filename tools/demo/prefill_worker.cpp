// The prefill worker process: for each request that decode asked for, "computes" its layers (fills
// the pages with their content and keeps to the pace) and pushes each one. The main thread
// computes; callbacks of the sender run on engine threads and only note and report.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <fmt/format.h>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <crossdock/kv/sender.hpp>
#include <crossdock/transfer/engine.hpp>

#include "base/clock.hpp"
#include "demo/channel.hpp"
#include "demo/worker.hpp"

namespace crossdock::tools::pd {
namespace {

using Kind = Event::Kind;

// Which requests were asked for and which are over, as the sender's callbacks tell.
class Board {
 public:
  void asked(std::uint64_t request) {
    const std::lock_guard lock(mutex_);
    asked_[request] = true;
    changed_.notify_all();
  }
  void over(std::uint64_t request, bool ok) {
    const std::lock_guard lock(mutex_);
    over_[request] = ok;
    broken_ = broken_ || !ok;
    changed_.notify_all();
  }
  // False when the deadline passed or a request failed.
  bool wait_asked(std::uint64_t request, Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline.when(), [&] { return broken_ || asked_.contains(request); });
    return asked_.contains(request) && !broken_;
  }
  // Until each of these is over, delivered or not.
  void wait_over(const std::vector<std::uint64_t>& requests, Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline.when(), [&] {
      return std::all_of(requests.begin(), requests.end(),
                         [&](std::uint64_t request) { return over_.contains(request); });
    });
  }
  bool broken() {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, bool> asked_, over_;
  bool broken_ = false;
};

class PrefillWorker {
 public:
  PrefillWorker(const Options& options, Plan plan, Channel& channel)
      : options_(options), plan_(std::move(plan)), channel_(channel) {}

  Result<> run() {
    CROSSDOCK_TRY(rank, make_rank(options_, plan_));
    transfer::Engine& engine = rank.engine;
    pool_ = rank.pool;
    kv::SenderOptions sender_options;
    sender_options.mode = options_.mode == "batch" ? kv::SendMode::kBatch : kv::SendMode::kStreamed;
    sender_options.ticket_timeout = kPatience;
    sender_options.on_asked = [this](kv::RequestId request) { board_.asked(request); };
    sender_options.on_done = [this](kv::RequestId request, const Result<>& result) {
      on_done(request, result);
    };
    CROSSDOCK_TRY(sender, kv::KvSender::create(engine, *pool_, sender_options));
    CROSSDOCK_TRY(start, say_hello(channel_, engine));
    rate_ = start.value;
    CROSSDOCK_CHECK_OK(warm_up(sender));
    const std::uint64_t cpu_before = base::process_cpu_ns();
    const auto played = play(sender);
    report_end(channel_, *pool_, cpu_before, sender.stats().bytes_sent);
    CROSSDOCK_CHECK_OK(played);
    wait_for_end(channel_);
    CROSSDOCK_CHECK_OK(sender.close(Deadline::in(std::chrono::seconds(5))));
    return engine.close(Deadline::in(std::chrono::seconds(5)));
  }

 private:
  void on_done(kv::RequestId request, const Result<>& result) {
    static_cast<void>(pool_->release(request));
    if (!is_warm_up(request))
      channel_.send(Kind::kSent, request, 0, result.ok() ? "" : result.error().describe());
    board_.over(request, result.ok());
  }

  // Two requests as large as the smaller pool: the first touches all pages on both sides, the
  // second measures. Sets the pace, unless it was given, to what two cores sustain.
  Result<> warm_up(kv::KvSender& sender) {
    Warmth warmth;
    for (const Job& job : warm_up_jobs(options_.limit_pages, options_.page_tokens)) {
      CROSSDOCK_TRY(measured, warm_up_with(sender, job));
      warmth = measured;
    }
    if (rate_ <= 0) {
      const double per_byte = 1 / warmth.fill + 1 / warmth.link + 1 / warmth.check;
      const double bytes_per_s = std::min(1.0 / per_byte, 0.5 * warmth.link);
      rate_ = bytes_per_s / static_cast<double>(plan_.shape.token_bytes());
    }
    Event event;
    event.kind = Kind::kCalibrated;
    event.value = rate_;
    set_text(event, fmt::format("fill {:.1f}, link {:.1f}, check {:.1f} GB/s", warmth.fill / 1e9,
                                warmth.link / 1e9, warmth.check / 1e9));
    channel_.send(event);
    return {};
  }

  struct Warmth {
    double fill = 1e9, link = 1e9, check = 1e9;  // bytes a second
  };

  Result<Warmth> warm_up_with(kv::KvSender& sender, const Job& job) {
    if (!board_.wait_asked(job.id, Deadline::in(kPatience)))
      return make_error(Code::kDeadline, "decode did not ask for the warm-up");
    CROSSDOCK_TRY(table, admit(job));
    const double bytes = static_cast<double>(pool_->layout().page_bytes() * table.pages.size());
    const std::uint64_t start = base::now_ns();
    for (std::uint32_t layer = 0; layer < plan_.shape.num_layers; ++layer)
      fill_layer(*pool_, job, table, layer, 0);
    const std::uint64_t filled = base::now_ns();
    for (std::uint32_t layer = 0; layer < plan_.shape.num_layers; ++layer)
      if (const auto bad = check_layer(*pool_, job, table, layer); !bad.empty())
        return make_error(Code::kCorrupt, bad);
    const std::uint64_t checked = base::now_ns();
    for (std::uint32_t layer = 0; layer < plan_.shape.num_layers; ++layer)
      CROSSDOCK_CHECK_OK(sender.push(job.id, layer));
    CROSSDOCK_CHECK_OK(sender.finish(job.id));
    CROSSDOCK_CHECK_OK(sender.wait(job.id, Deadline::in(kPatience)));
    const std::uint64_t sent = base::now_ns();
    const auto rate = [bytes](std::uint64_t from, std::uint64_t to) {
      return bytes * 1e9 / static_cast<double>(std::max<std::uint64_t>(to - from, 1));
    };
    return Warmth{rate(start, filled), rate(checked, sent), rate(filled, checked)};
  }

  Result<kv::BlockTable> admit(const Job& job) {
    const std::uint32_t per_hash = kHashTokens / options_.page_tokens;
    return pool_->admit({job.id, job.num_pages(options_.page_tokens), job.hashes, per_hash},
                        Deadline::in(kPatience));
  }

  Result<> play(kv::KvSender& sender) {
    for (const Job& job : plan_.jobs) {
      if (!board_.wait_asked(job.id, Deadline::in(kPatience))) {
        if (board_.broken()) break;
        return make_error(Code::kDeadline, fmt::format("decode did not ask for request {} within "
                                                       "{} s",
                                                       job.id, kPatience.count()));
      }
      CROSSDOCK_TRY(table, admit(job));
      admitted_.push_back(job.id);
      if (const auto computed = compute(sender, job, table); !computed.ok()) {
        static_cast<void>(pool_->release(job.id));  // if on_done came before admit()
        if (board_.broken()) break;
        return computed;
      }
    }
    // Those that hold pages: others that decode asked for may be over before, and do not count.
    board_.wait_over(admitted_, Deadline::in(kPatience));
    return {};
  }

  // Prefix pages that an earlier request left in this pool are pushed first; decode may have
  // dropped them. The rest is computed layer by layer at the pace of the model.
  Result<> compute(kv::KvSender& sender, const Job& job, const kv::BlockTable& table) {
    const std::uint32_t cached = table.num_shared_pages;
    const auto fresh = static_cast<std::uint32_t>(table.pages.size()) - cached;
    const double tokens = static_cast<double>(fresh) * options_.page_tokens;
    const double layer_ns = tokens / rate_ * 1e9 / plan_.shape.num_layers;
    channel_.send(Kind::kComputeBegin, job.id);
    const std::uint64_t start = base::now_ns();
    for (std::uint32_t layer = 0; layer < plan_.shape.num_layers; ++layer) {
      if (cached > 0) CROSSDOCK_CHECK_OK(sender.push(job.id, layer, 0, cached));
      if (fresh == 0) continue;
      fill_layer(*pool_, job, table, layer, cached);
      keep_pace(start + static_cast<std::uint64_t>(layer_ns * (layer + 1)));
      channel_.send(Kind::kLayerComputed, job.id, layer);
      if (layer + 1 == plan_.shape.num_layers) channel_.send(Kind::kPrefillDone, job.id);
      CROSSDOCK_CHECK_OK(sender.push(job.id, layer, cached, fresh));
    }
    if (fresh == 0) channel_.send(Kind::kPrefillDone, job.id);
    static_cast<void>(pool_->mark_ready(job.id));
    return sender.finish(job.id);
  }

  static void keep_pace(std::uint64_t until_ns) {
    const std::uint64_t now = base::now_ns();
    if (now < until_ns) std::this_thread::sleep_for(std::chrono::nanoseconds(until_ns - now));
  }

  const Options& options_;
  const Plan plan_;
  Channel& channel_;
  std::optional<kv::PagePool> pool_;
  Board board_;
  double rate_ = 0;
  std::vector<std::uint64_t> admitted_;
};

}  // namespace

int run_prefill(const Options& options) {
  return run_worker(options, [](const Options& o, Plan plan, Channel& channel) {
    return PrefillWorker(o, std::move(plan), channel).run();
  });
}

}  // namespace crossdock::tools::pd
