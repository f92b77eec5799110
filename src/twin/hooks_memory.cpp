// The hooks for loads, stores, atomics and fences. Shared memory is strongly ordered here (its
// races are TSan's and the proxy checker's business); global memory goes through the weak-memory
// model.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <limits>

#include "twin/hook.hpp"
#include "twin/numbers.hpp"
#include "twin/tsan_access.hpp"

namespace crossdock::twin {

namespace {

bool is_weak(Access access) {
  return access.order == Order::kWeak || access.order == Order::kNonCoherent;
}

float as_float(std::uint32_t bits) {
  float value;
  raw_copy(&value, &bits, sizeof value);
  return value;
}
std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  raw_copy(&bits, &value, sizeof bits);
  return bits;
}
std::uint32_t add_halves(std::uint32_t a, std::uint32_t b, hooks::Rmw op) {
  std::uint32_t out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto x = static_cast<std::uint16_t>(a >> shift);
    const auto y = static_cast<std::uint16_t>(b >> shift);
    const std::uint16_t sum = op == hooks::Rmw::kAddBf16x2
                                  ? float_to_bf16(bf16_to_float(x) + bf16_to_float(y))
                                  : float_to_f16(f16_to_float(x) + f16_to_float(y));
    out |= static_cast<std::uint32_t>(sum) << shift;
  }
  return out;
}

std::int64_t sign_extend(std::uint64_t v, unsigned bytes) {
  return bytes == 4 ? static_cast<std::int32_t>(v) : static_cast<std::int64_t>(v);
}

std::uint64_t combine(hooks::Rmw op, std::uint64_t old, std::uint64_t operand, unsigned bytes) {
  using hooks::Rmw;
  switch (op) {
    case Rmw::kAdd:
      return old + operand;
    case Rmw::kMin:
      return std::min(old, operand);
    case Rmw::kMax:
      return std::max(old, operand);
    case Rmw::kMinSigned:
      return sign_extend(old, bytes) < sign_extend(operand, bytes) ? old : operand;
    case Rmw::kMaxSigned:
      return sign_extend(old, bytes) > sign_extend(operand, bytes) ? old : operand;
    case Rmw::kAnd:
      return old & operand;
    case Rmw::kOr:
      return old | operand;
    case Rmw::kXor:
      return old ^ operand;
    case Rmw::kExchange:
      return operand;
    case Rmw::kAddF32:
      return as_bits(as_float(static_cast<std::uint32_t>(old)) +
                     as_float(static_cast<std::uint32_t>(operand)));
    case Rmw::kAddBf16x2:
    case Rmw::kAddF16x2:
      return add_halves(static_cast<std::uint32_t>(old), static_cast<std::uint32_t>(operand), op);
  }
  return operand;
}

// Reads the old value, asks `next` for the new one and writes it, as one step with the access's
// order.
template <class Next>
std::uint64_t read_modify_write(Here& here, void* p, unsigned bytes, Access access, Next&& next) {
  here.preempt();
  if (bytes != 4 && bytes != 8)
    here.violation("atomic", fmt::format("an atomic of {} bytes", bytes));
  here.check_aligned(p, bytes, "an atomic");
  const bool shared = here.is_shared(p);
  if (shared)
    here.generic_shared_write(here.shared_offset(p, bytes, "an atomic"), bytes, "an atomic");
  else
    here.check_global(p, bytes, "an atomic");
  if constexpr (kTsan) tsan::before_rmw(here.fiber, p, bytes, access);
  Runtime::Internal internal(here.runtime);
  here.runtime.watch().record(here.fiber, p);
  WeakMemory& memory = here.runtime.memory();
  if (!shared) memory.begin_rmw(here.fiber, p, bytes, access);
  std::uint64_t old = 0;
  raw_copy(&old, p, bytes);
  const std::uint64_t value = next(old);
  if (shared) {
    raw_copy(p, &value, bytes);
    here.runtime.watch().notify(p);
  } else {
    memory.perform_rmw(here.fiber, p, &value, bytes, access);
  }
  return old;
}

// A strong vector access is one of 8 bytes after the other, and others may run in between.
void load_apart(Here& here, const void* p, void* out, unsigned bytes, Access access) {
  for (unsigned at = 0; at < bytes; at += 8) {
    if (at != 0) here.preempt();
    const auto* from = static_cast<const unsigned char*>(p) + at;
    here.runtime.watch().record(here.fiber, from);
    std::uint64_t value = 0;
    if constexpr (kTsan)
      value = tsan::load(here.fiber, from, 8, access);
    else
      here.runtime.memory().load(here.fiber, from, &value, 8, access);
    raw_copy(static_cast<unsigned char*>(out) + at, &value, 8);
  }
}
void store_apart(Here& here, void* p, const void* in, unsigned bytes, Access access) {
  // The last first: a reader that trusts the last 8 bytes is to be found out.
  for (unsigned at = bytes; at != 0; at -= 8) {
    if (at != bytes) here.preempt();
    auto* to = static_cast<unsigned char*>(p) + at - 8;
    std::uint64_t value = 0;
    raw_copy(&value, static_cast<const unsigned char*>(in) + at - 8, 8);
    if constexpr (kTsan) {
      tsan::store(here.fiber, to, value, 8, access);
      Runtime::Internal internal(here.runtime);
      here.runtime.watch().notify(to);
    } else {
      here.runtime.memory().store(here.fiber, to, &value, 8, access);
    }
  }
}

}  // namespace

