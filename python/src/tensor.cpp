// See tensor.hpp. SPDX-License-Identifier: Apache-2.0
#include "tensor.hpp"

#include <array>
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <string_view>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace crossdock::python {
namespace {

struct TypeCode {
  std::uint8_t kind;
  uint32_t bytes;
};
struct NamedType {
  const char* name;
  TypeCode code;
};
// Types whose kind matters here, by the names that torch, NumPy and ml_dtypes share.
constexpr std::array<NamedType, 11> kTypes = {{{"bfloat16", {dlpack::kBfloat, 2}},
                                               {"float8_e4m3fn", {dlpack::kFloat8E4m3fn, 1}},
                                               {"float8_e8m0fnu", {dlpack::kFloat8E8m0fnu, 1}},
                                               {"float4_e2m1fn_x2", {dlpack::kFloat4E2m1fnX2, 1}},
                                               {"float16", {dlpack::kFloat, 2}},
                                               {"float32", {dlpack::kFloat, 4}},
                                               {"int32", {dlpack::kInt, 4}},
                                               {"int64", {dlpack::kInt, 8}},
                                               {"uint8", {dlpack::kUint, 1}},
                                               {"uint16", {dlpack::kUint, 2}},
                                               {"bool", {dlpack::kBool, 1}}}};

// What is asked of torch, looked up once and kept for the life of the process.
struct Torch {
  nb::object tensor, data_ptr, get_device, dtype, shape, stride, itemsize;
  std::vector<std::pair<PyObject*, TypeCode>> types;

  explicit Torch(nb::handle torch)
      : tensor(torch.attr("Tensor")),
        data_ptr(nb::str("data_ptr")),
        get_device(nb::str("get_device")),
        dtype(nb::str("dtype")),
        shape(nb::str("shape")),
        stride(nb::str("stride")),
        itemsize(nb::str("itemsize")) {
    for (const NamedType& type : kTypes)
      if (nb::hasattr(torch, type.name))
        types.emplace_back(nb::object(torch.attr(type.name)).release().ptr(), type.code);
  }
  [[nodiscard]] TypeCode code_of(nb::handle type) const {
    for (const auto& [known, code] : types)
      if (known == type.ptr()) return code;
    return {0xff, nb::cast<uint32_t>(type.attr(itemsize))};
  }
};
const Torch* torch() {
  static const Torch* found = nullptr;
  if (found == nullptr)
    if (const nb::handle module = loaded_module("torch"); module.is_valid())
      found = new Torch(module);
  return found;
}

[[noreturn]] void refuse(const std::string& text) {
  raise(invalid_argument(text));
}

void set_dims(Tensor& t, const char* call, std::size_t dims) {
  if (dims < 1 || dims > kMaxDims)
    refuse(fmt::format("{}: {} must have two dimensions, not {}", call, t.name, dims));
  t.dims = static_cast<int>(dims);
  if (dims == 1) t.shape[1] = 1;
}

void ask_torch(Tensor& t, const char* call, const Torch& torch) {
  const nb::handle o = t.object;
  const TypeCode code = torch.code_of(o.attr(torch.dtype));
  t.kind = code.kind;
  t.item_bytes = code.bytes;
  const nb::object shape = o.attr(torch.shape);
  const nb::object strides = o.attr(torch.stride)();
  set_dims(t, call, nb::len(shape));
  for (int i = 0; i < t.dims; ++i) {
    t.shape[i] = nb::cast<int64_t>(shape[i]);
    t.strides[i] = nb::cast<int64_t>(strides[i]) * t.item_bytes;
  }
  t.device = nb::cast<int>(o.attr(torch.get_device)());
  t.data = reinterpret_cast<void*>(nb::cast<uint64_t>(o.attr(torch.data_ptr)()));
  t.framework = Framework::kTorch;
}

void ask_numpy(Tensor& t, const char* call) {
  const nb::object dtype = t.object.attr("dtype");
  const auto name = nb::cast<std::string>(dtype.attr("name"));
  t.kind = 0xff;
  t.item_bytes = nb::cast<uint32_t>(dtype.attr("itemsize"));
  for (const NamedType& type : kTypes)
    if (name == type.name) t.kind = type.code.kind;
  const nb::tuple shape = t.object.attr("shape"), strides = t.object.attr("strides");
  set_dims(t, call, nb::len(shape));
  for (int i = 0; i < t.dims; ++i) {
    t.shape[i] = nb::cast<int64_t>(shape[i]);
    t.strides[i] = nb::cast<int64_t>(strides[i]);
  }
  t.data = reinterpret_cast<void*>(nb::cast<uint64_t>(t.object.attr("ctypes").attr("data")));
  t.framework = Framework::kNumpy;
}

// The tensor inside a capsule that the caller has not taken over: its own destructor frees it.
const dlpack::Tensor* look_into(nb::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName) == 1)
    return &static_cast<dlpack::ManagedTensorVersioned*>(
                PyCapsule_GetPointer(capsule.ptr(), dlpack::kVersionedName))
                ->tensor;
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kName) == 1)
    return &static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kName))
                ->tensor;
  return nullptr;
}

