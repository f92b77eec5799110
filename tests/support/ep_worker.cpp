// See ep_worker.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/ep_worker.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <gtest/gtest-spi.h>
#include <optional>
#include <span>
#include <utility>

#include <crossdock/symm/exchange.hpp>

#include "support/ep_group_rig.hpp"
#include "support/patient_child.hpp"

namespace crossdock::testing {
namespace {

constexpr const char* kFlag = "--ep-worker";

std::vector<std::string> to_arguments(const EpWorkerOptions& o) {
  const auto n = [](auto value) { return std::to_string(value); };
  return {kFlag,       o.store,         o.name,       n(o.rank),     n(o.world),
          n(o.device), n(o.share_gpus), n(o.wait_ms), n(o.tokens),   n(o.few),
          n(o.masks),  n(o.elastic),    n(o.fewest),  n(o.settle_ms)};
}
EpWorkerOptions from_arguments(char** argv) {
  int next = 4;
  const auto number = [&] { return static_cast<u32>(std::stoul(argv[next++])); };
  EpWorkerOptions o{.store = argv[2], .name = argv[3]};
  o.rank = number();
  o.world = number();
  o.device = static_cast<int>(number());
  o.share_gpus = number() != 0;
  o.wait_ms = number();
  o.tokens = number();
  o.few = number() != 0;
  o.masks = number() != 0;
  o.elastic = number() != 0;
  o.fewest = number();
  o.settle_ms = number();
  return o;
}

// Whether a check of the rig finds a difference. The failure is printed, and is none of the test.
template <class Check>
bool differs(const Check& check) {
  ::testing::TestPartResultArray found;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
    check();
  }
  if (found.size() == 0) return false;
  std::fprintf(stderr, "a step is torn: %s\n", found.GetTestPartResult(0).message());
  return true;
}

class Worker {
 public:
  explicit Worker(EpWorkerOptions options) : o_(std::move(options)) {
    case_.world = o_.world;
    case_.experts = 8 * o_.world;
    case_.max_tokens = o_.tokens;
    case_.row_bytes = 2048;
    case_.scale_bytes = 64;
    case_.combine_bytes = 4096;
    case_.blocks = {8};
    case_.fixed = o_.few || o_.masks;
    case_.combine_weights = !o_.masks;
  }
  Result<std::string> obey(const std::string& command) {
    const auto number = [&] {
      return static_cast<u32>(std::stoul(command.substr(command.find(' ') + 1)));
    };
    if (command == "create") return ok(create());
    if (!rig_) return make_error(Code::kClosed, "there is no group");
    if (command == "vacant") return list(command, rig_->group().vacant_ranks());
    if (command == "waiting") {
      CROSSDOCK_TRY(ranks, rig_->group().waiting_ranks(ep_soon()));
      return list(command, ranks);
    }
    if (command.starts_with("steps ")) return steps(std::chrono::milliseconds(number()));
    return ok(act(command, number));
  }

