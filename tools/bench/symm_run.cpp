// Measurements of the symmetric layer on GPUs. Latencies come from the GPU's own clock around many
// rounds in one launch; bandwidth from events around one launch, after a barrier in the same
// stream, so that all ranks start within a microsecond or two. Each is run once to warm up, then
// `repeat`
// times; the median counts. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>

#include "bench/statistics.hpp"
#include "bench/symm.hpp"
#include "bench/symm_reference.hpp"
#include "cuda/memory.hpp"

namespace crossdock::tools::bench {
namespace {

using namespace std::chrono_literals;
using symm::Direction;
using symm::u32;
using symm::u64;
using symm::u8;

constexpr u32 kRowBytes[] = {7168, 14336};
constexpr u32 kSlots = 32768;  // rows of 7168 bytes: 235 MB, several times the L2 cache
constexpr u32 kBarrierRounds = 2000;
constexpr u32 kFlagRounds = 4000;
constexpr auto kWait = 10s;  // a peer process may still be loading its kernels

// What a rank does between the two events.
using Work = std::function<Result<>(const symm::Rank&)>;

device::MoveRowsConfig config_for(u32 row_bytes) {
  return {.warps = row_bytes > 8192 ? 4u : 8u, .stages = 2};
}

const char* name_of(Direction direction) {
  return direction == Direction::kPush ? "push" : "pull";
}

template <std::size_t kCount>
double find_reference(const RowsReference (&table)[kCount], Direction direction, u32 row_bytes,
                      u32 sms) {
  for (const RowsReference& r : table)
    if (r.direction == direction && r.row_bytes == row_bytes && r.sms == sms) return r.gb_per_s;
  return 0;
}

// Adds what there is to compare with, if there is anything.
void refer(Figure& figure, const char* name, double value) {
  if (value > 0) figure.references.push_back({name, value});
}

}  // namespace

struct SymmRig::Impl {
  SymmBench options;
  symm::SuiteShape shape;
  device::SymmetricLayout layout;
  symm::SuiteAreas areas;
  symm::MoveRowsAreas rows;
  u64 flag = 0;
  std::unique_ptr<jit::Jit> jit;
  std::unique_ptr<symm::Group> group;
  std::unique_ptr<symm::Launcher> launcher;
  std::unique_ptr<symm::Suite> suite;
  std::unique_ptr<symm::Barrier> barrier;
  u32 flag_rounds = 0;
  double copy_one_pair = 0;
  double copy_all = 0;

  [[nodiscard]] u32 world() const { return group->world(); }
  [[nodiscard]] u32 num_sms() const {
    return launcher->num_sms(group->rank(group->local_ranks().front()));
  }
  [[nodiscard]] bool has(u32 rank) const {
    const auto local = group->local_ranks();
    return std::find(local.begin(), local.end(), rank) != local.end();
  }

  Result<> meet() {
    for (const u32 r : group->local_ranks())
      CROSSDOCK_CHECK_OK(barrier->launch(group->rank(r), 1));
    return {};
  }

  // ---- latencies ----

  Result<Figure> grid_sync(Deadline deadline) {
    CROSSDOCK_TRY(kernel, symm::GridSync::create(
                              *launcher, {.max_blocks = num_sms(), .wait = kWait}, deadline));
    std::vector<double> us;
    for (u32 run = 0; run <= options.repeat; ++run) {
      const symm::Rank& rank = group->rank(group->local_ranks().front());
      CROSSDOCK_CHECK_OK(kernel.launch(rank, {.blocks = num_sms(), .rounds = kBarrierRounds}));
      CROSSDOCK_CHECK_OK(launcher->synchronize(deadline));
      CROSSDOCK_TRY(outcome, kernel.outcome(rank, deadline));
      if (run > 0) us.push_back(static_cast<double>(outcome.elapsed_ns) / 1e3 / kBarrierRounds);
    }
    return Figure{
        .name = fmt::format("grid sync, {} SMs", num_sms()), .value = median(us), .unit = "us"};
  }

