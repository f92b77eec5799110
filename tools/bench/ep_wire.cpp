// See ep_wire.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/ep_wire.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/config.hpp"
#include "bench/statistics.hpp"
#include "cuda/device.hpp"
#include "symm/kernels/barrier.hpp"

namespace crossdock::tools::bench {
namespace {

using namespace std::chrono_literals;
using symm::Direction;
using symm::u32;
using symm::u64;

constexpr u32 kRowBytes = 7168;
constexpr u32 kSlots = 16384;  // 117 MB, more than twice the L2 cache
constexpr u64 kBytes = 400'000'000;
constexpr u32 kFastest[] = {16, 24, 64, 132};  // one of these, pushing or pulling
constexpr auto kWait = 20s;                    // a peer process may still be loading its kernels

}  // namespace

struct EpWire::Impl {
  u32 repeat;
  Deadline deadline;
  std::unique_ptr<jit::Jit> jit = {};
  std::unique_ptr<symm::Group> group = {};
  std::optional<symm::Launcher> launcher = {};
  std::optional<symm::Barrier> barrier = {};
  std::optional<symm::MoveRows> push = {}, pull = {};
  std::map<std::pair<Direction, u32>, double> known = {};

  [[nodiscard]] u32 num_sms() const {
    return launcher->num_sms(group->rank(group->local_ranks().front()));
  }
  Result<symm::MoveRows> mover(const symm::MoveRowsAreas& areas, Direction direction) {
    return symm::MoveRows::create(*launcher, areas,
                                  {.direction = direction,
                                   .config = {.warps = 8, .stages = 2},
                                   .row_bytes = kRowBytes,
                                   .max_blocks = num_sms(),
                                   .wait = kWait},
                                  deadline);
  }
  // After a barrier in the same stream, so that all begin within a microsecond or two.
  Result<double> run_once(symm::MoveRows& mover, const symm::MoveRows::Run& run) {
    std::vector<std::pair<cuda::Event, cuda::Event>> timed;
    for (const u32 r : group->local_ranks()) {
      const symm::Rank& rank = group->rank(r);
      CROSSDOCK_CHECK_OK(barrier->launch(rank, 1));
      CROSSDOCK_TRY(stream, launcher->stream(rank));
      CROSSDOCK_TRY(start, cuda::Event::create(stream->context(), cuda::Timing::kOn));
      CROSSDOCK_TRY(end, cuda::Event::create(stream->context(), cuda::Timing::kOn));
      CROSSDOCK_CHECK_OK(start.record(*stream));
      CROSSDOCK_CHECK_OK(mover.launch(rank, run));
      CROSSDOCK_CHECK_OK(end.record(*stream));
      timed.emplace_back(std::move(start), std::move(end));
    }
    CROSSDOCK_CHECK_OK(launcher->synchronize(deadline));
    double sum = 0;
    for (const auto& [start, end] : timed) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(start, end));
      sum += static_cast<double>(mover.bytes_of(run)) / 1e6 / static_cast<double>(ms);
    }
    return sum / static_cast<double>(timed.size());
  }
  Result<double> rate(Direction direction, u32 sms) {
    symm::MoveRows& mover = direction == Direction::kPush ? *push : *pull;
    const u64 at_once = u64{sms} * mover.options().config.warps * kRowBytes;
    const symm::MoveRows::Run run{
        .blocks = sms,
        .rows_per_warp = static_cast<u32>(std::max<u64>(1, kBytes / at_once)),
        .slots = kSlots,
        .seed = 12345};
    std::vector<double> rates;
    for (u32 i = 0; i <= repeat; ++i) {  // the first warms up
      CROSSDOCK_TRY(one, run_once(mover, run));
      if (i > 0) rates.push_back(one);
    }
    return median(rates);
  }
};

EpWire::EpWire(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EpWire::EpWire(EpWire&&) noexcept = default;
EpWire::~EpWire() = default;

Result<EpWire> EpWire::create(const symm::GroupOptions& ranks, u32 repeat, Deadline deadline) {
  std::unique_ptr<Impl> impl(new Impl{.repeat = repeat, .deadline = deadline});
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(driver, cuda::Driver::load({config.string("cuda.driver")}));
  device::SymmetricLayout layout;
  const symm::BarrierAreas meeting{.barrier = device::add_peer_barrier(layout, ranks.world)};
  const auto areas = symm::add_move_rows(layout, ranks.world, kSlots, kRowBytes);
  CROSSDOCK_TRY(group, symm::Group::create(ranks, layout, driver));
  CROSSDOCK_TRY(jit, symm::open_jit(*group));
  impl->jit = std::move(jit);
  impl->group = std::move(group);
  CROSSDOCK_TRY(launcher, symm::Launcher::create(*impl->group, impl->jit.get()));
  impl->launcher.emplace(std::move(launcher));
  CROSSDOCK_TRY(barrier,
                symm::Barrier::create(*impl->launcher, meeting, {.wait = kWait}, deadline));
  impl->barrier.emplace(std::move(barrier));
  CROSSDOCK_TRY(push, impl->mover(areas, Direction::kPush));
  impl->push.emplace(std::move(push));
  CROSSDOCK_TRY(pull, impl->mover(areas, Direction::kPull));
  impl->pull.emplace(std::move(pull));
  return EpWire(std::move(impl));
}

bool EpWire::local() const {
  return impl_->group->world() == 1;
}

Result<double> EpWire::gb_per_s(Direction direction, u32 sms) {
  const auto found = impl_->known.find({direction, sms});
  if (found != impl_->known.end()) return found->second;
  double best = 0;
  if (sms != 0) {
    CROSSDOCK_TRY(rate, impl_->rate(direction, std::min(sms, impl_->num_sms())));
    best = rate;
  }
  for (const u32 some : kFastest) {
    if (sms != 0 || some > impl_->num_sms()) continue;
    CROSSDOCK_TRY(rate, impl_->rate(direction, some));
    best = std::max(best, rate);
  }
  impl_->known[{direction, sms}] = best;
  return best;
}

}  // namespace crossdock::tools::bench
