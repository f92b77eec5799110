// Gemm of crossdock._native: grouped products on one GPU, or in the twin.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <memory>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <optional>
#include <string>

#include <crossdock/layout/fp4_weights.cuh>
#include <crossdock/moe/grouped_gemm.hpp>

#include "bind.hpp"
#include "copies.hpp"
#include "cuda/stream.hpp"
#include "ep_checks.hpp"
#include "errors.hpp"
#include "fields.hpp"
#include "moe/gemm_core.hpp"
#include "moe_options.hpp"

namespace crossdock::python {
namespace {

constexpr const char* kGemm = "moe gemm";
constexpr uint32_t kRank = 0;

class GemmBox final : public RankBox {
 public:
  explicit GemmBox(moe::Gemm gemm) : gemm_(std::move(gemm)) { make_lanes(); }
  ~GemmBox() override { drop_lanes(); }
  [[nodiscard]] symm::Group& ranks() const override { return gemm_.core().group(); }
  [[nodiscard]] moe::Gemm& gemm() { return gemm_; }

 private:
  moe::Gemm gemm_;
};

// What a call is given, by name: `call` of Python has them all as attributes, None: not given.
class Arguments {
 public:
  Arguments(nb::handle call, const std::shared_ptr<GemmBox>& box, Copies& copies, int device)
      : call_(call), box_(box), copies_(copies), device_(device) {}

  [[nodiscard]] nb::object of(const char* name) const { return nb::object(call_.attr(name)); }
  [[nodiscard]] std::optional<Tensor> find(const char* name) const {
    const nb::object given = of(name);
    if (given.is_none()) return std::nullopt;
    const Tensor t = tensor_of(given, kGemm, name);
    need_device(kGemm, t, kRank, device_);
    return t;
  }
  [[nodiscard]] Tensor need(const char* name) const {
    const auto t = find(name);
    if (!t) refuse(fmt::format("{}: {} is missing", kGemm, name));
    return *t;
  }
  // A row of numbers of 32 bits that kernels read; any length.
  template <class T>
  [[nodiscard]] const T* numbers(const char* name, std::uint8_t kind, int64_t& count) const {
    auto t = find(name);
    if (!t) return nullptr;
    if (!t->is(kind, 4) || t->dims != 1 || !t->dense())
      refuse(fmt::format("{}: {} is {}: it must be {} in one dimension, contiguous", kGemm, name,
                         t->describe(), kind == dlpack::kInt ? "int32" : "float32"));
    count = t->shape[0];
    return static_cast<const T*>(read(*t));
  }
  [[nodiscard]] const void* read(Tensor& t) const { return copies_.readable(box_, t, kRank); }
  [[nodiscard]] void* write(const Tensor& t) const { return copies_.writable(box_, t, kRank); }