void ask_dlpack(Tensor& t, const char* call) {
  if (!nb::hasattr(t.object, "__dlpack__"))
    refuse(
        fmt::format("{}: {} must be a torch tensor, a NumPy array or another array with "
                    "__dlpack__, not {}",
                    call, t.name, nb::cast<std::string>(t.object.type().attr("__name__"))));
  const auto device = nb::cast<nb::tuple>(t.object.attr("__dlpack_device__")());
  const bool gpu = nb::cast<int>(device[0]) == dlpack::kCuda;
  // -1: the order of streams is ours to keep, so the producer does not wait for anything.
  const nb::object capsule =
      gpu ? t.object.attr("__dlpack__")(nb::arg("stream") = -1) : t.object.attr("__dlpack__")();
  const dlpack::Tensor* const inside = look_into(capsule);
  if (inside == nullptr) refuse(fmt::format("{}: __dlpack__ of {} gave no tensor", call, t.name));
  set_dims(t, call, static_cast<std::size_t>(inside->ndim));
  t.kind = inside->dtype.code;
  t.item_bytes = (inside->dtype.bits * inside->dtype.lanes + 7u) / 8u;
  int64_t dense = t.item_bytes;
  for (int i = t.dims - 1; i >= 0; --i) {
    t.shape[i] = inside->shape[i];
    t.strides[i] = inside->strides != nullptr ? inside->strides[i] * t.item_bytes : dense;
    dense *= t.shape[i];
  }
  t.data = static_cast<char*>(inside->data) + inside->byte_offset;
  t.device = gpu ? inside->device.id : kHost;
  const auto module = nb::cast<std::string>(t.object.type().attr("__module__"));
  if (module.starts_with("cupy")) t.framework = Framework::kCupy;
}

}  // namespace

nb::handle loaded_module(const char* name) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  // Borrowed from sys.modules, which keeps it.
  return PyDict_GetItemString(modules.ptr(), name);
}

Tensor tensor_of(nb::handle object, const char* call, const char* name) {
  Tensor t;
  t.name = name;
  t.object = object;
  const Torch* const known = torch();
  if (known != nullptr && PyObject_IsInstance(object.ptr(), known->tensor.ptr()) == 1) {
    ask_torch(t, call, *known);
  } else if (nb::hasattr(object, "__array_interface__") && nb::hasattr(object, "ctypes")) {
    ask_numpy(t, call);
  } else {
    ask_dlpack(t, call);
  }
  if (t.data == nullptr && t.shape[0] != 0 && t.shape[1] != 0)
    refuse(fmt::format("{}: {} has no memory: give an array with values", call, t.name));
  return t;
}

std::string Tensor::describe() const {
  std::string text = nb::hasattr(object, "dtype") ? text_of(nb::object(object.attr("dtype")))
                                                  : fmt::format("{} bytes", item_bytes);
  text += dims == 1 ? fmt::format(" [{}]", shape[0]) : fmt::format(" [{}, {}]", shape[0], shape[1]);
  return text;
}

}  // namespace crossdock::python
