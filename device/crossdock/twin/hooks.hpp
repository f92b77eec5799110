// The hooks through which device code, compiled by the host compiler, reaches the twin. Every
// function here is called by the fiber of one CUDA thread, may switch to another fiber, and returns
// when that thread may go on; none may be called outside a kernel run by twin::World. `ptx/` is the
// only caller. Standard integer headers only: device headers include this file.
//
// Conventions: pointers to shared memory are host pointers into the block's dynamic shared memory;
// `shared_address` / `shared_pointer` convert to and from the 32-bit addresses that descriptors
// hold. `Site` is the place in the kernel; it appears in reports of deadlocks and violations.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::twin {

// A place in device source.
struct Site {
  const char* file = "";
  std::uint32_t line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(),
                             std::uint32_t line = __builtin_LINE()) {
    return Site{file, line};
  }
};

}  // namespace crossdock::twin

namespace crossdock::twin::hooks {

// ---- identity ---------------------------------------------------------------------------------

// Constant for the life of a CUDA thread. Grids and blocks are one-dimensional.
struct Thread {
  std::uint32_t thread_index;
  std::uint32_t block_index;
  std::uint32_t block_size;
  std::uint32_t grid_size;
  std::uint32_t rank;
};
const Thread& self();

// Base of the block's dynamic shared memory, 1024-byte aligned.
unsigned char* dynamic_shared();
std::uint32_t shared_address(const void* pointer);  // ptr -> 32-bit shared address
void* shared_pointer(std::uint32_t address);        // and back

// ---- memory -----------------------------------------------------------------------------------

enum class Order : std::uint8_t {
  kWeak,         // ld, st
  kNonCoherent,  // ld.global.nc: may miss anything written since the kernel began
  kRelaxed,      // strong, no ordering; also what ld.volatile and st.volatile are
  kAcquire,
  kRelease,
  kAcqRel,
  kSc,  // fences only
};
enum class Scope : std::uint8_t { kCta, kCluster, kGpu, kSys };
struct Access {
  Order order;
  Scope scope;
};

// Global (own rank, peer rank, attached) or shared memory, 1, 2, 4 or 8 bytes, naturally aligned.
std::uint64_t load(const void* p, unsigned bytes, Access access, Site site);
void store(void* p, std::uint64_t value, unsigned bytes, Access access, Site site);
// 16 or 32 bytes. If kWeak is not used, each 8 bytes are an access by itself: others may see some
// of them and not the rest, in any order.
void load_vector(const void* p, void* out, unsigned bytes, Access access, Site site);
void store_vector(void* p, const void* in, unsigned bytes, Access access, Site site);

enum class Rmw : std::uint8_t {
  kAdd,
  kMin,
  kMax,
  kMinSigned,
  kMaxSigned,
  kAnd,
  kOr,
  kXor,
  kExchange,
  kAddF32,
  kAddBf16x2,
  kAddF16x2,  // 4 bytes each
};
// Returns the old value. `bytes` is 4 or 8. `red` is the same with the result dropped.
std::uint64_t atomic(void* p, Rmw op, std::uint64_t operand, unsigned bytes, Access access,
                     Site site);
struct CompareSwap {
  std::uint64_t expected;
  std::uint64_t desired;
};
std::uint64_t compare_swap(void* p, CompareSwap values, unsigned bytes, Access access, Site site);
// red.global.add.v4.f32 and friends: `lanes` elements of 4 bytes, each atomic by itself.
void reduce_vector(void* p, Rmw op, const void* in, unsigned lanes, Access access, Site site);

void fence(Order order, Scope scope, Site site);  // kAcqRel, kSc (and kAcquire, kRelease)
void fence_proxy_async(Site site);                // generic <-> async proxy, global and shared
void fence_mbarrier_init(Site site);              // fence.mbarrier_init.release.cluster

// ---- warp -------------------------------------------------------------------------------------
// All lanes named in `mask` must call the same collective with the same mask, or the run fails.

enum class Shuffle : std::uint8_t { kIndex, kUp, kDown, kXor };
struct ShuffleArgs {
  Shuffle kind;
  std::uint32_t lane;        // source lane, delta or lane mask
  std::uint32_t width = 32;  // 1, 2, 4, 8, 16 or 32
};
void sync_warp(std::uint32_t mask, Site site);
std::uint64_t shuffle(std::uint32_t mask, std::uint64_t value, ShuffleArgs args, Site site);
std::uint32_t ballot(std::uint32_t mask, bool predicate, Site site);
bool any(std::uint32_t mask, bool predicate, Site site);
bool all(std::uint32_t mask, bool predicate, Site site);
std::uint32_t match_any(std::uint32_t mask, std::uint64_t value, Site site);  // lanes with my value
std::uint32_t match_all(std::uint32_t mask, std::uint64_t value, Site site);  // mask or 0
std::uint32_t reduce(std::uint32_t mask, Rmw op, std::uint32_t value, Site site);  // integer ops
// One lane of `mask`, always the same one for a mask, not necessarily the lowest.
bool elect(std::uint32_t mask, Site site);

// ldmatrix / stmatrix .m8n8.x{count}.b16: `row` is this lane's row address in shared memory.
struct MatrixArgs {
  unsigned count;  // 1, 2 or 4
  bool transposed;
};
void load_matrix(std::uint32_t* registers, const void* row, MatrixArgs args, Site site);
void store_matrix(const std::uint32_t* registers, void* row, MatrixArgs args, Site site);

// ---- block ------------------------------------------------------------------------------------

void sync_threads(Site site);
// bar.sync / bar.arrive: `id` 0..15, `count` threads (a multiple of 32).
void barrier_sync(std::uint32_t id, std::uint32_t count, Site site);
void barrier_arrive(std::uint32_t id, std::uint32_t count, Site site);
// bar.red.or.pred: a barrier_sync whose result, for all of them, is whether any thread came with
// `predicate`.
bool barrier_any(std::uint32_t id, std::uint32_t count, bool predicate, Site site);
// setmaxnreg: checked (whole warpgroup, 24..256 in steps of 8, sum within the register file).
void set_max_registers(bool increase, std::uint32_t count, Site site);

void mbarrier_init(void* barrier, std::uint32_t count, Site site);
void mbarrier_invalidate(void* barrier, Site site);
void mbarrier_arrive(void* barrier, std::uint32_t count, Site site);
void mbarrier_expect_tx(void* barrier, std::uint32_t bytes, Site site);
void mbarrier_arrive_expect_tx(void* barrier, std::uint32_t bytes, Site site);
// True when the phase of this parity has completed. Never blocks by itself: loop with `spin`.
bool mbarrier_try_wait(void* barrier, std::uint32_t parity, Site site);

// ---- asynchronous copies ----------------------------------------------------------------------

// cp.async, 4 or 16 bytes; `global` null: zeros. Of the calling thread, in its groups.
void copy_async(void* shared, const void* global, unsigned bytes, Site site);
void copy_async_commit(Site site);
// At most `pending` groups of this thread have not arrived afterwards.
void copy_async_wait(unsigned pending, Site site);

void bulk_load(void* shared, const void* global, std::uint32_t bytes, void* barrier, Site site);
void bulk_store(void* global, const void* shared, std::uint32_t bytes, Site site);
enum class BulkReduce : std::uint8_t { kAddF32, kAddBf16, kAddF16, kAddU32, kAddU64 };
void bulk_reduce(void* global, const void* shared, std::uint32_t bytes, BulkReduce op, Site site);
void bulk_commit(Site site);
// At most `pending` groups of this thread are unfinished afterwards; `read_only`: only their reads
// of shared memory have to be finished (wait_group.read).
void bulk_wait(std::uint32_t pending, bool read_only, Site site);

// `map` points to a device::TensorMap made by twin::encode_tensor_map; coordinates are in elements,
// innermost first, as many as the map has dimensions.
void tensor_load(void* shared, const void* map, const std::int32_t* coordinates, void* barrier,
                 Site site);
void tensor_store(const void* map, const std::int32_t* coordinates, const void* shared, Site site);
void tensor_reduce_add(const void* map, const std::int32_t* coordinates, const void* shared,
                       Site site);

// ---- wgmma ------------------------------------------------------------------------------------

enum class Element : std::uint8_t { kBf16, kF16, kE4m3, kE5m2 };
// m64 n{n} k16 (16-bit elements) or k32 (8-bit), fp32 accumulators: n / 2 registers a thread.
struct Wgmma {
  std::uint32_t n;  // multiple of 8, 8..256
  Element a;
  Element b;
  bool accumulate;  // scale-d: false starts from zero
  bool negate_a = false;
  bool negate_b = false;
  bool transpose_a = false;  // MN-major operand in shared memory (16-bit elements only)
  bool transpose_b = false;
};
// `accumulators` belongs to the twin until the wait that covers it; reading it before gives NaN.
void wgmma_ss(float* accumulators, std::uint64_t a, std::uint64_t b, const Wgmma& op, Site site);
void wgmma_rs(float* accumulators, const std::uint32_t* a, std::uint64_t b, const Wgmma& op,
              Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(std::uint32_t pending, Site site);

// ---- time and control -------------------------------------------------------------------------

std::uint64_t global_timer();  // virtual nanoseconds
std::uint64_t clock();         // virtual cycles, 2 a nanosecond
void nanosleep(std::uint32_t ns, Site site);
// Call once in every turn of a polling loop: the fiber sleeps until something it has read since the
// last call changes. `what` names the wait in reports ("grid sync", "peer barrier"); a literal.
void spin(const char* what, Site site);
// The calling thread has given up a wait after a fault and goes on to its end: what it reads and
// multiplies from here on is worth nothing, and its races are not reported.
void unordered_from_here(Site site);
void grid_dependency_wait(Site site);
void grid_dependency_launch(Site site);
[[noreturn]] void trap(const char* what, Site site);

// ---- typed shorthands -------------------------------------------------------------------------

template <class T>
inline T load_as(const T* p, Access access, Site site) {
  T out;
  if constexpr (sizeof(T) <= 8) {
    const std::uint64_t bits = load(p, sizeof(T), access, site);
    __builtin_memcpy(&out, &bits, sizeof(T));
  } else {
    load_vector(p, &out, sizeof(T), access, site);
  }
  return out;
}

template <class T>
inline void store_as(T* p, const T& value, Access access, Site site) {
  if constexpr (sizeof(T) <= 8) {
    std::uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    store(p, bits, sizeof(T), access, site);
  } else {
    store_vector(p, &value, sizeof(T), access, site);
  }
}

}  // namespace crossdock::twin::hooks