 private:
  nb::handle call_;
  const std::shared_ptr<GemmBox>& box_;
  Copies& copies_;
  int device_;
};

// A number of rows or columns as the library counts them, which refuses what is too many.
uint32_t count_of(int64_t count) {
  return static_cast<uint32_t>(std::min<int64_t>(count, std::numeric_limits<uint32_t>::max()));
}

void need_count(const char* name, int64_t count, int64_t wanted) {
  if (count != wanted)
    refuse(fmt::format("{}: {} has {} numbers: it must have {}", kGemm, name, count, wanted));
}

bool is_byte(const Tensor& t) {
  return t.is(dlpack::kUint, 1) || t.is(dlpack::kFloat8E8m0fnu, 1);
}
constexpr int64_t kFp4Block = crossdock::device::kFp4BlockBytes;  // of 128 x 128 weights

moe::Format format_of_rows(const Tensor& t) {
  if (t.is_bf16()) return moe::Format::kBf16;
  if (t.is(dlpack::kFloat8E4m3fn, 1) ||
      (t.framework != Framework::kTorch && t.is(dlpack::kUint, 1)))
    return moe::Format::kE4m3;
  refuse(
      fmt::format("{}: {} is {}: it must be bfloat16 or float8_e4m3fn (with NumPy also codes, as "
                  "uint16 and uint8)",
                  kGemm, t.name, t.describe()));
}

// By column, of `groups` of 128 values; ue8m0 in words of four.
Tensor scale_rows_of(const Tensor& t, moe::ScaleType type, int64_t groups) {
  const bool words = type == moe::ScaleType::kUe8m0;
  const int64_t rows = words ? (groups + 3) / 4 : groups;
  if (!t.is(words ? dlpack::kInt : dlpack::kFloat, 4) || t.dims != 2 || t.shape[0] != rows)
    refuse(fmt::format("{}: {} is {}: it must be {} [{}, columns]", kGemm, t.name, t.describe(),
                       words ? "int32, four ue8m0 in each," : "float32", rows));
  need_rows(kGemm, t);
  return t;
}

void read_weights(moe::GemmCall& call, const Arguments& a, uint32_t experts) {
  Tensor rows = a.need("weights");
  need_matrix(kGemm, rows, rows.shape[0], rows.shape[1]);
  moe::GemmWeights& w = call.weights;
  const std::string name = text_of(a.of("format"));
  w.format = name == "e2m1" ? moe::Format::kE2m1 : format_of_rows(rows);
  if (name != "auto" && format_of(a.of("format")) != w.format)
    refuse(fmt::format("{}: weights is {}, which is not {}", kGemm, rows.describe(), name));
  const bool blocks = w.format == moe::Format::kE2m1;
  if (blocks && (!is_byte(rows) || rows.shape[1] % kFp4Block != 0))
    refuse(fmt::format("{}: weights is {}: in e2m1 its rows are blocks of {} bytes, as uint8",
                       kGemm, rows.describe(), kFp4Block));
  w.experts = experts;
  const int64_t n = blocks ? rows.shape[0] * 128 : rows.shape[0];
  const int64_t k = blocks ? rows.shape[1] / kFp4Block * 128 : rows.shape[1];
  w.n = count_of(n / std::max<int64_t>(experts, 1));
  w.k = count_of(k);
  w.rows = a.read(rows);
  auto scales = a.find("weight_scales");
  if (!scales) return;
  if (!scales->is(dlpack::kFloat, 4) && !is_byte(*scales))
    refuse(
        fmt::format("{}: weight_scales is {}: it must be float32, or ue8m0 as uint8 or "
                    "float8_e8m0fnu",
                    kGemm, scales->describe()));
  need_matrix(kGemm, *scales, n / 128, k / 128);
  call.scale_type = is_byte(*scales) ? moe::ScaleType::kUe8m0 : moe::ScaleType::kF32;
  w.scales = a.read(*scales);
}
// What such weights multiply.
moe::Format input_format(const moe::GemmCall& call) {
  return call.weights.format == moe::Format::kBf16 ? moe::Format::kBf16 : moe::Format::kE4m3;
}

void read_input(moe::GemmCall& call, const Arguments& a) {
  Tensor rows = a.need("rows");
  need_rows(kGemm, rows);
  if (format_of_rows(rows) != input_format(call) || rows.shape[1] != call.weights.k)
    refuse(fmt::format("{}: rows is {}: it must be {} [rows, {}], as the weights", kGemm,
                       rows.describe(), python::format_name(input_format(call)), call.weights.k));
  need_aligned(kGemm, rows);
  call.input.count = count_of(rows.shape[0]);
  call.input.rows = a.read(rows);
  call.input.row_stride = rows.row_stride();
  auto scales = a.find("scales");
  if (!scales) return;
  *scales = scale_rows_of(*scales, call.scale_type, call.weights.k / 128);
  call.input.scale_columns = static_cast<uint64_t>(scales->shape[1]);
  need_matrix(kGemm, *scales, scales->shape[0], scales->shape[1]);
  call.input.scales = a.read(*scales);
}

void read_groups(moe::GemmCall& call, const Arguments& a, uint32_t expert_rows) {
  moe::GemmGroups& g = call.groups;
  int64_t count = 0;
  g.offsets = a.numbers<uint32_t>("offsets", dlpack::kInt, count);
  if (g.offsets != nullptr) need_count("offsets", count, int64_t{call.weights.experts} + 1);
  g.counts = a.numbers<uint32_t>("counts", dlpack::kInt, count);
  if (g.counts != nullptr) need_count("counts", count, call.weights.experts);
  g.rows = a.numbers<int32_t>("places", dlpack::kInt, count);
  if (g.rows != nullptr) g.places = count_of(count);
  g.expert_rows = expert_rows;
}

void read_output(moe::GemmCall& call, const Arguments& a) {
  const int64_t places = call.groups.rows != nullptr ? call.groups.places : call.input.count;
  Tensor out = a.need("out");
  need_rows(kGemm, out);
  const int64_t columns = call.swiglu ? call.weights.n / 2 : call.weights.n;
  if (out.shape[0] != places || out.shape[1] != columns)
    refuse(
        fmt::format("{}: out is {}: it must be [{}, {}]", kGemm, out.describe(), places, columns));
  need_aligned(kGemm, out);
  call.output.format = format_of_rows(out);
  call.output.rows = a.write(out);
  call.output.row_stride = call.output.rows == out.data ? out.row_stride() : 0;
  auto scales = a.find("out_scales");
  if (!scales) return;
  *scales = scale_rows_of(*scales, call.scale_type, columns / 128);
  need_matrix(kGemm, *scales, scales->shape[0], scales->shape[1]);
  call.output.scale_columns = static_cast<uint64_t>(scales->shape[1]);
  call.output.scales = a.write(*scales);
}

// `swiglu` of Python, with clamp and fast; None: a plain product.
void read_swiglu(moe::GemmCall& call, nb::handle swiglu) {
  if (swiglu.is_none()) return;
  call.swiglu.emplace();
  call.swiglu->clamp = nb::cast<float>(swiglu.attr("clamp"));
  call.swiglu->fast = nb::cast<bool>(swiglu.attr("fast"));
}

// [experts][n], in the order of the weights' columns.
void read_bias(moe::GemmCall& call, const Arguments& a) {
  auto bias = a.find("bias");
  if (!bias) return;
  need_matrix(kGemm, *bias, call.weights.experts, call.weights.n);
  const bool f32 = bias->is(dlpack::kFloat, 4);
  if (!f32 && !bias->is_bf16())
    refuse(fmt::format("{}: bias is {}: it must be float32 or bfloat16", kGemm, bias->describe()));
  call.bias = moe::Bias{a.read(*bias), f32 ? moe::Number::kF32 : moe::Number::kBf16};
}

class Gemm {
 public:
  Gemm(int device, bool cpu, uint32_t sms, double timeout) {
    moe::GemmOptions options{.sms = sms};
    options.ranks.world = 1;
    options.ranks.ranks = {{.rank = kRank, .device = cpu ? -1 : device}};
    options.ranks.backend = cpu ? symm::Backend::kCpu : symm::Backend::kGpu;
    options.ranks.timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of(timeout, "timeout"));
    auto made = [&] {
      const nb::gil_scoped_release release;
      return moe::Gemm::create(options);
    }();
    box_ = std::make_shared<GemmBox>(value_or_raise(std::move(made)));
    const cuda::Context* const context = box_->ranks().rank(kRank).device().context();
    device_ = context == nullptr ? kHost : context->ordinal();
  }

