// The command's side of one run: spawns both workers, introduces them, collects their events, and
// injects the fault that was asked for. One thread; every wait is bounded.
// SPDX-License-Identifier: Apache-2.0
#include "demo/pd_run.hpp"

#include <algorithm>
#include <csignal>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.hpp"
#include "demo/channel.hpp"
#include "demo/worker.hpp"

namespace crossdock::tools::pd {
namespace {

using Kind = Event::Kind;

// For a worker to close what it has after the run; the sum of its own deadlines, and some.
constexpr std::chrono::seconds kOrderlyEnd{15};

Fault fault_of(const Options& options) {
  if (options.fault == "kill-prefill") return Fault::kKillPrefill;
  if (options.fault == "kill-decode") return Fault::kKillDecode;
  if (options.fault == "stop-prefill") return Fault::kStopPrefill;
  return Fault::kNone;
}

// One line that is redrawn, and only for a person who watches.
class ProgressBar {
 public:
  ProgressBar(std::string title, std::size_t total)
      : title_(std::move(title)), total_(total), visible_(::isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() {
    if (visible_) fmt::print(stderr, "\r\033[K");
  }
  void show(std::size_t done, double gigabytes) const {
    if (!visible_) return;
    constexpr std::size_t kWidth = 30;
    const std::size_t filled = total_ == 0 ? 0 : done * kWidth / total_;
    fmt::print(stderr, "\r\033[K{:>8} [{}{}] {}/{} requests, {:.1f} GB", title_,
               std::string(filled, '#'), std::string(kWidth - filled, '.'), done, total_,
               gigabytes);
  }

 private:
  const std::string title_;
  const std::size_t total_;
  const bool visible_;
};

class Run {
 public:
  Run(const Options& options, const Plan& plan, std::string mode)
      : options_(options), fault_(fault_of(options)), bar_(mode, plan.jobs.size()) {
    record_.mode = std::move(mode);
    for (const Job& job : plan.jobs) {
      RequestRecord request;
      request.id = job.id;
      request.num_tokens = job.num_tokens;
      request.layer_computed.resize(plan.shape.num_layers);
      request.layer_arrived.resize(plan.shape.num_layers);
      index_[job.id] = record_.requests.size();
      record_.requests.push_back(std::move(request));
    }
  }

  Result<RunRecord> play(const Options& prefill_options, const Options& decode_options,
                         double rate) {
    CROSSDOCK_TRY(decode, spawn_worker(decode_options));
    CROSSDOCK_TRY(prefill, spawn_worker(prefill_options));
    prefill_ = &prefill;
    decode_ = &decode;
    CROSSDOCK_TRY(prefill_name, hello(prefill, "prefill"));
    CROSSDOCK_TRY(decode_name, hello(decode, "decode"));
    start(prefill, decode_name, rate);
    start(decode, prefill_name, rate);
    CROSSDOCK_CHECK_OK(collect());
    check_clean();
    end_workers();
    return std::move(record_);
  }

 private:
  // The longest time without any event; the workers' own deadlines are shorter.
  Deadline patience() const {
    return Deadline::in(std::chrono::seconds(2 * options_.timeout_s + 20) + kPopulate);
  }

  Result<std::string> hello(Worker& worker, const char* role) {
    auto event = worker.channel().receive(Deadline::in(kPatience));
    if (!event.ok() || event->kind != Kind::kHello)
      return make_error(Code::kPeerLost,
                        fmt::format("the {} process did not start: {}", role,
                                    event.ok() ? event->text : event.error().message.c_str()));
    return std::string(event->text);
  }

  static void start(Worker& worker, const std::string& peer, double rate) {
    Event event;
    event.kind = Kind::kStart;
    event.value = rate;
    set_text(event, peer);
    worker.channel().send(event);
  }

  // Until both workers have sent their summary, or are gone, or one has given up: the other would
  // only wait for it.
  Result<> collect() {
    bool prefill_over = false, decode_over = false;
    while (!given_up_ && (!prefill_over || !decode_over)) {
      pollfd fds[] = {{prefill_over ? -1 : prefill_->channel().fd(), POLLIN, 0},
                      {decode_over ? -1 : decode_->channel().fd(), POLLIN, 0}};
      const int ready = ::poll(fds, 2, patience().remaining_ms());
      if (ready == 0) return make_error(Code::kDeadline, "the workers fell silent");
      if (fds[0].revents != 0) prefill_over = !take(*prefill_, "prefill", true);
      if (fds[1].revents != 0) decode_over = !take(*decode_, "decode", false);
      if (fault_ == Fault::kStopPrefill && decode_over && !prefill_over) prefill_over = true;
    }
    return {};
  }

