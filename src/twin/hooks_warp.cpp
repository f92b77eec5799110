// The hooks for warp collectives. Lanes meet in a Collective; the last to arrive computes what
// everybody takes away. Only __syncwarp orders memory: the others exchange registers, and code that
// relies on them for memory is found by TSan and by the store buffers.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <fmt/format.h>

#include "twin/hook.hpp"

namespace crossdock::twin {

namespace {

// What lanes must agree on when they meet.
enum class Meet : std::uint8_t {
  kSync = 1,
  kShuffle,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kMatchAll,
  kElect,
  kLoadMatrix,
  kStoreMatrix,
  kReduce = 32,  // + Rmw
};

template <class Visit>
void for_each_lane(std::uint32_t mask, Visit&& visit) {
  for (; mask != 0; mask &= mask - 1)
    visit(static_cast<std::uint32_t>(std::countr_zero(mask)));
}

struct Meeting {
  std::uint32_t mask;
  std::uint8_t operation;
  const char* name;
};

// Blocks until all lanes of the mask are here; the last one calls `finish(lanes, mask)`.
template <class Finish>
void meet(Here& here, Meeting meeting, Finish&& finish) {
  Fiber& fiber = here.fiber;
  Warp& warp = *fiber.warp;
  if (warp.size < 32) meeting.mask &= (1u << warp.size) - 1;
  if ((meeting.mask >> fiber.lane & 1) == 0)
    here.violation("warp", fmt::format("{}: lane {} is not in its own mask {:#x}", meeting.name,
                                       fiber.lane, meeting.mask));
  Collective& slot = warp.collectives[static_cast<std::size_t>(std::countr_zero(meeting.mask))];
  if (slot.arrived == 0) {
    slot.mask = meeting.mask;
    slot.operation = meeting.operation;
  } else if (slot.mask != meeting.mask || slot.operation != meeting.operation) {
    here.violation("warp",
                   fmt::format("{} with mask {:#x} meets another collective or mask ({:#x}) of the "
                               "same warp",
                               meeting.name, meeting.mask, slot.mask));
  }
  const bool orders = meeting.operation == static_cast<std::uint8_t>(Meet::kSync);
  const char* token = &slot.tokens[slot.generation & 1];
  if (orders) tsan::release(token);
  slot.arrived |= 1u << fiber.lane;
  if (slot.arrived == slot.mask) {
    slot.arrived = 0;
    ++slot.generation;
    finish(warp.fibers, meeting.mask);
    for_each_lane(meeting.mask & ~(1u << fiber.lane), [&](std::uint32_t lane) {
      here.runtime.scheduler().make_ready(warp.fibers[lane]);
    });
    here.runtime.note_progress();
  } else {
    here.runtime.block(fiber, {meeting.name, here.site, meeting.mask, 0});
  }
  if (orders) tsan::acquire(token);
}

std::uint8_t code(Meet operation) {
  return static_cast<std::uint8_t>(operation);
}

// Collectives whose result is one function of all inputs, the same for every lane.
template <class Combine>
std::uint64_t meet_with(Here& here, Meeting meeting, std::uint64_t value, Combine&& combine) {
  here.preempt();
  here.fiber.exchange_in = value;
  meet(here, meeting, [&](Fiber* lanes, std::uint32_t mask) {
    const std::uint64_t result = combine(lanes, mask);
    for_each_lane(mask, [&](std::uint32_t lane) { lanes[lane].exchange_out = result; });
  });
  return here.fiber.exchange_out;
}

void finish_sync(Here& here, Fiber* lanes, std::uint32_t mask) {
  View view;
  std::uint64_t smem = 0;
  for_each_lane(mask, [&](std::uint32_t lane) {
    view.join(here.runtime.memory().release_to_cta(lanes[lane]));
    smem = std::max(smem, lanes[lane].smem.cta);
  });
  for_each_lane(mask, [&](std::uint32_t lane) {
    here.runtime.memory().acquire_from_cta(lanes[lane], view);
    lanes[lane].smem.warp = here.cta.shadow.clock();
    lanes[lane].smem.cta = smem;
  });
}

// The source lane of a shuffle, or the lane itself when the source is outside of its segment.
std::uint32_t shuffle_source(std::uint32_t lane, const hooks::ShuffleArgs& args) {
  const std::uint32_t first = lane & ~(args.width - 1);
  const std::uint32_t last = first + args.width - 1;
  switch (args.kind) {
    case hooks::Shuffle::kIndex:
      return first + (args.lane & (args.width - 1));
    case hooks::Shuffle::kUp:
      return lane >= first + args.lane ? lane - args.lane : lane;
    case hooks::Shuffle::kDown:
      return lane + args.lane <= last ? lane + args.lane : lane;
    case hooks::Shuffle::kXor: {
      const std::uint32_t other = lane ^ args.lane;
      return other <= last ? other : lane;
    }
  }
  return lane;
}

std::uint32_t reduce_two(hooks::Rmw op, std::uint32_t a, std::uint32_t b) {
  using hooks::Rmw;
  const auto sa = static_cast<std::int32_t>(a);
  const auto sb = static_cast<std::int32_t>(b);
  switch (op) {
    case Rmw::kMin:
      return std::min(a, b);
    case Rmw::kMax:
      return std::max(a, b);
    case Rmw::kMinSigned:
      return static_cast<std::uint32_t>(std::min(sa, sb));
    case Rmw::kMaxSigned:
      return static_cast<std::uint32_t>(std::max(sa, sb));
    case Rmw::kAnd:
      return a & b;
    case Rmw::kOr:
      return a | b;
    case Rmw::kXor:
      return a ^ b;
    default:
      return a + b;
  }
}

// The two 16-bit elements that a lane holds of an 8x8 matrix, given by its eight row addresses.
struct Element {
  unsigned row;
  unsigned column;
};
Element element_of(std::uint32_t lane, unsigned half, bool transposed) {
  const unsigned major = lane / 4;
  const unsigned minor = lane % 4 * 2 + half;
  return transposed ? Element{minor, major} : Element{major, minor};
}

// Calls visit(lane, matrix, half, address of the 16-bit element) for all elements of the matrices.
template <class Visit>
void for_each_element(Fiber* lanes, hooks::MatrixArgs args, Visit&& visit) {
  for (std::uint32_t lane = 0; lane < 32; ++lane)
    for (unsigned matrix = 0; matrix < args.count; ++matrix)
      for (unsigned half = 0; half < 2; ++half) {
        const Element e = element_of(lane, half, args.transposed);
        auto* row = reinterpret_cast<unsigned char*>(lanes[matrix * 8 + e.row].exchange_aux);
        visit(lane, matrix, half, row + e.column * 2);
      }
}

void check_matrix(Here& here, hooks::MatrixArgs args, const void* row, const char* what) {
  if (args.count != 1 && args.count != 2 && args.count != 4)
    here.violation("matrix", fmt::format("{}: x{} does not exist", what, args.count));
  if (here.fiber.lane >= args.count * 8) return;  // this lane's address is not used
  here.check_aligned(row, 16, what);
  here.shared_offset(row, 16, what);
}

}  // namespace

namespace hooks {

void sync_warp(std::uint32_t mask, Site site) {
  Here here(site);
  here.preempt();
  meet(here, {mask, code(Meet::kSync), "__syncwarp"},
       [&](Fiber* lanes, std::uint32_t lane_mask) { finish_sync(here, lanes, lane_mask); });
}

std::uint64_t shuffle(std::uint32_t mask, std::uint64_t value, ShuffleArgs args, Site site) {
  Here here(site);
  here.preempt();
  here.fiber.exchange_in = value;
  here.fiber.exchange_aux = shuffle_source(here.fiber.lane, args);
  meet(here, {mask, code(Meet::kShuffle), "__shfl_sync"},
       [](Fiber* lanes, std::uint32_t lane_mask) {
         for_each_lane(lane_mask, [&](std::uint32_t lane) {
           const auto source = static_cast<std::uint32_t>(lanes[lane].exchange_aux);
           // A source that does not take part gives garbage on the GPU.
           constexpr std::uint64_t kGarbage = 0xBADCAB1EBADCAB1Eull;
           lanes[lane].exchange_out =
               (lane_mask >> source & 1) != 0 ? lanes[source].exchange_in : kGarbage;
         });
       });
  return here.fiber.exchange_out;
}

std::uint32_t ballot(std::uint32_t mask, bool predicate, Site site) {
  Here here(site);
  return static_cast<std::uint32_t>(meet_with(
      here, {mask, code(Meet::kBallot), "__ballot_sync"}, predicate,
      [](const Fiber* lanes, std::uint32_t lane_mask) {
        std::uint64_t out = 0;
        for_each_lane(lane_mask,
                      [&](std::uint32_t lane) { out |= lanes[lane].exchange_in << lane; });
        return out;
      }));
}

bool any(std::uint32_t mask, bool predicate, Site site) {
  Here here(site);
  return meet_with(here, {mask, code(Meet::kAny), "__any_sync"}, predicate,
                   [](const Fiber* lanes, std::uint32_t lane_mask) {
                     std::uint64_t out = 0;
                     for_each_lane(lane_mask,
                                   [&](std::uint32_t lane) { out |= lanes[lane].exchange_in; });
                     return out;
                   }) != 0;
}

bool all(std::uint32_t mask, bool predicate, Site site) {
  Here here(site);
  return meet_with(here, {mask, code(Meet::kAll), "__all_sync"}, predicate,
                   [](const Fiber* lanes, std::uint32_t lane_mask) {
                     std::uint64_t out = 1;
                     for_each_lane(lane_mask,
                                   [&](std::uint32_t lane) { out &= lanes[lane].exchange_in; });
                     return out;
                   }) != 0;
}

std::uint32_t match_any(std::uint32_t mask, std::uint64_t value, Site site) {
  Here here(site);
  here.preempt();
  here.fiber.exchange_in = value;
  meet(here, {mask, code(Meet::kMatchAny), "__match_any_sync"},
       [](Fiber* lanes, std::uint32_t lane_mask) {
         for_each_lane(lane_mask, [&](std::uint32_t lane) {
           std::uint64_t same = 0;
           for_each_lane(lane_mask, [&](std::uint32_t other) {
             if (lanes[other].exchange_in == lanes[lane].exchange_in)
               same |= std::uint64_t{1} << other;
           });
           lanes[lane].exchange_out = same;
         });
       });
  return static_cast<std::uint32_t>(here.fiber.exchange_out);
}

std::uint32_t match_all(std::uint32_t mask, std::uint64_t value, Site site) {
  Here here(site);
  return static_cast<std::uint32_t>(meet_with(
      here, {mask, code(Meet::kMatchAll), "__match_all_sync"}, value,
      [](const Fiber* lanes, std::uint32_t lane_mask) {
        const std::uint64_t first = lanes[std::countr_zero(lane_mask)].exchange_in;
        bool same = true;
        for_each_lane(lane_mask,
                      [&](std::uint32_t lane) { same &= lanes[lane].exchange_in == first; });
        return same ? std::uint64_t{lane_mask} : 0;
      }));
}

std::uint32_t reduce(std::uint32_t mask, Rmw op, std::uint32_t value, Site site) {
  Here here(site);
  const auto operation =
      static_cast<std::uint8_t>(code(Meet::kReduce) + static_cast<std::uint8_t>(op));
  return static_cast<std::uint32_t>(meet_with(
      here, {mask, operation, "__reduce_sync"}, value,
      [op](const Fiber* lanes, std::uint32_t lane_mask) {
        auto out = static_cast<std::uint32_t>(lanes[std::countr_zero(lane_mask)].exchange_in);
        for_each_lane(lane_mask & (lane_mask - 1), [&](std::uint32_t lane) {
          out = reduce_two(op, out, static_cast<std::uint32_t>(lanes[lane].exchange_in));
        });
        return std::uint64_t{out};
      }));
}

bool elect(std::uint32_t mask, Site site) {
  Here here(site);
  const std::uint64_t seed = here.runtime.schedule().seed;
  const std::uint64_t leader =
      meet_with(here, {mask, code(Meet::kElect), "elect.sync"}, 0,
                [seed](const Fiber*, std::uint32_t lane_mask) {
                  // Any lane will do for the ISA, so each seed and mask gets its own.
                  auto skip = static_cast<std::uint32_t>(Random::mix(seed << 32 | lane_mask)) %
                              static_cast<std::uint32_t>(std::popcount(lane_mask));
                  for (; skip != 0; --skip)
                    lane_mask &= lane_mask - 1;
                  return static_cast<std::uint64_t>(std::countr_zero(lane_mask));
                });
  return leader == here.fiber.lane;
}

void load_matrix(std::uint32_t* registers, const void* row, MatrixArgs args, Site site) {
  Here here(site);
  here.preempt();
  check_matrix(here, args, row, "ldmatrix");
  if (here.fiber.lane < args.count * 8) tsan::read(row, 16);
  here.fiber.exchange_in = reinterpret_cast<std::uint64_t>(registers);
  here.fiber.exchange_aux = reinterpret_cast<std::uint64_t>(row);
  meet(here, {~0u, code(Meet::kLoadMatrix), "ldmatrix"}, [args](Fiber* lanes, std::uint32_t) {
    for_each_element(
        lanes, args, [&](std::uint32_t lane, unsigned matrix, unsigned half, unsigned char* e) {
          auto* out =
              reinterpret_cast<unsigned char*>(lanes[lane].exchange_in) + matrix * 4 + half * 2;
          raw_copy(out, e, 2);
        });
  });
}

void store_matrix(const std::uint32_t* registers, void* row, MatrixArgs args, Site site) {
  Here here(site);
  here.preempt();
  check_matrix(here, args, row, "stmatrix");
  if (here.fiber.lane < args.count * 8) {
    tsan::write(row, 16);
    here.generic_shared_write(here.shared_offset(row, 16, "stmatrix"), 16, "stmatrix");
  }
  here.fiber.exchange_in = reinterpret_cast<std::uint64_t>(registers);
  here.fiber.exchange_aux = reinterpret_cast<std::uint64_t>(row);
  meet(here, {~0u, code(Meet::kStoreMatrix), "stmatrix"}, [args](Fiber* lanes, std::uint32_t) {
    for_each_element(lanes, args,
                     [&](std::uint32_t lane, unsigned matrix, unsigned half, unsigned char* e) {
                       raw_copy(e,
                                reinterpret_cast<const unsigned char*>(lanes[lane].exchange_in) +
                                    matrix * 4 + half * 2,
                                2);
                     });
  });
}

}  // namespace hooks
}  // namespace crossdock::twin
