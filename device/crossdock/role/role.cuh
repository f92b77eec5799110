// Warp-specialised kernels are composed of roles. A role is a struct:
//
//   struct SendRole {
//     static constexpr u32 kWarps = 4;      // whole warps, consecutive
//     static constexpr u32 kRegisters = 0;  // 0: as launched; else 24 .. 240, a multiple of 8
//     CROSSDOCK_DEVICE static void run(const Context& c, u32 warp);  // warp: 0 .. kWarps - 1
//   };
//
// and a kernel sets up its shared memory, syncs, and calls `run_roles<SendRole, ReceiveRole>(c)`.
// Roles take their warps in the order given. All threads of a role's warps enter `run`; roles meet
// only through mbarriers and named barriers, never through a barrier of the whole block, and each
// leaves by itself when a wait fails.
//
// A role with kRegisters owns whole warpgroups, which give registers up or take them before `run`.
// What is given up must cover what is taken: checked at compile time by `RegisterPlan`.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/control.cuh>
#include <crossdock/ptx/warp.cuh>

namespace crossdock::device {

template <class... Roles>
struct RoleList {
  static constexpr u32 kWarps = (Roles::kWarps + ... + 0u);
  static constexpr u32 kThreads = kWarps * kWarpSize;
};

// Registers of an SM, and what the compiler may use per thread of a block of this size when one
// block has the SM to itself.
inline constexpr u32 kRegisterFile = 65536;
CROSSDOCK_HOST_DEVICE constexpr u32 launch_registers(u32 threads) {
  return min_of(kRegisterFile / threads / 8 * 8, 248u);
}

template <class... Roles>
struct RegisterPlan {
  static constexpr bool kReallocates = ((Roles::kRegisters != 0) || ...);
  static constexpr u32 kAtLaunch = launch_registers(RoleList<Roles...>::kThreads);
  static constexpr u32 kWanted =
      ((Roles::kWarps * kWarpSize * (Roles::kRegisters == 0 ? kAtLaunch : Roles::kRegisters)) +
       ... + 0u);

  static_assert(!kReallocates || kWanted <= kAtLaunch * RoleList<Roles...>::kThreads,
                "the roles ask for more registers than the block has");
  static_assert(((Roles::kRegisters % 8 == 0 && Roles::kRegisters <= 240 &&
                  (Roles::kRegisters == 0 || Roles::kRegisters >= 24)) &&
                 ...),
                "registers of a role: 24 to 240, a multiple of 8");
  static_assert(((Roles::kRegisters == 0 || Roles::kWarps % 4 == 0) && ...),
                "registers move between whole warpgroups");
};

namespace detail {

template <class Role, u32 kFirstWarp, u32 kAtLaunch, class Context>
CROSSDOCK_DEVICE void run_role(const Context& context, u32 warp) {
  if constexpr (Role::kRegisters != 0) {
    static_assert(kFirstWarp % 4 == 0, "a role that changes registers begins with a warpgroup");
    if constexpr (Role::kRegisters > kAtLaunch) {
      ptx::registers_increase<Role::kRegisters>();
    } else {
      ptx::registers_decrease<Role::kRegisters>();
    }
  }
  Role::run(context, warp - kFirstWarp);
}

template <u32 kFirstWarp, u32 kAtLaunch, class Role, class... Rest, class Context>
CROSSDOCK_DEVICE void dispatch(const Context& context, u32 warp) {
  if constexpr (sizeof...(Rest) == 0) {
    run_role<Role, kFirstWarp, kAtLaunch>(context, warp);
  } else if (warp < kFirstWarp + Role::kWarps) {
    run_role<Role, kFirstWarp, kAtLaunch>(context, warp);
  } else {
    dispatch<kFirstWarp + Role::kWarps, kAtLaunch, Rest...>(context, warp);
  }
}

}  // namespace detail

// By all threads of the block, which has exactly the warps of the roles.
template <class... Roles, class Context>
CROSSDOCK_DEVICE void run_roles(const Context& context) {
  using Plan = RegisterPlan<Roles...>;
  // Uniform over the warp, so that the compiler sees each role as one branch, and can keep what a
  // role makes of it in the warp's own registers.
  const u32 warp = ptx::uniform(warp_index());
  detail::dispatch<0, Plan::kAtLaunch, Roles...>(context, warp);
}

}  // namespace crossdock::device