  Result<Figure> barrier_latency(bool grid, Deadline deadline) {
    const u32 blocks = grid ? num_sms() : 1;
    CROSSDOCK_TRY(kernel, symm::Barrier::create(
                              *launcher, areas.barrier,
                              {.grid_sync = grid, .blocks = blocks, .wait = kWait}, deadline));
    std::vector<double> us;
    for (u32 run = 0; run <= options.repeat; ++run) {
      CROSSDOCK_CHECK_OK(meet());
      for (const u32 r : group->local_ranks())
        CROSSDOCK_CHECK_OK(kernel.launch(group->rank(r), kBarrierRounds));
      CROSSDOCK_CHECK_OK(launcher->synchronize(deadline));
      // The rank that started last has waited least for the others.
      double best = INFINITY;
      for (const u32 r : group->local_ranks()) {
        CROSSDOCK_TRY(outcome, kernel.outcome(group->rank(r), deadline));
        best = std::min(best, static_cast<double>(outcome.elapsed_ns) / 1e3 / kBarrierRounds);
      }
      if (run > 0) us.push_back(best);
    }
    return Figure{.name = grid ? fmt::format("barrier with grid sync, {} SMs", blocks)
                               : std::string("barrier, one block a rank"),
                  .value = median(us),
                  .unit = "us",
                  .aim = world() < 2 ? 0
                         : grid      ? kGridBarrierAimUs
                                     : kBarrierAimUs};
  }

  // On the process of rank 0; elsewhere the value is 0.
  Result<Figure> flag_latency(bool release, Deadline deadline) {
    CROSSDOCK_TRY(kernel, symm::FlagPingPong::create(
                              *launcher, flag, {.release = release, .wait = kWait}, deadline));
    std::vector<double> us;
    for (u32 run = 0; run <= options.repeat; ++run) {
      CROSSDOCK_CHECK_OK(meet());
      for (const u32 r : group->local_ranks())
        CROSSDOCK_CHECK_OK(
            kernel.launch(group->rank(r),
                          {.first = 0, .second = 1, .rounds = kFlagRounds, .start = flag_rounds}));
      flag_rounds += kFlagRounds;
      CROSSDOCK_CHECK_OK(launcher->synchronize(deadline));
      if (!has(0)) continue;
      CROSSDOCK_TRY(ns, kernel.elapsed_ns(group->rank(0), deadline));
      if (run > 0) us.push_back(static_cast<double>(ns) / 1e3 / kFlagRounds);
    }
    Figure figure{
        .name = release ? "flag round trip, release and acquire" : "flag round trip, relaxed",
        .value = median(us),
        .unit = "us"};
    if (!release) refer(figure, kReferenceName, kFlagRoundTripUs);
    return figure;
  }

  // ---- bandwidth ----

