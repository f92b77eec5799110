// Symmetric memory as kernels see it: `SymmetricView` turns an address of this rank into the same
// place of another rank, and `SymmetricLayout` cuts a window into named, aligned areas. Every rank
// runs the same layout function with the same arguments, so an offset means the same everywhere.
// Plain data and constexpr functions, shared by host, kernels and twin; nothing here touches memory
// except the table of a view that is not at a fixed stride.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device {

// One rank's sight of the windows of all ranks. Windows lie either at a fixed stride in one address
// range (`offsets` null: mapping is one multiply-add) or anywhere (`offsets[r]` is the address of
// rank r's window minus that of this rank's, for all `world` ranks, in memory this rank can read
// and that does not change).
struct SymmetricView {
  u8* base;  // this rank's window
  i64 stride;
  const i64* offsets;
  u32 rank;
  u32 world;

  CROSSDOCK_HOST_DEVICE i64 distance(u32 peer) const {
    return offsets != nullptr ? offsets[peer]
                              : stride * (static_cast<i64>(peer) - static_cast<i64>(rank));
  }
  // The place in `peer`'s window that corresponds to `p` in this rank's.
  template <class T>
  CROSSDOCK_HOST_DEVICE T* map(T* p, u32 peer) const {
    return reinterpret_cast<T*>(reinterpret_cast<u64>(p) + static_cast<u64>(distance(peer)));
  }
  template <class T>
  CROSSDOCK_HOST_DEVICE T* at(u64 offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  template <class T>
  CROSSDOCK_HOST_DEVICE T* at(u64 offset, u32 peer) const {
    return map(at<T>(offset), peer);
  }
};

struct SymmetricArea {
  const char* name;
  u64 offset;
  u64 bytes;
};

// Builds a layout: `add` returns the offset of the next area. Flags that are polled and data that
// is streamed must not share a 128-byte line, so that is the default alignment.
struct SymmetricLayout {
  static constexpr u32 kMaxAreas = 24;
  static constexpr u64 kLine = 128;

  SymmetricArea areas[kMaxAreas] = {};
  u32 count = 0;
  u64 bytes = 0;          // of everything so far, a multiple of 128
  bool overflow = false;  // more than kMaxAreas areas: a bug of the caller

  CROSSDOCK_HOST_DEVICE constexpr u64 add(const char* name, u64 size, u64 alignment = kLine) {
    const u64 offset = round_up(bytes, alignment);
    bytes = round_up(offset + size, kLine);
    if (count == kMaxAreas) {
      overflow = true;
    } else {
      areas[count++] = {name, offset, size};
    }
    return offset;
  }
};

}  // namespace crossdock::device