 private:
  static Result<std::string> ok(const Result<>& done) {
    CROSSDOCK_CHECK_OK(done);
    return std::string("ok");
  }
  static std::string list(std::string text, std::span<const u32> ranks) {
    for (const u32 rank : ranks)
      text += " " + std::to_string(rank);
    return text;
  }
  template <class Number>
  Result<> act(const std::string& command, const Number& number) {
    if (command.starts_with("round ")) return round(number());
    if (command.starts_with("step ")) {
      CROSSDOCK_TRY(torn, step(number()));
      return torn ? make_error(Code::kCorrupt, "the step went wrong") : Result<>();
    }
    if (command.starts_with("dispatch ")) return dispatch(number());
    if (command.starts_with("loop ")) return loop(number());
    if (command == "device") return device();
    if (command.starts_with("reset "))
      return rig_->group().reset(Deadline::in(std::chrono::milliseconds(number())));
    if (command.starts_with("reform "))
      return rig_->group().reform(Deadline::in(std::chrono::milliseconds(number())));
    if (command == "destroy") {
      rig_.reset();
      return {};
    }
    return make_error(Code::kInvalidArgument, "unknown command " + command);
  }
  Result<> create() {
    auto options = ep_options(case_, symm::Backend::kGpu);
    options.ranks.ranks = {{.rank = o_.rank, .device = o_.device}};
    options.ranks.timeout = std::chrono::seconds(90);
    if (o_.elastic) {
      options.ranks.place = symm::MeetingPlace{.store = o_.store,
                                               .name = o_.name,
                                               .fewest = o_.fewest,
                                               .settle = std::chrono::milliseconds(o_.settle_ms)};
    } else {
      CROSSDOCK_TRY(exchange,
                    symm::open_store_exchange(o_.store, o_.name, {o_.rank, o_.world}, ep_soon()));
      options.ranks.exchange = std::move(exchange);
    }
    options.ep.wait = std::chrono::milliseconds(o_.wait_ms);
    options.ep.masks = options.ep.mask_late = o_.masks;
    CROSSDOCK_TRY(rig, EpGroupRig::create(case_, options));
    rig_.emplace(std::move(rig));
    return {};
  }
  // What is left of a case when the masked ranks are gone.
  Result<EpInputs> seen(EpInputs inputs) {
    if (!o_.masks) return inputs;
    CROSSDOCK_TRY(gone, rig_->group().masked(o_.rank, ep_soon()));
    for (u32 rank = 0; rank < o_.world; ++rank)
      if ((gone >> rank & 1) != 0) inputs = inputs.without(rank);
    return inputs;
  }
  // True: something arrived that should not have, or not all. A rank may be gone after the dispatch
  // or after the combine, so each is compared with what its own mask says.
  Result<bool> step(u32 seed) {
    const EpInputs all(case_, seed);
    rig_->load(all);
    const ep::Path path = o_.few ? ep::Path::kSmall : ep::Path::kLarge;
    CROSSDOCK_TRY(handle, rig_->group().dispatch(o_.rank, rig_->tokens(o_.rank), {.path = path}));
    CROSSDOCK_CHECK_OK(rig_->group().synchronize(ep_soon()));
    CROSSDOCK_TRY(came, seen(all));
    bool torn = differs([&] { rig_->check(handle, EpReference(case_, came)); });
    rig_->write_expert_rows(handle, came, seed);
    torn = differs([&] { rig_->combine(handle); }) || torn;
    CROSSDOCK_CHECK_OK(rig_->group().synchronize(ep_soon()));
    CROSSDOCK_TRY(left, seen(all));
    return differs([&] { rig_->check_combined(o_.rank, EpReference(case_, left), seed); }) || torn;
  }
  Result<std::string> steps(std::chrono::milliseconds most) {
    const auto end = std::chrono::steady_clock::now() + most;
    u32 whole = 0, bad = 0;
    for (u32 seed = 1; std::chrono::steady_clock::now() < end; ++seed) {
      CROSSDOCK_TRY(torn, step(seed));
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      CROSSDOCK_TRY(masked, rig_->group().masked(o_.rank, ep_soon()));
      bad += torn ? 1 : 0;
      if (!torn && masked == 0 && whole++ == 0) base::say_parent("whole");
      if (torn || masked == 0) continue;
      return "good " + std::to_string(std::chrono::nanoseconds(now).count()) + " masked " +
             std::to_string(masked) + " whole " + std::to_string(whole) + " torn " +
             std::to_string(bad);
    }
    return make_error(Code::kDeadline, "no step without a rank was right: whole " +
                                           std::to_string(whole) + " torn " + std::to_string(bad));
  }
  // The checks of the rig are those of a test: the first that fails becomes the error.
  Result<> round(u32 seed) {
    rig_->round(seed);
    if (!::testing::Test::HasFailure()) return {};
    return make_error(Code::kCorrupt, "round " + std::to_string(seed) + " went wrong");
  }
  Result<> dispatch(u32 seed) {
    rig_->load(EpInputs(case_, seed));
    CROSSDOCK_TRY(handle, rig_->group().dispatch(o_.rank, rig_->tokens(o_.rank)));
    CROSSDOCK_CHECK_OK(rig_->group().synchronize(ep_soon()));
    return handle.rows(ep_soon()).ok() ? Result<>() : make_error(Code::kInternal, "no rows");
  }
  Result<> loop(u32 count) {
    for (u32 i = 0; i < count; ++i) {
      CROSSDOCK_TRY(handle, rig_->group().dispatch(o_.rank, rig_->tokens(o_.rank)));
      // Whatever lies there: results are not looked at.
      if (o_.few)
        CROSSDOCK_CHECK_OK(rig_->group().combine(handle, {.rows = rig_->combined(o_.rank)}));
      CROSSDOCK_CHECK_OK(rig_->group().check());
    }
    return rig_->group().synchronize(ep_soon());
  }
  Result<> device() {
    symm::Rank& rank = rig_->rank(o_.rank);
    CROSSDOCK_TRY(memory, rank.allocate(4096));
    std::vector<u32> words(1024, o_.rank + 7);
    CROSSDOCK_CHECK_OK(symm::upload(rank, memory.as<u32>(), words, ep_soon()));
    CROSSDOCK_TRY(back, symm::download(rank, memory.as<const u32>(), words.size(), ep_soon()));
    return back == words ? Result<>() : make_error(Code::kCorrupt, "memory does not hold");
  }

  EpWorkerOptions o_;
  EpCase case_;
  std::optional<EpGroupRig> rig_;
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

bool is_ep_worker(int argc, char** argv) {
  return argc > 1 && std::strcmp(argv[1], kFlag) == 0;
}

int ep_worker_main(int, char** argv) {
  const EpWorkerOptions options = from_arguments(argv);
  if (options.share_gpus) ::setenv("CROSSDOCK_SYMM_SHARE_GPUS", "true", 1);
  Worker worker(options);
  std::string command;
  while (base::hear_parent(command)) {
    const Result<std::string> result = worker.obey(command);
    base::say_parent(result.ok() ? *result : "error " + one_line(result.error().describe()));
  }
  return 0;
}

EpWorker::EpWorker(const EpWorkerOptions& o) : child_(to_arguments(o)) {}

std::string EpWorker::hear() {
  return hear_patiently(child_);
}

std::vector<std::string> ask_all(std::vector<std::unique_ptr<EpWorker>>& workers,
                                 const std::string& command) {
  for (const auto& worker : workers)
    worker->say(command);
  std::vector<std::string> answers;
  for (const auto& worker : workers)
    answers.push_back(worker->hear());
  return answers;
}

}  // namespace crossdock::testing