  // GB/s of the local ranks among `movers`, on average; 0 when there are none.
  Result<double> run_once(const std::vector<u32>& movers, const Work& work, u64 bytes,
                          Deadline deadline) {
    struct Timed {
      cuda::Event start, end;
    };
    CROSSDOCK_CHECK_OK(meet());
    std::vector<Timed> timed;
    for (const u32 r : movers) {
      if (!has(r)) continue;
      const symm::Rank& rank = group->rank(r);
      CROSSDOCK_TRY(stream, launcher->stream(rank));
      CROSSDOCK_TRY(start, cuda::Event::create(stream->context(), cuda::Timing::kOn));
      CROSSDOCK_TRY(end, cuda::Event::create(stream->context(), cuda::Timing::kOn));
      CROSSDOCK_CHECK_OK(start.record(*stream));
      CROSSDOCK_CHECK_OK(work(rank));
      CROSSDOCK_CHECK_OK(end.record(*stream));
      timed.push_back({std::move(start), std::move(end)});
    }
    CROSSDOCK_CHECK_OK(launcher->synchronize(deadline));
    double sum = 0;
    for (const Timed& t : timed) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(t.start, t.end));
      sum += static_cast<double>(bytes) / 1e6 / static_cast<double>(ms);
    }
    return timed.empty() ? 0.0 : sum / static_cast<double>(timed.size());
  }
  Result<double> bandwidth(const std::vector<u32>& movers, const Work& work, u64 bytes,
                           Deadline deadline) {
    std::vector<double> rates;
    for (u32 run = 0; run <= options.repeat; ++run) {
      CROSSDOCK_TRY(rate, run_once(movers, work, bytes, deadline));
      if (run > 0) rates.push_back(rate);
    }
    return median(rates);
  }

  [[nodiscard]] std::vector<u32> everybody() const {
    std::vector<u32> all(world());
    for (u32 r = 0; r < world(); ++r)
      all[r] = r;
    return all;
  }

  // The copy engine, with the same bytes: what the link gives in this run.
  Result<double> copy_engine(const std::vector<u32>& movers, Deadline deadline) {
    const u64 block = u64{kSlots} * kRowBytes[0];
    const u64 copies = std::max<u64>(1, options.bytes / block);
    const Work work = [&](const symm::Rank& rank) -> Result<> {
      const u32 peer = (rank.rank() + 1) % world();
      const u8* from = rank.at<u8>(rows.source);
      const u8* to = rank.at<u8>(rows.destination + rank.rank() * block, peer);
      CROSSDOCK_TRY(stream, launcher->stream(rank));
      for (u64 i = 0; i < copies; ++i)
        CROSSDOCK_CHECK_OK(
            cuda::copy_async(cuda::device_ptr(to), cuda::device_ptr(from), block, *stream));
      return {};
    };
    return bandwidth(movers, work, copies * block, deadline);
  }

  Result<double> move(symm::MoveRows& kernel, u32 sms, const std::vector<u32>& movers,
                      Deadline deadline) {
    const u32 row_bytes = kernel.options().row_bytes;
    const u64 rows_at_once = u64{sms} * kernel.options().config.warps;
    symm::MoveRows::Run run{.blocks = sms,
                            .rows_per_warp = static_cast<u32>(
                                std::max<u64>(1, options.bytes / (rows_at_once * row_bytes))),
                            .slots = static_cast<u32>(u64{kSlots} * kRowBytes[0] / row_bytes),
                            .seed = 12345};
    if (movers.size() == 1) run.peer = (movers.front() + 1) % world();
    return bandwidth(
        movers, [&](const symm::Rank& rank) { return kernel.launch(rank, run); },
        kernel.bytes_of(run), deadline);
  }

  Result<> measure_rows(Direction direction, u32 row_bytes, std::vector<Figure>& figures,
                        Deadline deadline) {
    CROSSDOCK_TRY(kernel, symm::MoveRows::create(*launcher, rows,
                                                 {.direction = direction,
                                                  .config = config_for(row_bytes),
                                                  .row_bytes = row_bytes,
                                                  .max_blocks = num_sms(),
                                                  .wait = kWait},
                                                 deadline));
    for (const u32 sms : options.sms) {
      if (sms == 0 || sms > num_sms()) continue;
      CROSSDOCK_TRY(rate, move(kernel, sms, everybody(), deadline));
      Figure figure{.name = fmt::format("{}, {}, {} B rows, {} SMs", name_of(direction),
                                        world() < 2 ? "own memory" : "all ranks", row_bytes, sms),
                    .value = rate,
                    .unit = "GB/s"};
      // One rank alone moves within its own memory, which no table is about.
      const double table = world() < 2 ? 0 : find_reference(kAllAtOnce, direction, row_bytes, sms);
      refer(figure, kReferenceName, table);
      refer(figure, "copy engine", copy_all);
      if (direction == Direction::kPush && row_bytes == 7168 && sms == 8 && world() == 4)
        figure.aim = kPushAimShare * table;
      figures.push_back(std::move(figure));
    }
    if (row_bytes != 7168 || world() < 2) return {};
    for (const u32 sms : {8u, 16u, 132u}) {
      if (sms > num_sms()) continue;
      CROSSDOCK_TRY(rate, move(kernel, sms, {0}, deadline));
      Figure figure{.name = fmt::format("{}, one pair, {} B rows, {} SMs", name_of(direction),
                                        row_bytes, sms),
                    .value = rate,
                    .unit = "GB/s"};
      refer(figure, kReferenceName, find_reference(kOnePair, direction, row_bytes, sms));
      refer(figure, "copy engine", copy_one_pair);
      if (has(0)) figures.push_back(std::move(figure));
    }
    return {};
  }
};

