// See group.hpp. SPDX-License-Identifier: Apache-2.0
#include "group.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <optional>

#include "ep/core.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

// The legacy default stream, which frameworks call 0. For the library null is the rank's own
// stream.
constexpr std::uintptr_t kLegacyStream = 1;

ep::StreamPtr stream_from(std::uintptr_t handle) {
  return reinterpret_cast<ep::StreamPtr>(handle == 0 ? kLegacyStream : handle);
}

// torch's current stream: by the call that compiled code uses, which takes 0.1 us.
std::uintptr_t torch_stream(int device) {
  static PyObject* raw = nullptr;
  if (raw == nullptr) {
    const nb::object internals = nb::module_::import_("torch").attr("_C");
    if (nb::hasattr(internals, "_cuda_getCurrentRawStream"))
      raw = nb::object(internals.attr("_cuda_getCurrentRawStream")).release().ptr();
  }
  if (raw != nullptr) return nb::cast<std::uintptr_t>(nb::handle(raw)(device));
  const nb::object current = nb::module_::import_("torch.cuda").attr("current_stream")(device);
  return nb::cast<std::uintptr_t>(current.attr("cuda_stream"));
}

std::uintptr_t cupy_stream(int device) {
  const nb::object current = nb::module_::import_("cupy.cuda").attr("get_current_stream")(device);
  return nb::cast<std::uintptr_t>(current.attr("ptr"));
}

}  // namespace

symm::Group& GroupBox::ranks() const {
  return group_.core().group();
}

void RankBox::make_lanes() {
  const std::size_t lanes = twin() ? 1 : std::max<std::size_t>(ranks().local_ranks().size(), 1);
  for (std::size_t i = 0; i < lanes; ++i)
    lanes_.push_back(std::make_unique<Lane>());
}

RankBox::Lane& RankBox::lane(uint32_t rank) {
  const auto local = ranks().local_ranks();
  for (std::size_t i = 0; i < lanes_.size() && i < local.size(); ++i)
    if (local[i] == rank) return *lanes_[i];
  return *lanes_.front();
}

std::unique_lock<std::mutex> RankBox::enter(uint32_t rank) {
  Lane& of_rank = lane(rank);
  std::unique_lock lock(of_rank.calls, std::try_to_lock);
  if (!lock) {
    const nb::gil_scoped_release release;
    lock.lock();
  }
  of_rank.give_back(true);
  return lock;
}

std::vector<std::unique_lock<std::mutex>> RankBox::enter_all() {
  std::vector<std::unique_lock<std::mutex>> locks;
  for (const auto& each : lanes_) {
    locks.emplace_back(each->calls);
    each->give_back(false);
  }
  return locks;
}

void RankBox::retire(uint32_t rank, std::shared_ptr<const void> dropped, bool frees) noexcept {
  Lane& of_rank = lane(rank);
  const std::lock_guard lock(of_rank.dropped_mutex);
  (frees ? of_rank.memory : of_rank.dropped).push_back(std::move(dropped));
}

void RankBox::Lane::give_back(bool with_gil) {
  std::vector<std::shared_ptr<const void>> gone, freed;
  {
    const std::lock_guard lock(dropped_mutex);
    gone.swap(dropped);
    freed.swap(memory);
  }
  // In this order: a forward that has begun is of a layer.
  gone.clear();
  if (freed.empty()) return;
  std::optional<nb::gil_scoped_release> release;
  if (with_gil) release.emplace();
  freed.clear();
}

Result<std::shared_ptr<symm::LocalMemory>> twin_memory(const std::shared_ptr<RankBox>& box,
                                                       uint32_t rank, uint64_t bytes) {
  symm::Rank& on = box->ranks().rank(rank);
  CROSSDOCK_TRY(memory, on.allocate(bytes == 0 ? 1 : bytes));
  return keep(box, rank, std::move(memory));
}

std::uintptr_t stream_number(nb::handle given) {
  if (nb::isinstance<nb::int_>(given)) return nb::cast<std::uintptr_t>(given);
  for (const char* name : {"cuda_stream", "ptr"})
    if (nb::hasattr(given, name)) return nb::cast<std::uintptr_t>(given.attr(name));
  if (nb::hasattr(given, "__cuda_stream__"))
    return nb::cast<std::uintptr_t>(given.attr("__cuda_stream__")()[1]);
  raise(invalid_argument(
      fmt::format("stream is a {}: give a torch or CuPy stream, an object with __cuda_stream__, or "
                  "a CUstream as a number",
                  nb::cast<std::string>(given.type().attr("__name__")))));
}

ep::StreamPtr stream_of(nb::handle given, Framework framework, int device) {
  if (device == kHost) return nullptr;
  if (!given.is_none()) return stream_from(stream_number(given));
  if (framework == Framework::kTorch) return stream_from(torch_stream(device));
  if (framework == Framework::kCupy) return stream_from(cupy_stream(device));
  return nullptr;
}

}  // namespace crossdock::python
