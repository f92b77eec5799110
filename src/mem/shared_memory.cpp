// See shared_memory.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "mem/shared_memory.hpp"

#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace crossdock::mem {
namespace {

// What went wrong is nearly always a limit: tell which one to look at.
Error memory_error(int errno_value, std::string_view step, std::size_t length) {
  Error error =
      errno_error(errno_value, fmt::format("{} for {} bytes of memory (see `ulimit -a`, "
                                           "/proc/sys/vm/max_map_count and the memory limit)",
                                           step, length));
  error.code = Code::kNoMemory;
  return error;
}

Result<base::UniqueFd> sealed_memfd(std::size_t bytes, std::string_view name) {
  base::UniqueFd fd(::memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return memory_error(errno, "memfd_create", bytes);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    return memory_error(errno, "ftruncate", bytes);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return memory_error(errno, "sealing", bytes);
  return fd;
}

}  // namespace

Result<SharedMemory> SharedMemory::create(std::size_t length, const SharedMemoryOptions& options) {
  if (length == 0) return invalid_argument("shared memory of 0 bytes; ask for at least 1");
  if (length > (std::size_t{1} << 47))
    return invalid_argument(
        fmt::format("shared memory of {} bytes does not fit the address space", length));
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

  SharedMemory memory;
  memory.size_ = length;
  const std::size_t mapped = (length + page - 1) / page * page;
  if (options.shared) {
    CROSSDOCK_TRY(fd, sealed_memfd(mapped, options.name));
    memory.fd_ = std::move(fd);
  }
  void* const data =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
             options.shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, memory.fd_.get(), 0);
  if (data == MAP_FAILED) return memory_error(errno, "mmap", length);
  memory.data_ = static_cast<std::byte*>(data);
  memory.mapped_ = mapped;
  // Fewer page faults and TLB misses where the system allows it; no matter if not.
  (void)::madvise(data, mapped, MADV_HUGEPAGE);
  if (options.populate && ::madvise(data, mapped, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
    return memory_error(errno, "populating", length);
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this == &other) return *this;
  reset();
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  mapped_ = std::exchange(other.mapped_, 0);
  return *this;
}

void SharedMemory::reset() noexcept {
  if (data_ != nullptr) ::munmap(data_, mapped_);
  data_ = nullptr;
  size_ = mapped_ = 0;
  fd_.reset();
}

void SharedMemory::disown() noexcept {
  (void)fd_.release();
  data_ = nullptr;
  size_ = 0;
  mapped_ = 0;
}

}  // namespace crossdock::mem
