// See symm_worker.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/symm_worker.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

#include "base/clock.hpp"
#include "base/config.hpp"
#include "jit/jit.hpp"
#include "support/fake_cuda/fake_cuda.hpp"
#include "support/patient_child.hpp"
#include "support/symm_members.hpp"
#include "symm/group.hpp"
#include "symm/kernels/barrier.hpp"

namespace crossdock::testing {
namespace {

using namespace symm;  // NOLINT: this file is about nothing else

constexpr const char* kFlag = "--symm-worker";

std::vector<std::string> to_arguments(const SymmWorkerOptions& o) {
  const auto n = [](auto value) { return std::to_string(value); };
  return {kFlag,
          "store=" + o.store,
          "name=" + o.name,
          "member=" + n(o.member),
          "members=" + n(o.members),
          "world=" + n(o.world),
          "rank=" + n(o.rank),
          "backend=" + o.backend,
          "device=" + n(o.device),
          "bytes=" + n(o.bytes),
          "timeout_ms=" + n(o.timeout_ms),
          "stop_before=" + n(o.stop_before),
          "stop_after=" + n(o.stop_after),
          "address_space=" + n(o.address_space),
          "cuda=" + o.cuda,
          "fake_bytes=" + n(o.fake_bytes),
          "visible=" + o.visible,
          "share_gpus=" + o.share_gpus,
          "cache=" + o.cache,
          "elastic=" + n(o.elastic),
          "fewest=" + n(o.fewest),
          "settle_ms=" + n(o.settle_ms)};
}

SymmWorkerOptions from_arguments(int argc, char** argv) {
  std::map<std::string, std::string> values;
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto equals = argument.find('=');
    values[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  const auto number = [&](const char* key) { return std::stoll(values[key]); };
  SymmWorkerOptions o;
  o.store = values["store"];
  o.name = values["name"];
  o.member = static_cast<std::uint32_t>(number("member"));
  o.members = static_cast<std::uint32_t>(number("members"));
  o.world = static_cast<std::uint32_t>(number("world"));
  o.rank = static_cast<std::uint32_t>(number("rank"));
  o.backend = values["backend"];
  o.device = static_cast<int>(number("device"));
  o.bytes = static_cast<std::uint64_t>(number("bytes"));
  o.timeout_ms = static_cast<std::uint32_t>(number("timeout_ms"));
  o.stop_before = static_cast<int>(number("stop_before"));
  o.stop_after = static_cast<int>(number("stop_after"));
  o.address_space = static_cast<std::uint64_t>(number("address_space"));
  o.cuda = values["cuda"];
  o.fake_bytes = static_cast<std::uint64_t>(number("fake_bytes"));
  o.visible = values["visible"];
  o.share_gpus = values["share_gpus"];
  o.cache = values["cache"];
  o.elastic = static_cast<int>(number("elastic"));
  o.fewest = static_cast<std::uint32_t>(number("fewest"));
  o.settle_ms = static_cast<std::uint32_t>(number("settle_ms"));
  return o;
}

[[noreturn]] void stand_still() {
  base::say_parent("stopped");
  for (;;)
    ::pause();
}

// The inner exchange, except that the process stands still at a certain call.
std::shared_ptr<Exchange> stopping(std::shared_ptr<Exchange> inner, const SymmWorkerOptions& o) {
  auto calls = std::make_shared<int>(0);
  const Membership membership = inner->membership();
  return make_exchange(membership,
                       [inner, calls, before = o.stop_before, after = o.stop_after](
                           std::string_view bytes, Deadline deadline) {
                         const int call = (*calls)++;
                         if (call == before) stand_still();
                         auto parts = inner->all_gather(bytes, deadline);
                         if (call == after) stand_still();
                         return parts;
                       })
      .value();
}

class Worker {
 public:
  explicit Worker(SymmWorkerOptions options) : o_(std::move(options)) {
    barrier_.barrier = device::add_peer_barrier(layout_, o_.world);
    barrier_.words = add_barrier_words(layout_, o_.world, barrier_options());
    data_ = layout_.add("data", std::max<std::uint64_t>(o_.bytes, 8 * o_.world));
  }

  Result<> create() {
    std::shared_ptr<Exchange> exchange;
    if (o_.elastic == 0) {
      CROSSDOCK_TRY(opened, open_store_exchange(o_.store, o_.name, {o_.member, o_.members},
                                                Deadline::in(std::chrono::seconds(30))));
      exchange = stopping(std::move(opened), o_);
    }
    CROSSDOCK_CHECK_OK(load_driver());
    if (o_.address_space != 0) {
      const rlimit limit{o_.address_space, o_.address_space};
      ::setrlimit(RLIMIT_AS, &limit);
    }
    GroupOptions options{.world = o_.world,
                         .ranks = {{.rank = o_.rank, .device = o_.device}},
                         .backend = o_.backend == "gpu" ? Backend::kGpu : Backend::kCpu,
                         .exchange = std::move(exchange),
                         .timeout = std::chrono::milliseconds(o_.timeout_ms)};
    if (o_.elastic != 0)
      options.place = MeetingPlace{.store = o_.store,
                                   .name = o_.name,
                                   .fewest = o_.fewest,
                                   .settle = std::chrono::milliseconds(o_.settle_ms)};
    const std::uint64_t start = base::now_ns();
    CROSSDOCK_TRY(group, Group::create(options, layout_, driver_));
    created_ns_ = base::now_ns() - start;
    group_ = std::move(group);
    return {};
  }
  // The word of this rank in every window.
  Result<> write() {
    Rank& rank = group_->rank(o_.rank);
    for (u32 peer = 0; peer < o_.world; ++peer) {
      const u64 word = 1000 * o_.rank + peer + 1;
      CROSSDOCK_CHECK_OK(
          rank.write(rank.at<u64>(data_ + 8 * o_.rank, peer), &word, sizeof word, soon()));
    }
    return {};
  }
  Result<> check() {
    const Rank& rank = group_->rank(o_.rank);
    for (u32 peer = 0; peer < o_.world; ++peer) {
      u64 word = 0;
      CROSSDOCK_CHECK_OK(rank.read(&word, rank.at<u64>(data_ + 8 * peer), sizeof word, soon()));
      if (is_vacant(peer) && word == 0) continue;
      if (word != 1000 * peer + o_.rank + 1)
        return make_error(Code::kCorrupt, "the word of rank " + std::to_string(peer) + " is " +
                                              std::to_string(word));
    }
    return {};
  }
  // What rank `from` has written into this window, whoever that was.
  [[nodiscard]] std::string word(u32 from) const {
    u64 word = 0;
    const auto read = group_->rank(o_.rank).read(
        &word, group_->rank(o_.rank).at<u64>(data_ + 8 * from), sizeof word, soon());
    return read.ok() ? "word " + std::to_string(word) : read.error().describe();
  }
  // Compiling takes longer than the wait of a barrier, so it is a step of its own.
  Result<> prepare() {
    if (kernel_) return {};
    CROSSDOCK_TRY(config, base::Config::load());
    auto options = jit::JitOptions::from_config(config);
    if (!o_.cache.empty()) options.cache.folder = o_.cache;
    options.compiler.newest_cuda = driver_ != nullptr ? driver_->version : 0;
    jit_ = std::make_unique<jit::Jit>(std::move(options));
    CROSSDOCK_TRY(launcher, Launcher::create(*group_, jit_.get()));
    launcher_ = std::make_unique<Launcher>(std::move(launcher));
    CROSSDOCK_TRY(kernel, Barrier::create(*launcher_, barrier_, barrier_options(), soon()));
    kernel_ = std::make_unique<Barrier>(std::move(kernel));
    return {};
  }
  Result<> barrier(u32 rounds) {
    if (!kernel_) return make_error(Code::kInvalidArgument, "prepare first");
    const Rank& rank = group_->rank(o_.rank);
    CROSSDOCK_CHECK_OK(kernel_->launch(rank, rounds));
    CROSSDOCK_CHECK_OK(launcher_->synchronize(soon()));
    CROSSDOCK_TRY(outcome, kernel_->outcome(rank, soon()));
    if (outcome.mismatches != 0) return make_error(Code::kCorrupt, "a barrier let a write through");
    return {};
  }
  Result<> reset(int ms) { return group_->reset(Deadline::in(std::chrono::milliseconds(ms))); }
  Result<> reform(int ms) { return group_->reform(Deadline::in(std::chrono::milliseconds(ms))); }
  [[nodiscard]] std::string vacant() const {
    std::string text = "vacant";
    for (const u32 rank : group_->vacant_ranks())
      text += " " + std::to_string(rank);
    return text;
  }
  [[nodiscard]] std::string waiting() const {
    const auto ranks = group_->waiting_ranks(soon());
    if (!ranks.ok()) return ranks.error().describe();
    std::string text = "waiting";
    for (const u32 rank : *ranks)
      text += " " + std::to_string(rank);
    return text;
  }
  [[nodiscard]] bool is_vacant(u32 rank) const {
    const auto vacant = group_->vacant_ranks();
    return std::find(vacant.begin(), vacant.end(), rank) != vacant.end();
  }
  Result<> faults() { return group_->check(); }
  Result<> destroy() {
    kernel_.reset();
    launcher_.reset();
    group_.reset();
    return {};
  }
  std::string use() const {
    const ProcessUse use = process_use();
    std::string text =
        "fds " + std::to_string(use.descriptors) + " threads " + std::to_string(use.threads);
    if (fake_ != nullptr) {
      const FakeLive live = fake_->live();
      text += " live " + std::to_string(live.contexts + live.streams + live.blocks + live.pinned +
                                        live.allocations + live.ranges + live.mappings);
    }
    return text;
  }
  [[nodiscard]] std::string created() const { return std::to_string(created_ns_ / 1'000'000); }
  Result<> obey(const std::string& command) {
    const auto argument = [&] { return std::stoi(command.substr(command.find(' ') + 1)); };
    if (command == "create") return create();
    if (command == "destroy") return destroy();
    if (!group_) return make_error(Code::kClosed, "there is no group");
    if (command == "write") return write();
    if (command == "check") return check();
    if (command == "prepare") return prepare();
    if (command == "faults") return faults();
    if (command.starts_with("barrier ")) return barrier(static_cast<u32>(argument()));
    if (command.starts_with("reset ")) return reset(argument());
    if (command.starts_with("reform ")) return reform(argument());
    return make_error(Code::kInvalidArgument, "unknown command " + command);
  }

 private:
  static Deadline soon() { return Deadline::in(std::chrono::seconds(60)); }
  static BarrierOptions barrier_options() {
    return {.verify = true, .wait = std::chrono::seconds(3)};
  }
  Result<> load_driver() {
    if (o_.backend != "gpu") return {};
    CROSSDOCK_TRY(config, base::Config::load());
    const std::string library = o_.cuda.empty() ? config.string("cuda.driver") : o_.cuda;
    if (!o_.cuda.empty()) fake_ = open_fake_cuda(o_.cuda.c_str());
    if (fake_ != nullptr && o_.fake_bytes != 0)
      for (int device = 0; device < 4; ++device)
        fake_->set_device_bytes(device, o_.fake_bytes);
    CROSSDOCK_TRY(driver, cuda::Driver::load({.library = library}));
    driver_ = driver;
    return {};
  }
  SymmWorkerOptions o_;
  device::SymmetricLayout layout_;
  BarrierAreas barrier_;
  u64 data_ = 0;
  const cuda::Driver* driver_ = nullptr;
  FakeCuda* fake_ = nullptr;
  std::unique_ptr<Group> group_;
  std::unique_ptr<jit::Jit> jit_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<Barrier> kernel_;
  std::uint64_t created_ns_ = 0;
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

bool is_symm_worker(int argc, char** argv) {
  return argc > 1 && std::strcmp(argv[1], kFlag) == 0;
}

int symm_worker_main(int argc, char** argv) {
  const SymmWorkerOptions options = from_arguments(argc, argv);
  if (!options.visible.empty()) ::setenv("CUDA_VISIBLE_DEVICES", options.visible.c_str(), 1);
  if (!options.share_gpus.empty())
    ::setenv("CROSSDOCK_SYMM_SHARE_GPUS", options.share_gpus.c_str(), 1);
  Worker worker(options);
  std::string command;
  while (base::hear_parent(command)) {
    if (command == "use" || command == "created") {
      base::say_parent(command == "use" ? worker.use() : worker.created());
      continue;
    }
    if (command == "vacant" || command == "waiting") {
      base::say_parent(command == "vacant" ? worker.vacant() : worker.waiting());
      continue;
    }
    if (command.starts_with("word ")) {
      base::say_parent(worker.word(static_cast<u32>(std::stoi(command.substr(5)))));
      continue;
    }
    const Result<> result = worker.obey(command);
    base::say_parent(result.ok() ? "ok" : "error " + one_line(result.error().describe()));
  }
  return 0;
}

SymmWorker::SymmWorker(const SymmWorkerOptions& options) : child_(to_arguments(options)) {}

std::string SymmWorker::hear() {
  return hear_patiently(child_);
}

void SymmWorker::kill() {
  child_.signal(SIGKILL);
  (void)child_.wait();
}

std::vector<std::string> ask_all(std::vector<std::unique_ptr<SymmWorker>>& workers,
                                 const std::string& command) {
  for (const auto& worker : workers)
    worker->say(command);
  std::vector<std::string> answers;
  for (const auto& worker : workers)
    answers.push_back(worker->hear());
  return answers;
}

}  // namespace crossdock::testing