  struct Like {
    nb::object format, scales, tile;
  };
  void prepare(const Like& of, bool swiglu, uint32_t expected_rows, double timeout) {
    const auto lock = box_->enter(kRank);
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
    const auto lock = box_->enter(kRank);
    Copies copies;
    const Arguments a(given, box_, copies, device_);
    moe::GemmCall call;
    read_weights(call, a, experts);
    read_input(call, a);
    read_groups(call, a, expert_rows);
    read_swiglu(call, a.of("swiglu"));
    read_bias(call, a);
    read_output(call, a);
    int64_t count = 0;
    const float* const weights = a.numbers<float>("row_weights", dlpack::kFloat, count);
    if (weights != nullptr && !call.swiglu)
      refuse("moe gemm: row_weights belong to swiglu: give both, or neither");
    if (weights != nullptr) {
      need_count("row_weights", count,
                 call.groups.rows != nullptr ? call.groups.places : call.input.count);
      call.swiglu->row_weights = weights;
    }
    call.tile = tile_of(a.of("tile"));
    call.expected_rows = whole_number<uint32_t>(a.of("expected_rows"), "expected_rows");
    framework_ = tensor_of(a.of("rows"), kGemm, "rows").framework;
    const moe::StreamPtr on = stream_of(stream, framework_, device_);
    value_or_raise(launch([&] { return box_->gemm().run(kRank, call, on); }));
    copies_.take_over(std::move(copies));
  }

  void synchronize(double timeout, nb::handle stream) {
    const Deadline deadline = deadline_in(timeout);
    std::optional<cuda::Stream> other;
    if (const moe::StreamPtr on = stream_of(stream, framework_, device_); on != nullptr)
      other = cuda::Stream::borrow(*box_->ranks().rank(kRank).device().context(),
                                   static_cast<cuda::StreamHandle>(on));
    std::unique_lock<std::mutex> lock;
    if (box_->twin()) lock = box_->enter(kRank);
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
    const auto lock = box_->enter(kRank);
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