  // Both close their engines and end, which is part of what is shown, and writes their traces.
  // After a fault only the survivor is asked, and owes nothing.
  void end_workers() {
    const bool prefill_is_victim = fault_ == Fault::kKillPrefill || fault_ == Fault::kStopPrefill;
    const auto deadline = Deadline::in(given_up_ ? std::chrono::seconds(2) : kOrderlyEnd);
    prefill_->channel().hang_up();
    decode_->channel().hang_up();
    if (!prefill_is_victim) end(*prefill_, "prefill", deadline);
    if (fault_ != Fault::kKillDecode) end(*decode_, "decode", deadline);
  }

  void end(Worker& worker, const char* role, Deadline deadline) {
    const auto status = worker.wait(deadline);
    if (fault_ != Fault::kNone || given_up_) return;
    if (status && WIFEXITED(*status) && WEXITSTATUS(*status) == 0) return;
    std::string why = status ? "it ended by itself" : "it still ran when it was given up on";
    for (auto event = worker.channel().receive(Deadline::now()); event.ok();
         event = worker.channel().receive(Deadline::now()))
      if (event->kind == Kind::kFatal) why = event->text;
    record_.problems.push_back(
        fmt::format("the {} process did not end in good order: {}", role, why));
  }

  // Handles one event; false when it was the worker's last.
  bool take(Worker& worker, const char* role, bool is_prefill) {
    const auto event = worker.channel().receive(Deadline::now());
    if (!event.ok()) {
      const bool ours = (fault_ == Fault::kKillPrefill && is_prefill) ||
                        (fault_ == Fault::kKillDecode && !is_prefill) ||
                        (fault_ == Fault::kStopPrefill && is_prefill);
      if (!ours || record_.fault_ns == 0)
        record_.problems.push_back(fmt::format("the {} process ended early", role));
      return false;
    }
    if (event->kind == Kind::kFatal) {
      record_.problems.push_back(fmt::format("{}: {}", role, event->text));
      given_up_ = true;
      return false;
    }
    if (event->kind == Kind::kSummary) {
      (is_prefill ? record_.cpu_prefill_s : record_.cpu_decode_s) = event->value;
      if (!is_prefill) record_.bytes_received = event->bytes;
      if (!is_prefill) record_.shared_pages = event->pages;
      return false;
    }
    if (event->kind == Kind::kCalibrated) {
      record_.rate_tokens_per_s = event->value;
      record_.calibration = event->text;
      return true;
    }
    if (event->kind == Kind::kPool) return take_pool(*event, is_prefill);
    const auto found = index_.find(event->request);
    if (found != index_.end()) take_request(*event, record_.requests[found->second], is_prefill);
    return true;
  }

  bool take_pool(const Event& event, bool is_prefill) {
    const bool survivor = is_prefill == (fault_ == Fault::kKillDecode);
    if (fault_ == Fault::kNone || !survivor) return true;
    record_.survivor_pool.push_back({event.bytes, event.pages & 0xffffffff, event.pages >> 32});
    // The stopped process has been given up on; its death is the proof that frees the pages.
    if (fault_ == Fault::kStopPrefill && record_.survivor_pool.size() == 1)
      prefill_->signal(SIGKILL);
    return true;
  }

  void take_request(const Event& event, RequestRecord& request, bool is_prefill) {
    const bool layer_known = event.layer < request.layer_computed.size();
    switch (event.kind) {
      case Kind::kComputeBegin:
        request.compute_begin = event.time_ns;
        break;
      case Kind::kPrefillDone:
        request.prefill_done = event.time_ns;
        break;
      case Kind::kComplete:
        request.complete = event.time_ns;
        break;
      case Kind::kLayerComputed:
        if (layer_known) request.layer_computed[event.layer] = event.time_ns;
        break;
      case Kind::kLayerArrived:
        if (layer_known) request.layer_arrived[event.layer] = event.time_ns;
        maybe_inject(event);
        break;
      case Kind::kVerified:
        verified(event, request);
        break;
      case Kind::kSent:
        if (event.text[0] != 0 && is_prefill) failed(event, fault_ == Fault::kKillDecode);
        break;
      case Kind::kFailed:
        request.error = event.text;
        failed(event, fault_ != Fault::kKillDecode);
        break;
      default:
        break;
    }
  }

