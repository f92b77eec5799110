// Group: rows by expert, and memory that the library lends. See ep_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/core.hpp"
#include "ep_checks.hpp"
#include "ep_group.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

void* mutable_of(const void* address) {
  return const_cast<void*>(address);
}

void need_type(const char* call, const Tensor& t, ArrayType type, const char* name) {
  if (!t.is(type.kind, type.bytes))
    refuse(fmt::format("{}: {} is {}: it must be {}", call, t.name, t.describe(), name));
}

}  // namespace

void* Group::lent(const char* call, const char* name, nb::handle object, uint32_t rank, Tensor& t) {
  if (object.is_none()) return nullptr;
  t = argument(call, name, object, rank);
  if (!twin_) return t.data;
  if (!in_heap(t, rank))
    refuse(fmt::format(
        "{}: {} is not memory of rank {} of the twin: give arrays that the library made", call,
        name, rank));
  copies_.hold(object);
  return t.data;
}

std::vector<Array> Group::lists_of(const Handle& handle, const ep::Grouped& grouped) const {
  const std::shared_ptr<const ep::Handle> from = handle.open();
  const auto capacity = static_cast<int64_t>(from->received().capacity);
  const std::shared_ptr<const void> owner = from;
  std::vector<Array> out = {
      vector(owner, mutable_of(grouped.offsets), kInt32, handle.experts + 1),
      vector(owner, mutable_of(grouped.aligned_counts), kInt32, handle.experts),
      vector(owner, mutable_of(grouped.rows), kInt32, static_cast<int64_t>(grouped.places)),
      matrix(owner, mutable_of(grouped.positions), kInt32, capacity, options_.top_k)};
  for (Array& array : out)
    array.device = handle.device;
  return out;
}

std::vector<Array> Group::group_rows(const Handle& handle, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  return lists_of(handle,
                  value_or_raise(launch([&] { return box->group().group_rows(*from, on); })));
}

std::vector<Array> Group::grouped(const Handle& handle) {
  const auto [box, lock] = enter(handle.rank);
  return lists_of(handle, value_or_raise(box->group().grouped(*handle.open())));
}

ep::Expanded Group::expanded_of(const Copied& from, const ExpandArguments& a) {
  Tensor rows, scales, weights, sources;
  const char* const call = from.call;
  ep::Expanded to{.rows_per_expert = a.rows_per_expert, .scales_by_column = a.scales_by_column};
  to.rows = lent(call, "rows", a.rows, from.rank, rows);
  need_rows(call, rows);
  if (rows.row_bytes() != from.row_bytes)
    refuse(fmt::format("{}: rows is {}: it must have rows like those received, {} bytes", call,
                       rows.describe(), from.row_bytes));
  to.places = static_cast<uint64_t>(rows.shape[0]);
  to.row_stride = rows.row_stride();
  to.scales = lent(call, "scales", a.scales, from.rank, scales);
  if (to.scales != nullptr) {
    if (scales.shape[0] != rows.shape[0] || scales.shape[1] != from.payload.scale_values)
      refuse(fmt::format("{}: scales is {}: it must be [{}, {}]", call, scales.describe(),
                         rows.shape[0], from.payload.scale_values));
    // One column or row has no stride worth the name.
    if (a.scales_by_column && scales.shape[1] > 1)
      to.scale_stride = static_cast<uint64_t>(scales.strides[1]) / 4;
    if (!a.scales_by_column) to.scale_stride = scales.row_stride();
  }
  to.weights = static_cast<float*>(lent(call, "weights", a.weights, from.rank, weights));
  if (to.weights != nullptr) need_type(call, weights, kFloat32, "float32");
  to.sources = static_cast<ep::Source*>(lent(call, "sources", a.sources, from.rank, sources));
  if (to.sources != nullptr) need_type(call, sources, kInt32, "int32");
  return to;
}

void Group::expand_rows(const Handle& handle, const ExpandArguments& a, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  const ep::Expanded to =
      expanded_of({kExpand, handle.rank, from->received().row_bytes, handle.payload}, a);
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] { return box->group().expand_rows(*from, to, on); }));
}

void Group::reduce_rows(const Handle& handle, const ReduceArguments& a, nb::handle stream) {
  const auto [box, lock] = enter(handle.rank);
  const auto from = handle.open();
  Tensor t = argument(kReduce, "by_place", a.by_place, handle.rank);
  need_bf16_rows(kReduce, t, -1, options_.hidden);
  const uint64_t experts = device::EpExperts::make(options_.experts, world_).count(handle.rank);
  if (static_cast<uint64_t>(t.shape[0]) < experts * a.rows_per_expert)
    refuse(fmt::format("{}: by_place has {} rows; {} experts with rows_per_expert = {} need {}",
                       kReduce, t.shape[0], experts, a.rows_per_expert,
                       experts * a.rows_per_expert));
  ep::ByPlace outputs{.rows = readable(t, handle.rank),
                      .row_stride = t.row_stride(),
                      .rows_per_expert = a.rows_per_expert,
                      .weighted = a.weighted,
                      .payload = a.payload};
  if (!a.ids.is_none()) {
    Tensor ids = argument(kReduce, "ids", a.ids, handle.rank);
    need_type(kReduce, ids, kInt32, "int32");
    need_matrix(kReduce, ids, ids.shape[0], options_.top_k);
    outputs.ids = static_cast<const int32_t*>(readable(ids, handle.rank));
  }
  const ep::StreamPtr on = stream_of(stream, handle.framework, handle.device);
  value_or_raise(launch([&] { return box->group().reduce_rows(*from, outputs, on); }));
}

void Group::reserve_copies(uint32_t rank, uint32_t copies) {
  const auto [box, lock] = enter(rank);
  value_or_raise(launch([&] { return box->group().reserve_copies(rank, copies); }));
}

Array Group::user_memory(uint32_t rank) {
  const auto [box, lock] = enter(rank);
  const auto bytes = value_or_raise(box->group().user_memory(rank));
  Array array = vector(box, bytes.data(), carrier(1), static_cast<int64_t>(bytes.size()));
  array.device = device_of(rank);
  return array;
}

uint64_t Group::output_bytes(uint32_t rank, const DispatchArguments& a) {
  const auto [box, lock] = enter(rank);
  const Tensor rows = argument(kDispatch, "rows", a.rows, rank);
  need_rows(kDispatch, rows);
  ep::Tokens tokens{.row_bytes = static_cast<uint32_t>(rows.row_bytes()),
                    .cast = a.cast != Cast::kNone,
                    .cast_ue8m0 = a.cast == Cast::kUe8m0,
                    .scales_by_column = a.scales_by_column};
  if (!a.scales.is_none())
    tokens.scale_bytes =
        static_cast<uint32_t>(argument(kDispatch, "scales", a.scales, rank).row_bytes());
  return value_or_raise(box->group().output_bytes(tokens));
}

std::vector<Array> Group::statistics_memory(uint32_t rank) {
  const auto [box, lock] = enter(rank);
  const ep::StatisticsMemory memory = value_or_raise(box->group().statistics_memory(rank));
  if (memory.expert_selections == nullptr)
    refuse("ep statistics: the group was made with statistics = False");
  const uint32_t experts = device::EpExperts::make(options_.experts, world_).count(rank);
  std::vector<Array> out = {vector(box, mutable_of(memory.expert_selections), carrier(8), experts),
                            vector(box, mutable_of(memory.source_wait_ns), carrier(8), world_),
                            vector(box, mutable_of(memory.combine_wait_ns), carrier(8), world_)};
  for (Array& array : out)
    array.device = device_of(rank);
  return out;
}

}  // namespace crossdock::python
