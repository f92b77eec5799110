// An expert layer over the ranks of one NVLink domain, as one call: dispatch brings the tokens to
// the ranks of their experts, two grouped products with SwiGLU between them make the experts'
// outputs, combine brings those back as one sum. Shared experts run while dispatch travels.
//
//   Layer ── load(rank, weights)                 or use(), for weights that are on the GPU
//         ── forward(rank, input, output)        dispatch, lists, products, sums, combine
//         ── forward_begin(), forward_end()      the same in two calls, so that the dispatch of the
//                                                next micro-batch runs beside the products of this
//         ── sibling()                           the next layer of a model: weights of its own
//
// A forward puts work on a stream and returns: it never waits for the GPU, allocates nothing, and
// may be captured into a CUDA graph. Every rank makes the same forwards in the same order. Layers
// that share buffers (siblings, or layers over one group) run one after the other: on one stream,
// or on streams that the caller orders. The same input gives the same bits every time. A rank's
// Layer is single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/ep/group.hpp>
#include <crossdock/moe/grouped_gemm.hpp>
#include <crossdock/moe/weights.hpp>
#include <crossdock/symm/group_options.hpp>

namespace crossdock::moe {

class LayerCore;
struct Begun;
struct RankWeights;

inline namespace v1 {

// How the first product gets the rows of an expert.
enum class RowOrder : std::uint8_t {
  kAuto = 0,    // choose_row_order(): by the rows an expert has on average
  kGather = 1,  // the product gathers them where dispatch has put them
  kCopy = 2,    // a kernel before it copies them apart, into the memory of the outputs
};
// More than 64 rows an expert: kCopy; else kGather, since weights take longer to come than rows.
CROSSDOCK_API RowOrder choose_row_order(std::uint32_t expected_rows);

// The same on every rank.
struct LayerOptions {
  symm::GroupOptions ranks = {};
  std::uint32_t experts = 0;     // of all ranks, dealt in contiguous ranges; at least one a rank
  std::uint32_t top_k = 0;       // choices of a token
  std::uint32_t max_tokens = 0;  // of one rank in one forward
  std::uint32_t hidden = 0;      // a multiple of 128
  std::uint32_t inter = 0;       // between the products, a multiple of 128
  // Of the weights, and of the rows that travel and are multiplied; with weights of kE2m1 those are
  // kE4m3.
  Format format = Format::kE4m3;
  // Of the weights, of the rows that travel, and of what lies between the products; not kBf16.
  ScaleType scales = ScaleType::kF32;
  bool wide_ids = false;  // expert ids of 64 bits; else of 32
  // Of experts that every token goes through besides those it chose, on its own rank, all of them
  // taken as one; a multiple of 128. 0: none. Same format, clamp and precision as the others.
  std::uint32_t shared_inter = 0;
  // gate <= clamp, -clamp <= up <= clamp.
  float clamp = std::numeric_limits<float>::infinity();
  bool fast = false;  // approximate exponential and reciprocal in SwiGLU
  // Choices that one rank computes in one forward; more are a fault that names the expert. 0: all
  // that can arrive, world * max_tokens * top_k, which is the most memory.
  std::uint32_t max_places = 0;
  GemmTile tile = GemmTile::kAuto;
  RowOrder row_order = RowOrder::kAuto;  // the results are the same, bit by bit
  // Blocks, which is SMs. 0: the library's choice.
  std::uint32_t dispatch_sms = 0;
  std::uint32_t combine_sms = 0;
  std::uint32_t gemm_sms = 0;
  // ep::Options::expand_sms, where experts may have so many rows that they are copied apart
  // (row_order): a forward() in one call then copies them while others are on their way. A forward
  // in halves copies afterwards, since its dispatch runs beside products that use the memory; so
  // does every one of a layer with shared experts, for which this counts as 0.
  std::uint32_t expand_sms = 0;
  // The longest a kernel waits for a peer before the forward fails, naming it.
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
  // For compiling the kernels of the products, which a machine does once; ranks.timeout is for the
  // rest of create().
  std::chrono::milliseconds compile_timeout{std::chrono::seconds(600)};
  bool statistics = true;
};

// What the ep::Group of such a layer is made with; for a caller that makes it and shares it.
CROSSDOCK_API ep::Options group_options(const LayerOptions& options);

// Memory of one rank, in bytes. Siblings share all but the weights.
struct LayerSizes {
  ep::Sizes group = {};
  std::uint64_t places = 0;
  std::uint64_t activation_bytes = 0;  // between the products, with scales
  std::uint64_t output_bytes = 0;      // of the second product
  std::uint64_t ones_bytes = 0;        // weights of choices for which none are given
  WeightSizes weights = {};            // of the rank with the most experts
  std::uint64_t shared_bytes = 0;      // shared experts: buffers between their stages
  WeightSizes shared_weights = {};     // and weights, the same on every rank
};
CROSSDOCK_API Result<LayerSizes> layer_sizes(const LayerOptions& options);

// The tokens of one rank; memory of its GPU that stays as it is until the forward has run.
struct LayerInput {
  std::uint32_t count = 0;     // at most max_tokens; may be 0, and differ between ranks
  const void* rows = nullptr;  // [count][hidden], 16-byte aligned
  // kE4m3 with scales, where the layer multiplies such rows; or kBf16, which it casts as it sends.
  // Ranks may differ; with LayerOptions::expand_sms they must not, those without tokens included.
  Format format = Format::kBf16;
  std::uint64_t row_stride = 0;  // bytes, a multiple of 16; 0: dense
  // e4m3: f32 [count][hidden / 128]; of a layer with kUe8m0 bytes, padded to words of four:
  // [count][hidden / 512, rounded up][4].
  const void* scales = nullptr;
  std::uint64_t scale_stride = 0;  // bytes, a multiple of 4; 0: dense
  const void* ids = nullptr;       // [count][top_k]: experts, -1: none
  // [count][top_k]: factor of each choice; null: 1. Each rank may give them or not.
  const float* weights = nullptr;
  const float* shared_weights = nullptr;  // [count]: factor of the shared experts; null: 1
  // Rows that an expert gets on average, to choose tiles by. 0: as if all ranks had `count` tokens
  // and chose evenly.
  std::uint32_t expected_rows = 0;
};
struct LayerOutput {
  void* rows = nullptr;            // bf16 [count][hidden], 16-byte aligned
  std::uint64_t row_stride = 0;    // bytes, a multiple of 16; 0: dense
  const void* residual = nullptr;  // bf16, like rows, added first; null: none
  std::uint64_t residual_stride = 0;
};

// Biases of the experts of one rank as checkpoints have them, in memory of the host. Null: none.
struct ExpertBias {
  Number number = Number::kF32;   // or kBf16
  const void* gate_up = nullptr;  // [experts][2 * inter]: all gates, then all ups
  bool up_first = false;          // all ups, then all gates
  const void* down = nullptr;     // [experts][hidden]
};

// A forward that has begun: its tokens are on their way. Dropped before its end it gives its slot
// back and makes no output; unless all ranks do so, the others then fail at their deadline.
class CROSSDOCK_API BegunForward {
 public:
  BegunForward(BegunForward&&) noexcept;
  BegunForward& operator=(BegunForward&&) noexcept;
  ~BegunForward();

  [[nodiscard]] bool ended() const noexcept { return begun_ == nullptr; }

 private:
  friend class Layer;
  explicit BegunForward(std::unique_ptr<moe::Begun> begun);
  std::unique_ptr<moe::Begun> begun_;
};

class CROSSDOCK_API Layer {
 public:
  // Collective among the processes; compiles the kernels or loads them from the cache.
  static Result<Layer> create(const LayerOptions& options);
  // Over a group made with group_options(), or one that has at least as much. The group may go
  // first. `options.ranks` is not looked at. Local.
  static Result<Layer> create(const ep::Group& group, const LayerOptions& options,
                              Deadline deadline);
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  // Another layer of the same shape, which shares the group and all buffers but has no weights yet.
  [[nodiscard]] Layer sibling() const;

  [[nodiscard]] std::uint32_t world() const noexcept;
  [[nodiscard]] std::span<const std::uint32_t> local_ranks() const noexcept;
  [[nodiscard]] const LayerSizes& memory() const noexcept;
  // Of the weights that a rank takes.
  [[nodiscard]] WeightLayout weight_layout(std::uint32_t rank) const;

  // Copies prepared weights of the rank's experts from the host to its GPU; they are there when
  // this returns. kIncompatible, naming both, where they are of another layout. load(), use() and
  // load_bias() free what load() and load_bias() copied before: capture graphs again that were
  // captured with it. Graphs that shall go on with other weights use() memory of the caller's, into
  // which it writes them.
  Result<> load(std::uint32_t rank, const WeightsView& weights, Deadline deadline);
  // The same for weights in memory of the rank's GPU, which stay there.
  Result<> use(std::uint32_t rank, const WeightsView& weights);
  // For use() and use_shared(): prepares plain weights in memory of the rank's GPU, there, in the
  // layer's format, as Weights::prepare() does on a rank of a Gemm. They keep the layer's buffers.
  // Compiles or loads a kernel, allocates and waits; not in a capture.
  Result<PreparedWeights> prepare_weights(std::uint32_t rank, const PlainWeights& plain,
                                          Deadline deadline);

  // Biases beside the weights that the rank has; load() and use() drop them. They are added to the
  // sums of the products before those are rounded. With `down` the weights of the choices are
  // applied when the outputs of a row's choices are added up, and not in the first product.
  // Compiles or loads kernels of products with a bias; not in a capture.
  Result<> load_bias(std::uint32_t rank, const ExpertBias& bias, Deadline deadline);
  // The same for the shared experts, which are one expert of shared_inter values: every rank has
  // all of them.
  [[nodiscard]] WeightLayout shared_layout() const;
  Result<> load_shared(std::uint32_t rank, const WeightsView& weights, Deadline deadline);
  Result<> use_shared(std::uint32_t rank, const WeightsView& weights);

  // kInvalidArgument with the rule, the value and the fix; nothing has been launched then.
  Result<> forward(std::uint32_t rank, const LayerInput& input, const LayerOutput& output,
                   StreamPtr stream = nullptr);
  // The two halves of a forward, which give the same bits:
  //
  //   begin(0)  begin(1)  end(0)  begin(2)  end(1)  begin(3)  end(2) ...
  //
  // The dispatch of a begin runs on a stream of the library, after what is on `stream` now and
  // beside what comes on it later. An end, on the same stream or one ordered after it, waits for
  // the rows on the GPU and does the rest; what comes on either stream later may write to the
  // input. What is called later comes after an end that was on another stream than its begin. Every
  // rank begins and ends in the same order. Two may have begun at a time, of all layers over the
  // group together: a third is kBusy. In a capture both halves are captured: while one has begun
  // outside it no other call of a layer over the group is made in it, nor the other way round, and
  // no graph with such calls is launched, since its dispatch would run beside the one that has
  // begun.
  Result<BegunForward> forward_begin(std::uint32_t rank, const LayerInput& input,
                                     StreamPtr stream = nullptr);
  // Nothing has happened to `begun` where this is an error of the arguments.
  Result<> forward_end(BegunForward& begun, const LayerOutput& output, StreamPtr stream = nullptr);

  // Waits for the ranks' own streams (on the CPU: runs what was called), then check().
  Result<> synchronize(Deadline deadline);
  // The first fault of a local rank, naming what failed and who is to blame. Never waits.
  [[nodiscard]] Result<> check() const;
  // After a fault: collective, when no work of the group is left on any stream of this process.
  Result<> reset(Deadline deadline);
  // Of the group: choices of each expert of the rank, and waits for each source.
  Result<ep::Statistics> statistics(std::uint32_t rank, Deadline deadline) const;

  // What the library's tools and tests need beside the API.
  [[nodiscard]] moe::LayerCore& core() const noexcept { return *core_; }
  [[nodiscard]] const moe::RankWeights* weights_of(std::uint32_t rank) const noexcept;

 private:
  explicit Layer(std::shared_ptr<moe::LayerCore> core);
  std::shared_ptr<moe::LayerCore> core_;
  std::vector<std::unique_ptr<moe::RankWeights>> weights_;  // by local rank
  std::vector<std::unique_ptr<moe::RankWeights>> shared_;   // the same, of the shared experts
};

}  // namespace v1
}  // namespace crossdock::moe