  void verified(const Event& event, RequestRecord& request) {
    request.verified_bytes = event.bytes;
    request.verified_pages = event.pages;
    if (event.text[0] != 0) record_.problems.push_back(event.text);
    ++num_verified_;
    gigabytes_ += static_cast<double>(event.bytes) / 1e9;
    bar_.show(num_verified_, gigabytes_);
  }

  void failed(const Event& event, bool survivor) {
    if (fault_ == Fault::kNone) record_.problems.push_back(event.text);
    if (!survivor || record_.fault_ns == 0) return;
    if (record_.first_error_ns == 0) record_.first_error_ns = event.time_ns;
    record_.survivor_errors.push_back(event.text);
  }

  // In the middle of a request, after some have passed: its layers are arriving.
  void maybe_inject(const Event& event) {
    const std::size_t victim = std::min<std::size_t>(2, record_.requests.size() - 1);
    const std::size_t middle = record_.requests[victim].layer_arrived.size() / 3;
    if (fault_ == Fault::kNone || record_.fault_ns != 0) return;
    if (event.request != record_.requests[victim].id || event.layer < middle) return;
    record_.fault_ns = base::now_ns();
    if (fault_ == Fault::kStopPrefill)
      prefill_->signal(SIGSTOP);
    else
      (fault_ == Fault::kKillPrefill ? prefill_ : decode_)->signal(SIGKILL);
  }

  void check_clean() {
    if (fault_ != Fault::kNone || given_up_) return;
    for (const RequestRecord& request : record_.requests)
      if (request.verified_pages == 0 && request.error.empty())
        record_.problems.push_back(fmt::format("request {} was never verified", request.id));
  }

  const Options& options_;
  const Fault fault_;
  RunRecord record_;
  std::map<std::uint64_t, std::size_t> index_;
  Worker* prefill_ = nullptr;
  Worker* decode_ = nullptr;
  std::size_t num_verified_ = 0;
  double gigabytes_ = 0;
  bool given_up_ = false;
  const ProgressBar bar_;
};

}  // namespace

std::size_t RunRecord::num_verified() const {
  return static_cast<std::size_t>(
      std::count_if(requests.begin(), requests.end(),
                    [](const RequestRecord& r) { return r.verified_pages > 0; }));
}

std::uint64_t RunRecord::verified_bytes() const {
  std::uint64_t sum = 0;
  for (const RequestRecord& r : requests)
    sum += r.verified_bytes;
  return sum;
}

std::uint64_t RunRecord::verified_pages() const {
  std::uint64_t sum = 0;
  for (const RequestRecord& r : requests)
    sum += r.verified_pages;
  return sum;
}

double RunRecord::wall_s() const {
  std::uint64_t first = UINT64_MAX, last = 0;
  for (const RequestRecord& r : requests) {
    if (r.compute_begin != 0) first = std::min(first, r.compute_begin);
    last = std::max(last, r.complete);
  }
  return last > first ? static_cast<double>(last - first) / 1e9 : 0;
}

double RunRecord::gb_per_s() const {
  return wall_s() > 0 ? static_cast<double>(bytes_received) / 1e9 / wall_s() : 0;
}

double RunRecord::handoff_ms(double fraction) const {
  std::vector<double> values;
  for (const RequestRecord& r : requests)
    if (r.complete != 0 && r.prefill_done != 0)
      // A request whose prefix decode had entirely is complete before "prefill" looked at it.
      values.push_back(
          r.complete > r.prefill_done ? static_cast<double>(r.complete - r.prefill_done) / 1e6 : 0);
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(fraction * static_cast<double>(values.size()));
  return values[std::min(rank, values.size() - 1)];
}

Result<RunRecord> run_mode(const Options& options, const Plan& plan, const std::string& mode,
                           double rate_tokens_per_s) {
  Options prefill = options, decode = options;
  prefill.mode = decode.mode = mode;
  prefill.role = "prefill";
  decode.role = "decode";
  // Decode keeps finished requests until they are verified, so it gets the larger part.
  prefill.pool_bytes = options.memory_bytes / 100 * 45;
  decode.pool_bytes = options.memory_bytes - prefill.pool_bytes;
  return Run(options, plan, mode).play(prefill, decode, rate_tokens_per_s);
}

}  // namespace crossdock::tools::pd
