// The hooks for bulk and tensor copies: checks at issue, hand-over to the engine, groups and waits.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "twin/hook.hpp"
#include "twin/mbarrier.hpp"
#include "twin/tensor_map.hpp"

namespace crossdock::twin {

namespace {

constexpr std::uint32_t kChunk = 16;
constexpr std::uint32_t kTileAlignment = 128;
// NaN in every float format; whoever reads a destination before its copy has completed sees it.
constexpr unsigned char kPoison = 0xFF;

struct SharedRange {
  unsigned char* base;
  std::uint32_t offset;
  std::uint32_t bytes;  // from the first to the last byte touched
};

SharedRange shared_range(Here& here, const void* shared, std::uint32_t bytes, const char* what) {
  const std::uint32_t offset = here.shared_offset(shared, bytes, what);
  return {here.cta.shared + offset, offset, bytes};
}

void check_bulk(Here& here, const void* global, std::uint32_t offset, std::uint32_t bytes,
                const char* what) {
  if (bytes == 0 || bytes % kChunk != 0 || offset % kChunk != 0 ||
      reinterpret_cast<std::uintptr_t>(global) % kChunk != 0)
    here.violation(
        "bulk",
        fmt::format("{} of {} bytes between {} and shared+{:#x}: addresses and size must be "
                    "multiples of 16",
                    what, bytes, global, offset));
  here.check_global(global, bytes, what);
}

// Every byte that a tensor copy touches must be allocated, too. A violation does not return, so the
// segments are given back first.
void check_segments(Here& here, std::vector<CopySegment>& segments, const char* what) {
  for (const CopySegment segment : segments) {
    if (segment.global == nullptr) continue;
    if (here.runtime.space().owner(segment.global, segment.bytes) >= 0) continue;
    segments = {};
    here.check_global(segment.global, segment.bytes, what);
  }
}

// Before a load into shared memory: nobody reads it, no generic store to it is unfenced.
void check_load(Here& here, const SharedRange& to, const void* barrier, const char* what) {
  SharedShadow& shadow = here.cta.shadow;
  if (find_mbarrier(here.cta, barrier) == nullptr)
    here.violation("mbarrier", fmt::format("{} completes on a word that holds no mbarrier", what));
  if (!shadow.enabled()) return;
  if (const auto finding = shadow.in_flight(to.offset, to.bytes)) {
    // Built first: a violation does not return, and temporaries beside it would leak.
    std::string message =
        fmt::format("{} into shared+{:#x}, which the {} issued at {} still reads (a missing wait)",
                    what, to.offset, finding->read->what, describe(finding->read->site));
    here.violation("smem-reuse", std::move(message));
  }
  if (const auto finding = shadow.unfenced(to.offset, to.bytes))
    here.violation("proxy",
                   fmt::format("{} overwrites shared+{:#x}, which thread {} wrote by a generic "
                               "store without fence.proxy.async since",
                               what, finding->offset, finding->writer));
  shadow.async_write(to.offset, to.bytes);
}

void check_store(Here& here, const SharedRange& from, const char* what) {
  const SharedShadow& shadow = here.cta.shadow;
  if (!shadow.enabled()) return;
  if (const auto finding = shadow.unfenced(from.offset, from.bytes))
    here.violation("proxy",
                   fmt::format("{} reads shared+{:#x}, which thread {} wrote by a generic store "
                               "without fence.proxy.async since",
                               what, finding->offset, finding->writer));
}

TensorMapOptions decode(Here& here, const void* map, const char* what) {
  TensorMapOptions options;
  if (!decode_tensor_map(map, options))
    here.violation("tensor",
                   fmt::format("{}: the tensor map was not made by twin::encode_tensor_map", what));
  return options;
}

void submit_load(Here& here, std::vector<CopySegment> segments, void* barrier, const char* what) {
  AsyncOp op;
  for (const CopySegment& segment : segments) {
    op.total += segment.bytes;
    if constexpr (!kTsan) raw_fill(segment.shared, kPoison, segment.bytes);
  }
  op.kind = AsyncOp::Kind::kLoad;
  op.cta = &here.cta;
  op.issuer = &here.fiber;
  op.segments = std::move(segments);
  op.barrier_word = barrier;
  op.view = here.fiber.memory.view;
  if constexpr (kTsan) {
    AsTsanFiber caller(here.fiber.tsan_fiber);
    tsan::read(barrier, 8);
    op.tsan_agent = tsan::create(what);  // the issue happens before the copy
  }
  here.runtime.async().submit(std::move(op));
}

void submit_store(Here& here, const SharedRange& from, AsyncOp op, const char* what) {
  SharedShadow& shadow = here.cta.shadow;
  here.fiber.note.site = here.site;
  BulkState& bulk = here.extra().bulk;
  if (!bulk.open) bulk.open = std::make_shared<BulkGroup>();
  ++bulk.open->pending_reads;
  ++bulk.open->pending_writes;
  if (shadow.enabled())
    bulk.open->shadow_reads.push_back(shadow.add_read({from.offset, from.bytes, what, here.site}));
  op.cta = &here.cta;
  op.issuer = &here.fiber;
  op.total = from.bytes;
  op.group = bulk.open;
  op.buffer = std::make_shared<std::vector<unsigned char>>(from.bytes);
  if constexpr (kTsan) {
    AsTsanFiber caller(here.fiber.tsan_fiber);
    op.tsan_agent = tsan::create(what);
  }
  here.runtime.async().submit(std::move(op));
}

hooks::BulkReduce reduction_of(Here& here, TensorElement element) {
  switch (element) {
    case TensorElement::kF32:
      return hooks::BulkReduce::kAddF32;
    case TensorElement::kBf16:
      return hooks::BulkReduce::kAddBf16;
    case TensorElement::kF16:
      return hooks::BulkReduce::kAddF16;
    case TensorElement::kU32:
      return hooks::BulkReduce::kAddU32;
    case TensorElement::kU64:
      return hooks::BulkReduce::kAddU64;
    default:
      here.violation("tensor", "tensor reduce: no addition for this element type");
  }
}

void check_tile(Here& here, const SharedRange& tile, const char* what) {
  if (tile.offset % kTileAlignment != 0)
    here.violation("tensor", fmt::format("{}: the tile at shared+{:#x} must be aligned to {} bytes",
                                         what, tile.offset, kTileAlignment));
}

void tensor_out(Here& here, const void* map, const std::int32_t* coordinates, const void* shared,
                bool reduce) {
  const char* what = reduce ? "tensor reduce" : "tensor store";
  here.preempt();
  Runtime::Internal internal(here.runtime);
  const TensorMapOptions options = decode(here, map, what);
  const SharedRange from = shared_range(here, shared, tile_bytes(options), what);
  check_tile(here, from, what);
  // Seen on sm_90: any negative coordinate of a store is an illegal instruction (loads may have
  // them).
  for (std::uint32_t i = 0; i < options.rank; ++i)
    if (coordinates[i] < 0)
      here.violation("tensor", fmt::format("{} at a negative coordinate ({} in dimension {})", what,
                                           coordinates[i], i));
  check_store(here, from, what);
  hooks::BulkReduce reduction{};
  if (reduce) reduction = reduction_of(here, options.element);
  AsyncOp op;
  op.kind = reduce ? AsyncOp::Kind::kReduce : AsyncOp::Kind::kStore;
  op.reduce = reduction;
  op.segments = tensor_segments(options, coordinates, from.base, from.offset);
  check_segments(here, op.segments, what);
  submit_store(here, from, std::move(op), what);
}

void bulk_out(Here& here, void* global, const void* shared, std::uint32_t bytes, AsyncOp op) {
  const bool reduce = op.kind == AsyncOp::Kind::kReduce;
  const char* what = reduce ? "bulk reduce" : "bulk store";
  here.preempt();
  Runtime::Internal internal(here.runtime);
  const SharedRange from = shared_range(here, shared, bytes, what);
  check_bulk(here, global, from.offset, bytes, what);
  check_store(here, from, what);
  op.segments = {{from.base, static_cast<unsigned char*>(global), bytes}};
  submit_store(here, from, std::move(op), what);
}

// Groups complete in order: the number from the oldest unfinished one to the newest.
std::size_t unfinished(const BulkState& bulk, bool read_only) {
  std::size_t done = 0;
  for (const auto& group : bulk.committed) {
    if ((read_only ? group->pending_reads : group->pending_writes) != 0) break;
    ++done;
  }
  return bulk.committed.size() - done;
}

void settle(Here& here, BulkState& bulk, std::size_t waited, bool read_only) {
  for (std::size_t i = 0; i < waited; ++i) {
    BulkGroup& group = *bulk.committed[i];
    if constexpr (kTsan) {
      AsTsanFiber caller(here.fiber.tsan_fiber);
      tsan::acquire(&group.tokens[0]);
      if (!read_only) tsan::acquire(&group.tokens[1]);
    }
    group.reads_waited = true;
    for (std::uint64_t handle : group.shadow_reads)
      here.cta.shadow.end_read(handle);
    group.shadow_reads.clear();
  }
  if (read_only) return;
  bulk.committed.erase(bulk.committed.begin(),
                       bulk.committed.begin() + static_cast<std::ptrdiff_t>(waited));
  here.runtime.memory().async_writes_waited(here.fiber);
}

}  // namespace

namespace hooks {

void bulk_load(void* shared, const void* global, std::uint32_t bytes, void* barrier, Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  const SharedRange to = shared_range(here, shared, bytes, "bulk load");
  check_bulk(here, global, to.offset, bytes, "bulk load");
  check_load(here, to, barrier, "bulk load");
  auto* from = static_cast<unsigned char*>(const_cast<void*>(global));
  submit_load(here, {{to.base, from, bytes}}, barrier, "bulk load");
}

void bulk_store(void* global, const void* shared, std::uint32_t bytes, Site site) {
  Here here(site);
  AsyncOp op;
  op.kind = AsyncOp::Kind::kStore;
  bulk_out(here, global, shared, bytes, std::move(op));
}

void bulk_reduce(void* global, const void* shared, std::uint32_t bytes, BulkReduce kind,
                 Site site) {
  Here here(site);
  AsyncOp op;
  op.kind = AsyncOp::Kind::kReduce;
  op.reduce = kind;
  bulk_out(here, global, shared, bytes, std::move(op));
}

void bulk_commit(Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  BulkState& bulk = here.extra().bulk;
  bulk.committed.push_back(bulk.open ? std::move(bulk.open) : std::make_shared<BulkGroup>());
  bulk.open.reset();
}

void bulk_wait(std::uint32_t pending, bool read_only, Site site) {
  Here here(site);
  here.preempt();
  if (!here.fiber.extra) return;
  BulkState& bulk = here.fiber.extra->bulk;
  const char* what = read_only ? "bulk.wait_group.read" : "bulk.wait_group";
  here.fiber.waits_for_async = true;
  while (unfinished(bulk, read_only) > pending)
    here.runtime.block(here.fiber, {what, site, 0, pending});
  here.fiber.waits_for_async = false;
  if (bulk.committed.size() <= pending) return;
  Runtime::Internal internal(here.runtime);
  settle(here, bulk, bulk.committed.size() - pending, read_only);
}

void tensor_load(void* shared, const void* map, const std::int32_t* coordinates, void* barrier,
                 Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  const TensorMapOptions options = decode(here, map, "tensor load");
  const SharedRange to = shared_range(here, shared, tile_bytes(options), "tensor load");
  check_tile(here, to, "tensor load");
  // Seen on sm_90: a load that begins at no multiple of 16 bytes is an illegal instruction.
  if (coordinates[0] * static_cast<std::int64_t>(bytes_of(options.element)) % 16 != 0)
    here.violation(
        "tensor",
        fmt::format("tensor load at coordinate {}, which is not at a multiple of 16 bytes",
                    coordinates[0]));
  check_load(here, to, barrier, "tensor load");
  std::vector<CopySegment> segments = tensor_segments(options, coordinates, to.base, to.offset);
  check_segments(here, segments, "tensor load");
  submit_load(here, std::move(segments), barrier, "tensor load");
}

void tensor_store(const void* map, const std::int32_t* coordinates, const void* shared, Site site) {
  Here here(site);
  tensor_out(here, map, coordinates, shared, false);
}

void tensor_reduce_add(const void* map, const std::int32_t* coordinates, const void* shared,
                       Site site) {
  Here here(site);
  tensor_out(here, map, coordinates, shared, true);
}

}  // namespace hooks
}  // namespace crossdock::twin
