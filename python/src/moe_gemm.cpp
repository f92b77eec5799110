// Gemm of crossdock._native: grouped products on one GPU, or in the twin.
// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <optional>
#include <string>

#include "array.hpp"
#include "bind.hpp"
#include "cuda/stream.hpp"
#include "errors.hpp"
#include "moe_gemm_call.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

class Gemm {
 public:
  Gemm(int device, bool cpu, uint32_t sms, double timeout) {
    moe::GemmOptions options{.sms = sms};
    options.ranks.world = 1;
    options.ranks.ranks = {{.rank = kGemmRank, .device = cpu ? -1 : device}};
    options.ranks.backend = cpu ? symm::Backend::kCpu : symm::Backend::kGpu;
    options.ranks.timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of(timeout, "timeout"));
    auto made = [&] {
      const nb::gil_scoped_release release;
      return moe::Gemm::create(options);
    }();
    box_ = std::make_shared<GemmBox>(value_or_raise(std::move(made)));
    const cuda::Context* const context = box_->ranks().rank(kGemmRank).device().context();
    device_ = context == nullptr ? kHost : context->ordinal();
  }

  struct Like {
    nb::object format, scales, tile;
  };
  void prepare(const Like& of, bool swiglu, uint32_t expected_rows, double timeout) {
    const auto lock = box_->enter(kGemmRank);
    moe::GemmCall like;
    like.weights.format = format_of(of.format);
    like.scale_type = scale_type_of(of.scales);
    if (swiglu) like.swiglu.emplace();
    like.tile = tile_of(of.tile);
    like.expected_rows = expected_rows;
    const Deadline deadline = deadline_in(timeout);
    value_or_raise(launch([&] { return box_->gemm().prepare(like, deadline); }));
  }

  void run(nb::handle given, uint32_t experts, uint32_t expert_rows, nb::handle stream) {
    const auto lock = box_->enter(kGemmRank);
    Copies copies;
    const moe::GemmCall call = gemm_call_of(
        {.call = given, .experts = experts, .expert_rows = expert_rows}, box_, copies, device_);
    framework_ = tensor_of(given.attr("rows"), "moe gemm", "rows").framework;
    const moe::StreamPtr on = stream_of(stream, framework_, device_);
    value_or_raise(launch([&] { return box_->gemm().run(kGemmRank, call, on); }));
    copies_.take_over(std::move(copies));
  }

  void synchronize(double timeout, nb::handle stream) {
    const Deadline deadline = deadline_in(timeout);
    std::optional<cuda::Stream> other;
    if (const moe::StreamPtr on = stream_of(stream, framework_, device_); on != nullptr)
      other = cuda::Stream::borrow(*box_->ranks().rank(kGemmRank).device().context(),
                                   static_cast<cuda::StreamHandle>(on));
    std::unique_lock<std::mutex> lock;
    if (box_->twin()) lock = box_->enter(kGemmRank);
    const Copies copies = std::exchange(copies_, {});
    const Result<> done = [&]() -> Result<> {
      const nb::gil_scoped_release release;
      if (other) CROSSDOCK_CHECK_OK(other->synchronize(deadline));
      return box_->gemm().synchronize(deadline);
    }();
    copies.copy_back();
    value_or_raise(done);
  }
  void check() { value_or_raise(box_->gemm().check()); }
  void reset(double timeout) {
    const Deadline deadline = deadline_in(timeout);
    const auto lock = box_->enter(kGemmRank);
    copies_ = {};
    value_or_raise(launch([&] { return box_->gemm().reset(deadline); }));
  }

  Array empty(uint32_t rank, ArrayType type, int64_t rows, int64_t columns) {
    const auto lock = box_->enter(rank);
    auto memory =
        value_or_raise(twin_memory(box_, rank, static_cast<uint64_t>(rows * columns) * type.bytes));
    void* const address = memory->address();
    return matrix(std::move(memory), address, type, rows, columns);
  }
  [[nodiscard]] bool twin() const { return box_->twin(); }
  [[nodiscard]] int device() const { return device_; }

 private:
  // Runs a call of the library without the GIL: a launch may have to wait for its queue.
  template <class Run>
  static Result<> launch(const Run& run) {
    const nb::gil_scoped_release release;
    return run();
  }

  std::shared_ptr<GemmBox> box_;
  int device_ = kHost;
  Framework framework_ = Framework::kNone;  // of the last call
  Copies copies_;                           // of the calls since the last synchronize()
};

ArrayType type_of(const std::string& name) {
  if (name == "bfloat16") return kBf16;
  if (name == "int16") return carrier(2);
  if (name == "int32") return kInt32;
  if (name == "uint8") return carrier(1);
  if (name == "float32") return kFloat32;
  throw nb::value_error("empty(): no such type");
}

}  // namespace

void add_moe_gemm(nb::module_& m) {
  nb::class_<Gemm>(m, "Gemm")
      .def(nb::init<int, bool, uint32_t, double>(), nb::arg("device"), nb::arg("cpu"),
           nb::arg("sms"), nb::arg("timeout"))
      .def_prop_ro("twin", &Gemm::twin)
      .def_prop_ro("device", &Gemm::device)
      .def(
          "prepare",
          [](Gemm& g, nb::object format, nb::object scales, bool swiglu, nb::object tile,
             uint32_t expected_rows, double timeout) {
            g.prepare({std::move(format), std::move(scales), std::move(tile)}, swiglu,
                      expected_rows, timeout);
          },
          nb::arg("format"), nb::arg("scales"), nb::arg("swiglu"), nb::arg("tile"),
          nb::arg("expected_rows"), nb::arg("timeout"))
      .def("run", &Gemm::run, nb::arg("call"), nb::arg("experts"), nb::arg("expert_rows"),
           nb::arg("stream").none())
      .def("synchronize", &Gemm::synchronize, nb::arg("timeout"), nb::arg("stream").none())
      .def("check", &Gemm::check)
      .def("reset", &Gemm::reset, nb::arg("timeout"))
      .def(
          "empty",
          [](Gemm& g, uint32_t rank, const std::string& type, int64_t rows, int64_t columns) {
            return g.empty(rank, type_of(type), rows, columns);
          },
          nb::arg("rank"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"));
}

}  // namespace crossdock::python