SymmRig::SymmRig(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SymmRig::SymmRig(SymmRig&&) noexcept = default;
SymmRig::~SymmRig() = default;

Result<SymmRig> SymmRig::create(const SymmBench& options, const symm::GroupOptions& group,
                                const cuda::Driver& driver, Deadline deadline) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  CROSSDOCK_TRY(device, cuda::query_device(driver, 0));
  impl->shape = symm::SuiteShape::for_gpu(static_cast<u32>(device.num_sms));
  impl->shape.wait = kWait;
  impl->areas = symm::add_suite(impl->layout, group.world, impl->shape);
  impl->rows = symm::add_move_rows(impl->layout, group.world, kSlots, kRowBytes[0]);
  impl->flag = impl->layout.add("bench.flag", device::SymmetricLayout::kLine);
  CROSSDOCK_TRY(made, symm::Group::create(group, impl->layout, &driver));
  CROSSDOCK_TRY(jit, symm::open_jit(*made));
  impl->jit = std::move(jit);
  impl->group = std::move(made);
  CROSSDOCK_TRY(launcher, symm::Launcher::create(*impl->group, impl->jit.get()));
  impl->launcher = std::make_unique<symm::Launcher>(std::move(launcher));
  CROSSDOCK_TRY(suite, symm::Suite::create(*impl->launcher, impl->areas, impl->shape, deadline));
  impl->suite = std::make_unique<symm::Suite>(std::move(suite));
  CROSSDOCK_TRY(barrier, symm::Barrier::create(*impl->launcher, impl->areas.barrier,
                                               {.wait = kWait}, deadline));
  impl->barrier = std::make_unique<symm::Barrier>(std::move(barrier));
  return SymmRig(std::move(impl));
}

Result<> SymmRig::verify(Deadline deadline) {
  return impl_->suite->run_all(deadline);
}

Result<> SymmRig::measure_latencies(std::vector<Figure>& figures, Deadline deadline) {
  CROSSDOCK_TRY(grid, impl_->grid_sync(deadline));
  figures.push_back(std::move(grid));
  for (const bool with_grid : {false, true}) {
    CROSSDOCK_TRY(figure, impl_->barrier_latency(with_grid, deadline));
    figures.push_back(std::move(figure));
  }
  if (impl_->world() < 2) return {};
  for (const bool release : {false, true}) {
    CROSSDOCK_TRY(figure, impl_->flag_latency(release, deadline));
    if (impl_->has(0)) figures.push_back(std::move(figure));
  }
  return {};
}

Result<> SymmRig::measure_bandwidth(std::vector<Figure>& figures, Deadline deadline) {
  if (impl_->world() >= 2) {
    CROSSDOCK_TRY(one, impl_->copy_engine({0}, deadline));
    CROSSDOCK_TRY(all, impl_->copy_engine(impl_->everybody(), deadline));
    impl_->copy_one_pair = one;
    impl_->copy_all = all;
    Figure pair{.name = "copy engine, one pair", .value = one, .unit = "GB/s"};
    refer(pair, kReferenceName, kCopyEnginePair);
    if (impl_->has(0)) figures.push_back(std::move(pair));
    figures.push_back({.name = "copy engine, all ranks", .value = all, .unit = "GB/s"});
  }
  for (const u32 row_bytes : kRowBytes)
    for (const Direction direction : {Direction::kPush, Direction::kPull})
      CROSSDOCK_CHECK_OK(impl_->measure_rows(direction, row_bytes, figures, deadline));
  return {};
}

Result<Figure> measure_heap(const SymmBench& options, const symm::GroupOptions& group,
                            const cuda::Driver& driver) {
  device::SymmetricLayout layout;
  layout.add("heap", options.heap);
  const auto start = std::chrono::steady_clock::now();
  CROSSDOCK_TRY(made, symm::Group::create(group, layout, &driver));
  const auto ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return Figure{.name = fmt::format("create {} windows of {:.1f} GiB", group.world,
                                    static_cast<double>(options.heap) / (1 << 30)),
                .value = ms,
                .unit = "ms",
                .aim = kHeapAimMs};
}

}  // namespace crossdock::tools::bench
