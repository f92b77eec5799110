// Options, and what all calls need of a group and its arrays. See coll_group.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <utility>

#include "coll/core.hpp"
#include "coll_group.hpp"
#include "errors.hpp"
#include "fields.hpp"

namespace crossdock::python {

coll::Options coll_options(nb::handle options) {
  coll::Options out;
  const auto number = [&](const char* name) {
    return whole_number<uint32_t>(options.attr(name), name);
  };
  const auto bytes = [&](const char* name) {
    return whole_number<uint64_t>(options.attr(name), name);
  };
  const auto flag = [&](const char* name) { return flag_of(options.attr(name), name); };
  out.session_bytes = bytes("session_bytes");
  out.gathers = number("gathers");
  out.reduce = flag("reduce");
  out.tensor_bytes = bytes("tensor_bytes");
  out.inflight = number("inflight");
  out.pipeline = flag("any_rank") ? coll::Pipeline::kAll : coll::Pipeline::kNeighbours;
  out.shard_rows = bytes("shard_rows");
  out.row_bytes = number("row_bytes");
  out.wide_indices = flag("wide_indices");
  out.fetch_sms = number("fetch_sms");
  out.wait = time_of(options.attr("wait"), "wait");
  return out;
}

nb::dict coll_sizes(nb::handle options, uint32_t world) {
  const coll::Sizes sizes = value_or_raise(coll::sizes(coll_options(options), world));
  nb::dict out;
  out["control_bytes"] = sizes.control_bytes;
  out["session_bytes"] = sizes.session_bytes;
  out["pipeline_bytes"] = sizes.pipeline_bytes;
  out["table_bytes"] = sizes.table_bytes;
  out["window_bytes"] = sizes.window_bytes;
  out["local_bytes"] = sizes.local_bytes;
  return out;
}

CollBox::CollBox(coll::Group made) : group(std::move(made)) {
  for (const uint32_t rank : ranks().local_ranks()) {
    const cuda::Context* const context = ranks().rank(rank).device().context();
    devices.push_back(context == nullptr ? kHost : context->ordinal());
  }
  make_lanes();
}

CollBox::~CollBox() {
  drop_lanes();
  const nb::gil_scoped_acquire acquire;
  {
    const nb::gil_scoped_release release;
    const coll::Group last = std::move(group);
  }
  held.clear();  // lanes of the CPU have used it until here
}

symm::Group& CollBox::ranks() const {
  return group.core().group();
}

int CollBox::device_of(uint32_t rank) const {
  const auto local = ranks().local_ranks();
  for (std::size_t i = 0; i < local.size(); ++i)
    if (local[i] == rank) return devices[i];
  raise(invalid_argument(
      fmt::format("coll: rank {} is not one of the {} ranks of this process", rank, local.size())));
}

Tensor CollBox::dense(const char* call, const char* name, nb::handle object, uint32_t rank) {
  const Tensor t = tensor_of(object, call, name);
  need_device(call, t, rank, device_of(rank));
  const bool packed =
      t.dims == 1
          ? t.shape[0] <= 1 || t.strides[0] == static_cast<int64_t>(t.item_bytes)
          : t.dense() && (t.shape[1] <= 1 || t.strides[1] == static_cast<int64_t>(t.item_bytes));
  if (!packed)
    raise(invalid_argument(
        fmt::format("{}: {} is {} with gaps: make it contiguous first", call, name, t.describe())));
  if (on_host()) held.push_back(nb::borrow(object));
  return t;
}

Tensor CollBox::table_rows(const char* call, const char* name, nb::handle object, uint32_t rank) {
  const Tensor t = dense(call, name, object, rank);
  const coll::Options& made_for = group.core().options();
  if (made_for.shard_rows > 0 && t.row_bytes() != made_for.row_bytes)
    raise(invalid_argument(
        fmt::format("{}: {} is {}, rows of {} bytes: those of the table have row_bytes = {}: give "
                    "[rows, columns] of that width",
                    call, name, t.describe(), t.row_bytes(), made_for.row_bytes)));
  return t;
}

}  // namespace crossdock::python