namespace hooks {

std::uint64_t load(const void* p, unsigned bytes, Access access, Site site) {
  Here here(site);
  here.preempt();
  here.check_aligned(p, bytes, "a load");
  const bool shared = here.is_shared(p);
  if (shared)
    here.shared_offset(p, bytes, "a load");
  else
    here.check_global(p, bytes, "a load");
  if (!is_weak(access)) here.runtime.watch().record(here.fiber, p);
  if (kTsan) return tsan::load(here.fiber, p, bytes, access);
  std::uint64_t value = 0;
  if (shared)
    raw_copy(&value, p, bytes);
  else
    here.runtime.memory().load(here.fiber, p, &value, bytes, access);
  return value;
}

void store(void* p, std::uint64_t value, unsigned bytes, Access access, Site site) {
  Here here(site);
  here.preempt();
  here.check_aligned(p, bytes, "a store");
  const bool shared = here.is_shared(p);
  if (shared)
    here.generic_shared_write(here.shared_offset(p, bytes, "a store"), bytes, "a store");
  else
    here.check_global(p, bytes, "a store");
  if (kTsan || shared) {
    tsan::store(here.fiber, p, value, bytes, access);
    Runtime::Internal internal(here.runtime);
    here.runtime.watch().notify(p);
    return;
  }
  here.runtime.memory().store(here.fiber, p, &value, bytes, access);
}

void load_vector(const void* p, void* out, unsigned bytes, Access access, Site site) {
  Here here(site);
  here.preempt();
  here.check_aligned(p, bytes, "a vector load");
  const bool shared = here.is_shared(p);
  if (shared)
    here.shared_offset(p, bytes, "a vector load");
  else
    here.check_global(p, bytes, "a vector load");
  if (!is_weak(access) && !shared) return load_apart(here, p, out, bytes, access);
  if (kTsan || shared) {
    if (kTsan) tsan::read(p, bytes);
    raw_copy(out, p, bytes);
    return;
  }
  for (unsigned at = 0; at < bytes; at += 16)
    here.runtime.memory().load(here.fiber, static_cast<const unsigned char*>(p) + at,
                               static_cast<unsigned char*>(out) + at, 16, access);
}

void store_vector(void* p, const void* in, unsigned bytes, Access access, Site site) {
  Here here(site);
  here.preempt();
  here.check_aligned(p, bytes, "a vector store");
  const bool shared = here.is_shared(p);
  if (shared)
    here.generic_shared_write(here.shared_offset(p, bytes, "a vector store"), bytes,
                              "a vector store");
  else
    here.check_global(p, bytes, "a vector store");
  if (!is_weak(access) && !shared) return store_apart(here, p, in, bytes, access);
  if (kTsan || shared) {
    if (kTsan) tsan::write(p, bytes);
    raw_copy(p, in, bytes);
    Runtime::Internal internal(here.runtime);
    for (unsigned at = 0; at < bytes; at += 16)
      here.runtime.watch().notify(static_cast<unsigned char*>(p) + at);
    return;
  }
  for (unsigned at = 0; at < bytes; at += 16)
    here.runtime.memory().store(here.fiber, static_cast<unsigned char*>(p) + at,
                                static_cast<const unsigned char*>(in) + at, 16, access);
}

std::uint64_t atomic(void* p, Rmw op, std::uint64_t operand, unsigned bytes, Access access,
                     Site site) {
  Here here(site);
  return read_modify_write(here, p, bytes, access,
                           [&](std::uint64_t old) { return combine(op, old, operand, bytes); });
}

std::uint64_t compare_swap(void* p, CompareSwap values, unsigned bytes, Access access, Site site) {
  Here here(site);
  return read_modify_write(here, p, bytes, access, [&](std::uint64_t old) {
    return old == values.expected ? values.desired : old;
  });
}

void reduce_vector(void* p, Rmw op, const void* in, unsigned lanes, Access access, Site site) {
  constexpr unsigned kWord = 4;
  for (unsigned i = 0; i < lanes; ++i) {
    std::uint32_t operand;
    raw_copy(&operand, static_cast<const unsigned char*>(in) + i * kWord, kWord);
    atomic(static_cast<unsigned char*>(p) + i * kWord, op, operand, kWord, access, site);
  }
}

void fence(Order order, Scope scope, Site site) {
  Here here(site);
  here.preempt();
  if constexpr (kTsan) {
    tsan::fence(here.fiber, order);
  } else {
    here.runtime.memory().fence(here.fiber, order, scope);
  }
}

void fence_proxy_async(Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  here.runtime.memory().proxy_fence(here.fiber);
  here.cta.shadow.proxy_fence(here.fiber.thread.thread_index, here.fiber.smem);
}

void fence_mbarrier_init(Site site) {
  Here(site).preempt();
}

}  // namespace hooks
}  // namespace crossdock::twin
