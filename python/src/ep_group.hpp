// Group of Python: the library's group, and for the twin the copies of the caller's arrays, which
// kernels there can only read in memory of their rank. Each call makes Tokens or Combined of the
// caller's arrays, checked so that a mistake is named in the caller's words.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "copies.hpp"
#include "ep_handle.hpp"
#include "ep_options.hpp"

namespace crossdock::python {

// Where copies of rows go, expert by expert; None: not wanted.
struct ExpandArguments {
  nb::object rows, scales, weights, sources;
  uint32_t rows_per_expert = 0;
  bool scales_by_column = false;
};
// What dispatch() is given, as Python has it; objects may be None.
struct DispatchArguments {
  nb::object rows, ids, weights, scales;
  Cast cast = Cast::kNone;
  bool scales_by_column = false;
  // A handle whose routing is used again, and arrays in user_memory().
  nb::object routing = nb::none(), output = nb::none(), input = nb::none();
  ep::Path path = ep::Path::kAuto;
  uint32_t most_tokens = 0;
  bool send_only = false;  // the first half of a small dispatch
  std::optional<ExpandArguments> expanded = std::nullopt;
};
struct ReduceArguments {
  nb::object by_place;
  uint32_t rows_per_expert = 0;
  bool weighted = false;
  ep::Payload payload = ep::Payload::kBf16;
  nb::object ids;  // None: where the dispatch has put them
};
struct CombineArguments {
  nb::object out, weights;  // None: not wanted
  std::vector<nb::object> bias;
  nb::object rows, row_weights;  // of the experts; None: in the handle's expert input
  bool receive_only = false;     // the second half
  ep::CombineOptions how = {};   // not of the second half
};

class Group {
 public:
  Group(ep::Group group, const ep::Options& options);

  Handle dispatch(uint32_t rank, const DispatchArguments& arguments, nb::handle stream);
  void combine(const Handle& handle, const CombineArguments& arguments, nb::handle stream);
  void dispatch_receive(const Handle& handle, const std::optional<ExpandArguments>& expanded,
                        nb::handle stream);
  void combine_send(const Handle& handle, const ep::CombineOptions& how, nb::handle stream);
  void mask(uint32_t rank, uint32_t peer, bool masked, nb::handle stream);
  void clear_mask(uint32_t rank, nb::handle stream);
  // `told`: int32 [world].
  void read_mask(uint32_t rank, nb::handle told, nb::handle stream);
  // int32 [1], a bit for each masked rank
  Array mask_memory(uint32_t rank);
  uint32_t masked(uint32_t rank, double timeout);
  // offsets, aligned_counts, rows, positions
  std::vector<Array> group_rows(const Handle& handle, nb::handle stream);
  // The same lists, made before.
  std::vector<Array> grouped(const Handle& handle);
  void expand_rows(const Handle& handle, const ExpandArguments& arguments, nb::handle stream);
  void reduce_rows(const Handle& handle, const ReduceArguments& arguments, nb::handle stream);
  void reserve_copies(uint32_t rank, uint32_t copies);
  Array user_memory(uint32_t rank);
  // Bytes that a dispatch of such rows and scales (None: none) fills.
  uint64_t output_bytes(uint32_t rank, const DispatchArguments& arguments);
  // expert_selections, source_wait_ns, combine_wait_ns
  std::vector<Array> statistics_memory(uint32_t rank);
  void synchronize(double timeout, nb::handle stream);
  void check();
  void reset(double timeout);
  void reform(double timeout);
  std::vector<uint32_t> vacant_ranks();
  std::vector<uint32_t> waiting_ranks(double timeout);
  ep::Statistics statistics(uint32_t rank, double timeout);
  // Memory of the twin for outputs, [rows, columns].
  Array empty(uint32_t rank, ArrayType type, int64_t rows, int64_t columns);
  void close();

  [[nodiscard]] const std::vector<LocalRank>& ranks() const { return ranks_; }
  [[nodiscard]] uint32_t world() const { return world_; }
  [[nodiscard]] bool twin() const { return twin_; }
  [[nodiscard]] bool closed() const { return box_ == nullptr; }
  // Whose current stream calls without arrays are on: that of the last dispatch or, before there
  // was one, torch where the process has it.
  [[nodiscard]] Framework framework() const;
  [[nodiscard]] const ep::Sizes& memory() const { return memory_; }

 private:
  // Collective calls after which no handle from before is good, nor what was to be copied back.
  void begin_anew(double timeout, Result<> (ep::Group::*call)(Deadline));
  // Raises Closed after close(). Kept by the call: another thread may close the group meanwhile.
  [[nodiscard]] std::shared_ptr<GroupBox> open() const;
  // The same, for a call that others of the group have to wait for.
  struct Call {
    std::shared_ptr<GroupBox> box;
    std::unique_lock<std::mutex> lock;
  };
  [[nodiscard]] Call enter(uint32_t rank) const;
  // Runs a call of the library. On GPUs without the GIL: a launch may have to wait for its queue.
  template <class Run>
  auto launch(const Run& run) const {
    std::optional<nb::gil_scoped_release> release;
    if (!twin_) release.emplace();
    return run();
  }
  [[nodiscard]] int device_of(uint32_t rank) const;
  ep::Tokens tokens_of(uint32_t rank, const DispatchArguments& arguments, Payload& payload,
                       Framework& framework);
  void add_ids(ep::Tokens& tokens, uint32_t rank, const DispatchArguments& arguments);
  void add_scales(ep::Tokens& tokens, uint32_t rank, const DispatchArguments& arguments,
                  Payload& payload);
  ep::ExpertOutput experts_of(const Handle& handle, const CombineArguments& arguments);
  ep::DispatchOptions options_of(uint32_t rank, const DispatchArguments& arguments,
                                 std::shared_ptr<const ep::Handle>& routing,
                                 Payload& payload) const;
  // `payload`: of the rows that are copied.
  struct Copied {
    const char* call;
    uint32_t rank;
    uint32_t row_bytes;
    const Payload& payload;
  };
  ep::Expanded expanded_of(const Copied& from, const ExpandArguments& arguments);
  std::vector<Array> lists_of(const Handle& handle, const ep::Grouped& grouped) const;
  Tensor argument(const char* call, const char* name, nb::handle object, uint32_t rank) const;
  // Where the kernels of `rank` can read the tensor: on the GPU where it is, in the twin a copy.
  const void* readable(Tensor& t, uint32_t rank);
  // The same for what they write; after the next synchronize() it is in the caller's array.
  void* writable(const Tensor& t, uint32_t rank);
  // Memory of the library that the caller had from it: used where it is, in the twin too.
  void* lent(const char* call, const char* name, nb::handle object, uint32_t rank, Tensor& t);
  [[nodiscard]] bool in_heap(const Tensor& t, uint32_t rank) const;

  std::shared_ptr<GroupBox> box_;
  ep::Options options_;
  ep::Sizes memory_;
  uint32_t world_ = 1;
  bool twin_ = false;
  std::vector<LocalRank> ranks_;
  Framework framework_ = Framework::kNone;  // of the last dispatch
  Copies copies_;                           // of the calls since the last synchronize()
};

void bind_masks(nb::class_<Group>& group);

}  // namespace crossdock::python
