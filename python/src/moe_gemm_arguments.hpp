// Arguments of a grouped product as Python has them, and where kernels reach them. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <memory>
#include <optional>

#include "copies.hpp"
#include "ep_checks.hpp"
#include "moe_gemm_call.hpp"

namespace crossdock::python {

inline constexpr const char* kGemm = "moe gemm";

class Arguments {
 public:
  Arguments(nb::handle call, const std::shared_ptr<GemmBox>& box, Copies& copies, int device)
      : call_(call), box_(box), copies_(copies), device_(device) {}

  [[nodiscard]] nb::object of(const char* name) const { return nb::object(call_.attr(name)); }
  [[nodiscard]] std::optional<Tensor> find(const char* name) const {
    const nb::object given = of(name);
    if (given.is_none()) return std::nullopt;
    const Tensor t = tensor_of(given, kGemm, name);
    need_device(kGemm, t, kGemmRank, device_);
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
  [[nodiscard]] const void* read(Tensor& t) const { return copies_.readable(box_, t, kGemmRank); }
  [[nodiscard]] void* write(const Tensor& t) const { return copies_.writable(box_, t, kGemmRank); }

 private:
  nb::handle call_;
  const std::shared_ptr<GemmBox>& box_;
  Copies& copies_;
  int device_;
};

}  // namespace crossdock::python
