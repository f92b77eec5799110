// See array.hpp. The deleters of what is exported may run on any thread, without the GIL: they
// touch
// no Python object. SPDX-License-Identifier: Apache-2.0
#include "array.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <optional>
#include <utility>

#include "bind.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

// A tensor lent by DLPack in one of its two forms, with what it points to.
template <class Managed>
struct Lent {
  Managed managed{};
  std::shared_ptr<const void> owner;
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];

  explicit Lent(const Array& array) : owner(array.owner) {
    std::copy_n(array.shape, kMaxDims, shape);
    std::copy_n(array.strides, kMaxDims, strides);
    const bool host = array.device == kHost;
    managed.tensor = {
        .data = array.data,
        .device = {host ? dlpack::kCpu : dlpack::kCuda, host ? 0 : array.device},
        .ndim = array.dims,
        .dtype = {array.type.kind, static_cast<std::uint8_t>(array.type.bytes * 8), 1},
        .shape = shape,
        .strides = strides,
        .byte_offset = 0};
    managed.context = this;
    managed.deleter = [](Managed* self) { delete static_cast<Lent*>(self->context); };
  }
};

// Of a capsule that nobody has taken over: a consumer renames those it takes.
template <class Managed>
void drop_capsule(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) != 1) return;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}
void drop_plain(PyObject* capsule) {
  drop_capsule<dlpack::ManagedTensor>(capsule, dlpack::kName);
}
void drop_versioned(PyObject* capsule) {
  drop_capsule<dlpack::ManagedTensorVersioned>(capsule, dlpack::kVersionedName);
}

nb::object plain_capsule(const Array& array) {
  auto lent = std::make_unique<Lent<dlpack::ManagedTensor>>(array);
  PyObject* const capsule = PyCapsule_New(&lent->managed, dlpack::kName, &drop_plain);
  if (capsule == nullptr) throw nb::python_error();
  (void)lent.release();
  return nb::steal(capsule);
}
nb::object versioned_capsule(const Array& array) {
  auto lent = std::make_unique<Lent<dlpack::ManagedTensorVersioned>>(array);
  lent->managed.version = {1, 0};
  PyObject* const capsule = PyCapsule_New(&lent->managed, dlpack::kVersionedName, &drop_versioned);
  if (capsule == nullptr) throw nb::python_error();
  (void)lent.release();
  return nb::steal(capsule);
}

nb::object export_dlpack(const Array& array, nb::object, nb::object max_version, nb::object,
                         std::optional<bool> copy) {
  if (copy.value_or(false))
    raise(invalid_argument("__dlpack__: copy = True is not offered: copy what you get"));
  if (!max_version.is_none() && nb::cast<int>(max_version[0]) >= 1) return versioned_capsule(array);
  return plain_capsule(array);
}

// "<i4"; bf16 and others that NumPy does not know go as unsigned codes.
std::string type_string(ArrayType type) {
  const char letter = type.kind == dlpack::kInt ? 'i' : type.kind == dlpack::kFloat ? 'f' : 'u';
  return fmt::format("{}{}{}", type.bytes == 1 ? '|' : '<', letter, type.bytes);
}

nb::dict interface(const Array& array, int version) {
  nb::list shape, strides;
  for (int i = 0; i < array.dims; ++i) {
    shape.append(array.shape[i]);
    strides.append(array.strides[i] * array.type.bytes);
  }
  nb::dict out;
  out["version"] = version;
  out["typestr"] = type_string(array.type);
  out["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.data), false);
  out["shape"] = nb::tuple(shape);
  out["strides"] = nb::tuple(strides);
  return out;
}

nb::dict host_interface(const Array& array) {
  if (array.device != kHost) throw nb::attribute_error("__array_interface__: not in host memory");
  return interface(array, 3);
}
nb::dict cuda_interface(const Array& array) {
  if (array.device == kHost)
    throw nb::attribute_error("__cuda_array_interface__: not in memory of a GPU");
  nb::dict out = interface(array, 3);
  out["stream"] = nb::none();
  return out;
}

nb::tuple shape_of(const Array& array) {
  return array.dims == 1 ? nb::make_tuple(array.shape[0])
                         : nb::make_tuple(array.shape[0], array.shape[1]);
}

}  // namespace

Array matrix(std::shared_ptr<const void> owner, void* data, ArrayType type, int64_t rows,
             int64_t columns) {
  Array array;
  array.owner = std::move(owner);
  array.data = data;
  array.type = type;
  array.dims = 2;
  array.shape[0] = rows;
  array.shape[1] = columns;
  array.strides[0] = columns;
  return array;
}
Array vector(std::shared_ptr<const void> owner, void* data, ArrayType type, int64_t length) {
  Array array = matrix(std::move(owner), data, type, length, 1);
  array.dims = 1;
  return array;
}

void add_array(nb::module_& m) {
  nb::class_<Array>(m, "Array", "Memory of the library; arrays made from it keep it alive.")
      .def("capsule", &plain_capsule, "A capsule of DLPack.")
      .def("__dlpack__", &export_dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none())
      .def("__dlpack_device__",
           [](const Array& array) {
             return array.device == kHost ? std::pair<int, int>(dlpack::kCpu, 0)
                                          : std::pair<int, int>(dlpack::kCuda, array.device);
           })
      .def_prop_ro("__array_interface__", &host_interface)
      .def_prop_ro("__cuda_array_interface__", &cuda_interface)
      .def_prop_ro("shape", &shape_of)
      .def_prop_ro("pointer",
                   [](const Array& array) { return reinterpret_cast<std::uintptr_t>(array.data); });
}

}  // namespace crossdock::python
