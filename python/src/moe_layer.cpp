// Layer: making it, and weights. Forwards are in moe_forward.cpp, waiting is in moe_wait.cpp. See
// moe_layer.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe_layer.hpp"

#include <fmt/format.h>

#include "ep/core.hpp"
#include "ep_checks.hpp"
#include "errors.hpp"

namespace crossdock::python {

Layer::Layer(ep::Group group, moe::Layer layer, const moe::LayerOptions& options)
    : shared_(std::make_shared<Shared>()) {
  Shared& s = *shared_;
  s.box = std::make_shared<GroupBox>(std::move(group));
  s.options = options;
  s.memory = layer.memory();
  const symm::Group& symmetric = s.box->ranks();
  s.world = symmetric.world();
  s.twin = s.box->twin();
  for (const uint32_t rank : symmetric.local_ranks()) {
    const cuda::Context* const context = symmetric.rank(rank).device().context();
    s.ranks.push_back({rank, context == nullptr ? kHost : context->ordinal()});
  }
  layer_ = keep(s.box, s.ranks.front().rank, std::move(layer));
}

Layer::Layer(std::shared_ptr<Shared> shared, moe::Layer layer)
    : shared_(std::move(shared)),
      layer_(keep(shared_->box, shared_->ranks.front().rank, std::move(layer))) {}

Layer Layer::sibling() const {
  const auto [layer, lock] = enter(shared_->ranks.front().rank);
  return {shared_, layer->sibling()};
}

std::shared_ptr<moe::Layer> Layer::open() const {
  if (layer_ == nullptr)
    raise(make_error(Code::kClosed, "moe: the layer is closed: make a new one"));
  return layer_;
}

Layer::Call Layer::enter(uint32_t rank) const {
  (void)open();
  std::unique_lock<std::mutex> lock = shared_->box->enter(rank);
  // Somebody may have closed the layer while this call waited for its turn.
  return {open(), std::move(lock)};
}

int Layer::device_of(uint32_t rank) const {
  for (const LocalRank& local : shared_->ranks)
    if (local.rank == rank) return local.device;
  raise(invalid_argument(
      fmt::format("moe: rank {} is not one of the {} ranks of this process: see Layer.local_ranks",
                  rank, shared_->ranks.size())));
}

Tensor Layer::rows_of(uint32_t rank, nb::object rows) const {
  Tensor t = tensor_of(rows, "moe forward", "rows");
  need_device("moe forward", t, rank, device_of(rank));
  return t;
}

moe::WeightLayout Layer::weight_layout(uint32_t rank) const {
  (void)device_of(rank);
  return open()->weight_layout(rank);
}

// ---- weights -----------------------------------------------------------------------------------

void Layer::load(uint32_t rank, const LayerWeights& weights, bool shared, double timeout) {
  const auto [layer, lock] = enter(rank);
  (void)device_of(rank);
  if (weights.device != kHost)
    refuse(fmt::format("moe load: the weights are on GPU {}: use() takes them as they are",
                       weights.device));
  const Deadline deadline = deadline_in(timeout);
  value_or_raise(launch([&] {
    return shared ? layer->load_shared(rank, weights.view, deadline)
                  : layer->load(rank, weights.view, deadline);
  }));
}

LayerWeights Layer::prepare(uint32_t rank, const Plain& given, double timeout) {
  constexpr const char* kCall = "moe prepare";
  const auto [layer, lock] = enter(rank);
  const int device = device_of(rank);
  PlainMatrices m = plain_matrices(given.matrices, given.experts, given.number);
  Copies copies;
  for (Tensor* t : m.found.all()) {
    if (t->data == nullptr) continue;
    need_device(kCall, *t, rank, device);
    t->data = const_cast<void*>(copies.readable(shared_->box, *t, rank));
  }
  const Deadline deadline = deadline_in(timeout);
  const moe::PlainWeights plain = m.plain(given.up_first);
  // The arrays may still be written on their framework's stream.
  std::optional<cuda::Stream> before;
  if (const moe::StreamPtr on = stream_of(nb::none(), m.found.gate_up.framework, device);
      on != nullptr)
    before = cuda::Stream::borrow(*shared_->box->ranks().rank(rank).device().context(),
                                  static_cast<cuda::StreamHandle>(on));
  auto made = value_or_raise(launch([&]() -> Result<moe::PreparedWeights> {
    if (before) CROSSDOCK_CHECK_OK(before->synchronize(deadline));
    return layer->prepare_weights(rank, plain, deadline);
  }));
  LayerWeights out{.view = made.view(), .report = made.report(), .device = device};
  out.ranks = shared_->box.get();
  out.rank = rank;
  out.owner = keep(shared_->box, rank, std::move(made));
  return out;
}

void Layer::use(uint32_t rank, const LayerWeights& weights, bool shared) {
  const auto [layer, lock] = enter(rank);
  const bool ours = weights.ranks == shared_->box.get();
  if (ours && weights.rank != rank)
    refuse(
        fmt::format("moe use: the weights were prepared on rank {}: prepare those of rank {} on it",
                    weights.rank, rank));
  if (weights.device != device_of(rank) || (twin() && !ours))
    refuse(fmt::format(
        "moe use: the weights are on {}, and rank {} runs {}: load() copies weights "
        "of the host",
        weights.device == kHost ? "the host" : fmt::format("GPU {}", weights.device), rank,
        twin() ? "in the twin, which reads its own memory only"
               : fmt::format("on GPU {}", device_of(rank))));
  value_or_raise(shared ? layer->use_shared(rank, weights.view) : layer->use(rank, weights.view));
}

void Layer::load_bias(uint32_t rank, nb::object gate_up, nb::object down, bool up_first,
                      double timeout) {
  constexpr const char* kCall = "moe load_bias";
  const auto [layer, lock] = enter(rank);
  const moe::WeightLayout layout = weight_layout(rank);
  moe::ExpertBias bias{.up_first = up_first};
  bool known = false;
  const auto take = [&](const char* name, nb::handle object, int64_t columns) -> const void* {
    if (object.is_none()) return nullptr;
    const Tensor t = tensor_of(object, kCall, name);
    need_device(kCall, t, rank, kHost);
    need_matrix(kCall, t, layout.experts, columns);
    const bool f32 = t.is(dlpack::kFloat, 4);
    if (!f32 && !t.is_bf16())
      refuse(
          fmt::format("{}: {} is {}: it must be float32 or bfloat16", kCall, name, t.describe()));
    const moe::Number number = f32 ? moe::Number::kF32 : moe::Number::kBf16;
    if (known && bias.number != number)
      refuse(fmt::format("{}: {} is {}: gate_up and down must be of one type", kCall, name,
                         t.describe()));
    bias.number = number;
    known = true;
    return t.data;
  };
  bias.gate_up = take("gate_up", gate_up, int64_t{2} * layout.inter);
  bias.down = take("down", down, layout.hidden);
  const Deadline deadline = deadline_in(timeout);
  value_or_raise(launch([&] { return layer->load_bias(rank, bias, deadline); }));
}

Array Layer::empty(uint32_t rank, ArrayType type, int64_t rows, int64_t columns) {
  const auto [layer, lock] = enter(rank);
  (void)device_of(rank);
  const auto bytes = static_cast<uint64_t>(rows * columns) * type.bytes;
  auto memory = value_or_raise(twin_memory(shared_->box, rank, bytes));
  void* const address = memory->address();
  return matrix(std::move(memory), address, type, rows, columns);
}

}  // namespace crossdock::python
