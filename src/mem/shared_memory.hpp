// Memory that other processes of this host can map: a sealed memfd and its mapping, zeroed, page-
// aligned. The seals fix its size for good, so that no holder of the descriptor can shrink it and
// make another process die of SIGBUS. Move-only, single-owner; unmaps and closes when destroyed,
// while mappings of others live on by themselves.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"

namespace crossdock::mem {

struct SharedMemoryOptions {
  std::string_view name = "crossdock";  // shown in /proc/<pid>/maps
  // False: for this process alone, without a descriptor. Linux gives such memory huge pages where
  // it gives memfds none (`transparent_hugepage/enabled` against `shmem_enabled`).
  bool shared = true;
  // Gives every page its memory now (0.2 to 0.5 s per GiB) rather than at its first use.
  bool populate = false;
};

class SharedMemory {
 public:
  // kInvalidArgument for length 0, kNoMemory when the system refuses. The length of the mapping is
  // rounded up to whole pages; size() is what was asked for.
  static Result<SharedMemory> create(std::size_t length, const SharedMemoryOptions& options = {});

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { reset(); }
  void reset() noexcept;
  // Gives mapping and descriptor up without freeing them: someone may write there for ever.
  void disown() noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  base::UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
};

}  // namespace crossdock::mem
