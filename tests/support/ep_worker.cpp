// See ep_worker.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/ep_worker.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include <crossdock/symm/exchange.hpp>

#include "support/ep_group_rig.hpp"
#include "support/patient_child.hpp"

namespace crossdock::testing {
namespace {

constexpr const char* kFlag = "--ep-worker";

class Worker {
 public:
  explicit Worker(EpWorkerOptions options) : o_(std::move(options)) {
    case_.world = o_.world;
    case_.experts = 8 * o_.world;
    case_.max_tokens = 200;
    case_.row_bytes = 2048;
    case_.scale_bytes = 64;
    case_.combine_bytes = 4096;
    case_.blocks = {8};
  }
  Result<> obey(const std::string& command) {
    const auto number = [&] {
      return static_cast<u32>(std::stoul(command.substr(command.find(' ') + 1)));
    };
    if (command == "create") return create();
    if (!rig_) return make_error(Code::kClosed, "there is no group");
    if (command.starts_with("round ")) return round(number());
    if (command.starts_with("dispatch ")) return dispatch(number());
    if (command.starts_with("loop ")) return loop(number());
    if (command == "device") return device();
    if (command.starts_with("reset "))
      return rig_->group().reset(Deadline::in(std::chrono::milliseconds(number())));
    if (command == "destroy") {
      rig_.reset();
      return {};
    }
    return make_error(Code::kInvalidArgument, "unknown command " + command);
  }

 private:
  Result<> create() {
    CROSSDOCK_TRY(exchange,
                  symm::open_store_exchange(o_.store, o_.name, {o_.rank, o_.world}, ep_soon()));
    auto options = ep_options(case_, symm::Backend::kGpu);
    options.ranks.ranks = {{.rank = o_.rank, .device = static_cast<int>(o_.rank)}};
    options.ranks.exchange = std::move(exchange);
    options.ranks.timeout = std::chrono::seconds(90);
    options.ep.wait = std::chrono::milliseconds(o_.wait_ms);
    CROSSDOCK_TRY(rig, EpGroupRig::create(case_, options));
    rig_.emplace(std::move(rig));
    return {};
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
      CROSSDOCK_CHECK_OK(rig_->group().dispatch(o_.rank, rig_->tokens(o_.rank)));
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
  Worker worker({.store = argv[2],
                 .name = argv[3],
                 .rank = static_cast<std::uint32_t>(std::stoul(argv[4])),
                 .world = static_cast<std::uint32_t>(std::stoul(argv[5])),
                 .wait_ms = static_cast<std::uint32_t>(std::stoul(argv[6]))});
  std::string command;
  while (base::hear_parent(command)) {
    const Result<> result = worker.obey(command);
    base::say_parent(result.ok() ? "ok" : "error " + one_line(result.error().describe()));
  }
  return 0;
}

EpWorker::EpWorker(const EpWorkerOptions& o)
    : child_({kFlag, o.store, o.name, std::to_string(o.rank), std::to_string(o.world),
              std::to_string(o.wait_ms)}) {}

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
