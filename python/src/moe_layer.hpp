// Layer of Python: the library's layer, and for the twin the copies of the caller's arrays.
// Siblings share all but the weights. Each call makes LayerInput and LayerOutput of the caller's
// arrays, checked so that a mistake is named in the caller's words. Threads as in group.hpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <crossdock/moe/layer.hpp>

#include "copies.hpp"
#include "moe_matrices.hpp"
#include "moe_weights.hpp"

namespace crossdock::python {

// What a forward is given, as Python has it; None: not given.
struct ForwardArguments {
  nb::object rows, ids, weights, scales, shared_weights;
  uint32_t expected_rows = 0;
};
struct OutputArguments {
  nb::object out, residual;
};

// Of all siblings.
struct LayerShared {
  std::shared_ptr<GroupBox> box;
  moe::LayerOptions options;
  moe::LayerSizes memory;
  uint32_t world = 1;
  bool twin = false;
  std::vector<LocalRank> ranks;
  Framework framework = Framework::kNone;  // of the last forward
  Copies copies;                           // of the calls since the last synchronize()
};

// A forward between its halves, with what its dispatch reads. It may go under the lane of the rank
// only, with or without the GIL.
class Half {
 public:
  Half(moe::BegunForward begun, std::vector<nb::object> held, Copies copies,
       std::weak_ptr<LayerShared> shared)
      : held_(std::move(held)),
        copies_(std::move(copies)),
        shared_(std::move(shared)),
        begun_(std::move(begun)) {}
  Half(Half&& other) noexcept
      : held_(std::move(other.held_)),
        copies_(std::move(other.copies_)),
        shared_(std::move(other.shared_)),
        begun_(std::exchange(other.begun_, std::nullopt)) {}
  Half& operator=(Half&&) = delete;
  // Dropped before its end: the caller's stream waits for the dispatch first, and only then may the
  // memory be used for something else in the order of that stream. The twin runs what it has queued
  // at the next synchronize(), and needs the copies until then.
  ~Half();

  [[nodiscard]] moe::BegunForward& begun() { return *begun_; }
  // It has ended: what it was given is free in the order of the stream.
  Copies let_go();

 private:
  std::vector<nb::object> held_;
  Copies copies_;
  std::weak_ptr<LayerShared> shared_;
  std::optional<moe::BegunForward> begun_;
};

template <>
inline constexpr bool kFreesMemory<Half> = false;

// What Python has of it.
struct BegunForward {
  std::shared_ptr<Half> half;  // null once ended
  uint32_t rank = 0;
  uint32_t tokens = 0;
  int device = kHost;
  Framework framework = Framework::kNone;
};

class Layer {
 public:
  Layer(ep::Group group, moe::Layer layer, const moe::LayerOptions& options);
  [[nodiscard]] Layer sibling() const;

  // Copies weights of the host to the rank's GPU; takes those that are there as they are. `shared`:
  // those of the shared experts.
  void load(uint32_t rank, const LayerWeights& weights, bool shared, double timeout);
  void use(uint32_t rank, const LayerWeights& weights, bool shared);
  // Prepares plain matrices, which are where the rank runs, in memory of the rank.
  struct Plain {
    Matrices matrices;
    uint32_t experts;
    bool up_first;
    std::string number;
  };
  LayerWeights prepare(uint32_t rank, const Plain& plain, double timeout);
  // Either may be None.
  void load_bias(uint32_t rank, nb::object gate_up, nb::object down, bool up_first, double timeout);
  void forward(uint32_t rank, const ForwardArguments& arguments, const OutputArguments& output,
               nb::handle stream);
  // What is said of `rows` by framework_of(), once they are where the rank runs.
  [[nodiscard]] Tensor rows_of(uint32_t rank, nb::object rows) const;
  BegunForward begin(uint32_t rank, const ForwardArguments& arguments, nb::handle stream);
  void end(BegunForward& begun, const OutputArguments& output, nb::handle stream);

  void synchronize(double timeout, nb::handle stream);
  void check();
  void reset(double timeout);
  ep::Statistics statistics(uint32_t rank, double timeout);
  // Memory of the twin for outputs, bf16 [rows, hidden].
  Array empty(uint32_t rank, ArrayType type, int64_t rows, int64_t columns);
  void close();

  [[nodiscard]] moe::WeightLayout weight_layout(uint32_t rank) const;
  [[nodiscard]] moe::WeightLayout shared_layout() const { return open()->shared_layout(); }
  [[nodiscard]] const std::vector<LocalRank>& ranks() const { return shared_->ranks; }
  [[nodiscard]] uint32_t world() const { return shared_->world; }
  [[nodiscard]] bool twin() const { return shared_->twin; }
  [[nodiscard]] bool closed() const { return layer_ == nullptr; }
  [[nodiscard]] const moe::LayerSizes& memory() const { return shared_->memory; }

 private:
  using Shared = LayerShared;
  struct Call {
    std::shared_ptr<moe::Layer> layer;
    std::unique_lock<std::mutex> lock;
  };
  Layer(std::shared_ptr<Shared> shared, moe::Layer layer);
  [[nodiscard]] std::shared_ptr<moe::Layer> open() const;
  [[nodiscard]] Call enter(uint32_t rank) const;
  // Runs a call of the library. On GPUs without the GIL: a launch may have to wait for its queue.
  template <class Run>
  auto launch(const Run& run) const {
    std::optional<nb::gil_scoped_release> release;
    if (!shared_->twin) release.emplace();
    return run();
  }
  [[nodiscard]] int device_of(uint32_t rank) const;
  Tensor argument(const char* name, nb::handle object, uint32_t rank) const;
  moe::LayerInput input_of(uint32_t rank, const ForwardArguments& a, Copies& copies,
                           Framework& framework) const;
  moe::LayerOutput output_of(uint32_t rank, uint32_t tokens, const OutputArguments& a,
                             Copies& copies) const;

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<moe::Layer> layer_;  // null once closed
};

}  // namespace crossdock::python
