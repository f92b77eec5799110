// KernelRef: one kernel variant for both backends, made from one constexpr configuration. The GPU's
// half is the specification that the JIT compiles, with the configuration as text; the twin's half
// is the same kernel, instantiated by the host compiler with the same configuration.
//
//   template <device::BarrierConfig kConfig>
//   KernelRef<device::BarrierParams> barrier_kernel() {
//     using C = device::BarrierConfig;
//     return make_kernel<kConfig>(device::KernelId::kBarrier, "barrier", "BarrierConfig",
//                                 &device::kernel::barrier<kConfig>, Member{"threads",
//                                 &C::threads}, Member{"grid_sync", &C::grid_sync},
//                                 Member{"verify", &C::verify});
//   }
//
// Values, thread-compatible. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include <crossdock/layout/fault.cuh>

#include "jit/spec.hpp"

namespace crossdock::symm {

template <class Params>
struct KernelRef {
  using Parameters = Params;
  device::KernelId id = device::KernelId::kNone;
  const char* name = "";      // a literal: the header is crossdock/kernel/<name>.cuh
  jit::KernelSpec spec = {};  // its `sm` is 0: the architecture of the GPU it is prepared for
  void (*twin)(const Params&) = nullptr;
};

// A member of a configuration struct and its name, whose order is the struct's.
template <class Config, class T>
struct Member {
  const char* name;
  T Config::* pointer;
};
template <class Config, class T>
Member(const char*, T Config::*) -> Member<Config, T>;

namespace detail {

struct Anything {
  template <class T>
  operator T() const;  // never defined: only asked whether it would convert
};
template <class Config, class... Found>
consteval std::size_t member_count() {
  if constexpr (requires { Config{Found{}..., Anything{}}; }) {
    return member_count<Config, Found..., Anything>();
  } else {
    return sizeof...(Found);
  }
}

}  // namespace detail

// `name`: of the header and of the function in crossdock::device::kernel. `config_type`: the name
// of the configuration's type in crossdock::device.
template <auto kConfig, class Params, class Config, class... Ts>
KernelRef<Params> make_kernel(device::KernelId id, const char* name, const char* config_type,
                              void (*twin)(const Params&), Member<Config, Ts>... members) {
  static_assert(std::is_same_v<Config, std::remove_const_t<decltype(kConfig)>>);
  static_assert(sizeof...(members) == detail::member_count<Config>(),
                "name every member: one that is left out would have its default on the GPU only");
  jit::ConfigText text;
  (text.field(members.name, kConfig.*members.pointer), ...);
  return {.id = id,
          .name = name,
          .spec = {.name = name,
                   .entry = std::string("crossdock::device::kernel::") + name,
                   .config_type = std::string("crossdock::device::") + config_type,
                   .config = text.text()},
          .twin = twin};
}

}  // namespace crossdock::symm
