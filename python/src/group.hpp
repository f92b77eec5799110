// What Python's Group and Handle hold. The rules of threads: calls of one rank are serialised by
// its lane (in the twin all ranks share one), which is never waited for with the GIL held, so that
// a call which has let the GIL go may hold it. A launch that finds its stream's queue full waits;
// it keeps neither the GIL nor another rank's lane from the call that it waits for. What Python
// drops (handles, memory of the twin) can go on any thread, with or without the GIL: it is only put
// on a list, and the next call of the rank gives it back to the library: without the GIL where that
// frees memory, which may wait for what runs on the GPU, and that for another rank's thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <nanobind/nanobind.h>
#include <vector>

#include <crossdock/ep/group.hpp>

#include "symm/group.hpp"
#include "tensor.hpp"

namespace crossdock::python {

// A rank of this process and where it runs: a CUDA ordinal, or kHost.
struct LocalRank {
  uint32_t rank;
  int device;
};

// The ranks of this process that a call can be about, and what was dropped of them. Shared by the
// Python objects made from it; the last of them ends it.
class RankBox {
 public:
  virtual ~RankBox() = default;
  RankBox(const RankBox&) = delete;
  RankBox& operator=(const RankBox&) = delete;

  [[nodiscard]] virtual symm::Group& ranks() const = 0;
  // Held during a call of the rank; gives back what was dropped. Needs the GIL, and lets it go
  // while it waits. A rank that is not of this process has the first lane: its call is refused
  // later.
  [[nodiscard]] std::unique_lock<std::mutex> enter(uint32_t rank);
  // All lanes, for a thread that has let the GIL go.
  [[nodiscard]] std::vector<std::unique_lock<std::mutex>> enter_all();
  // From any thread. `frees`: memory of the rank.
  void retire(uint32_t rank, std::shared_ptr<const void> dropped, bool frees) noexcept;
  [[nodiscard]] bool twin() const { return ranks().twin() != nullptr; }

 protected:
  RankBox() = default;
  void make_lanes();
  // Whoever is derived calls it before what was dropped loses what it came from.
  void drop_lanes() { lanes_.clear(); }

 private:
  struct Lane {
    std::mutex calls;
    std::mutex dropped_mutex;
    std::vector<std::shared_ptr<const void>> dropped, memory;

    void give_back(bool with_gil);
  };
  Lane& lane(uint32_t rank);
  std::vector<std::unique_ptr<Lane>> lanes_;
};

class GroupBox final : public RankBox {
 public:
  explicit GroupBox(ep::Group group) : group_(std::move(group)) { make_lanes(); }
  ~GroupBox() override { drop_lanes(); }

  [[nodiscard]] symm::Group& ranks() const override;
  [[nodiscard]] ep::Group& group() { return group_; }

 private:
  ep::Group group_;
};

// What gives no memory back when it goes, or only Python's.
template <class T>
inline constexpr bool kFreesMemory = true;
template <>
inline constexpr bool kFreesMemory<ep::Handle> = false;

// Keeps something of a rank until the last Python object that needs it is gone.
template <class T>
std::shared_ptr<T> keep(std::shared_ptr<RankBox> box, uint32_t rank, T value) {
  auto* const kept = new std::shared_ptr<T>(std::make_shared<T>(std::move(value)));
  return std::shared_ptr<T>(kept->get(), [box = std::move(box), rank, kept](T*) {
    box->retire(rank, std::move(*kept), kFreesMemory<T>);
    delete kept;
  });
}

// Memory of a rank in the twin, as owner of what Python sees.
Result<std::shared_ptr<symm::LocalMemory>> twin_memory(const std::shared_ptr<RankBox>& box,
                                                       uint32_t rank, uint64_t bytes);

// What the caller gave as a stream: a number, or an object of torch, CuPy or any with
// __cuda_stream__. Raises InvalidArgument for anything else.
std::uintptr_t stream_number(nb::handle given);
// The stream of a call: what the caller gave, else the current one of the framework, else null: the
// rank's own.
ep::StreamPtr stream_of(nb::handle given, Framework framework, int device);

}  // namespace crossdock::python
