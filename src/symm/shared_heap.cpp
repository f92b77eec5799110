// Windows in host memory that several processes map: a sealed memfd for each, mapped into one
// reserved range, or anywhere. The page after each window stays unmapped, so that running over the
// end of a window ends there and not in the next one.
// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "mem/shared_memory.hpp"
#include "symm/heap.hpp"

namespace crossdock::symm {
namespace {

constexpr u64 kPage = 4096;

Error map_error(std::string what) {
  Error error = errno_error(errno, std::move(what));
  if (errno == ENOMEM) error.code = Code::kNoMemory;
  return error;
}

// Addresses without memory.
class Reservation {
 public:
  static Result<Reservation> create(u64 bytes) {
    void* const base =
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      return map_error(fmt::format("reserve {} bytes of addresses for windows (ulimit -v)", bytes));
    return Reservation(static_cast<u8*>(base), bytes);
  }
  Reservation(Reservation&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Reservation() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  [[nodiscard]] u8* base() const { return base_; }

 private:
  Reservation(u8* base, u64 bytes) : base_(base), bytes_(bytes) {}
  u8* base_;
  u64 bytes_;
};

// A file that its owner can shrink would end this process with SIGBUS.
Result<> check_file(int fd, u32 rank, u64 bytes) {
  struct stat info{};
  if (::fstat(fd, &info) != 0)
    return errno_error(errno, fmt::format("look at the window of rank {}", rank));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || info.st_size < static_cast<off_t>(bytes))
    return make_error(Code::kCorrupt,
                      fmt::format("rank {} sent a descriptor that is no window of {} bytes: {} "
                                  "bytes, seals {}",
                                  rank, bytes, info.st_size, seals));
  return {};
}

class SharedHeap final : public Heap {
 public:
  explicit SharedHeap(const HeapOptions& options)
      : options_(options), windows_(options.world, nullptr) {}

  Result<> allocate(u32 rank) override {
    CROSSDOCK_TRY(memory, mem::SharedMemory::create(file_bytes(), {.name = "crossdock-window"}));
    memory_[rank] = std::move(memory);
    return {};
  }
  u64 allocated_bytes() const override { return file_bytes(); }
  Result<WindowHandle> share(u32 rank) override {
    WindowHandle handle;
    handle.fd.reset(::fcntl(memory_.at(rank).fd(), F_DUPFD_CLOEXEC, 0));
    if (!handle.fd) return errno_error(errno, fmt::format("share the window of rank {}", rank));
    return handle;
  }
  Result<> reserve(u64) override {
    stride_ = file_bytes() + kPage;
    const u32 ranges = options_.at_stride ? 1 : options_.world;
    const u64 bytes = options_.at_stride ? stride_ * options_.world : stride_;
    for (u32 i = 0; i < ranges; ++i) {
      CROSSDOCK_TRY(range, Reservation::create(bytes));
      ranges_.push_back(std::move(range));
    }
    return {};
  }
  Result<> map(u32 rank, const WindowHandle* handle) override {
    const int fd = handle != nullptr ? handle->fd.get() : memory_.at(rank).fd();
    CROSSDOCK_CHECK_OK(check_file(fd, rank, file_bytes()));
    u8* const place = place_of(rank);
    void* const mapped =
        ::mmap(place, file_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED)
      return map_error(fmt::format("map the window of rank {} ({} bytes)", rank, file_bytes()));
    windows_[rank] = place;
    return {};
  }
  Result<> unmap(u32 rank) override {
    CROSSDOCK_CHECK_OK(cover(rank, PROT_NONE));
    memory_.erase(rank);
    return {};
  }
  Result<> vacate(u32 rank) override { return cover(rank, PROT_READ | PROT_WRITE); }
  u8* window(u32 rank) const override { return windows_[rank]; }
  i64 stride() const override { return options_.at_stride ? static_cast<i64>(stride_) : 0; }
  // Punches a hole, which reads as zeros and frees the memory behind it.
  Result<> clear(u32 rank, RankDevice& device, Deadline deadline) override {
    if (::madvise(windows_[rank], file_bytes(), MADV_REMOVE) == 0) return {};
    return device.zero(windows_[rank], options_.window_bytes, deadline);
  }

 private:
  [[nodiscard]] u8* place_of(u32 rank) const {
    return options_.at_stride ? ranges_[0].base() + stride_ * rank : ranges_[rank].base();
  }
  // Anonymous memory, of which only what is touched exists.
  Result<> cover(u32 rank, int protection) {
    void* const mapped = ::mmap(place_of(rank), file_bytes(), protection,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (mapped == MAP_FAILED)
      return map_error(fmt::format("cover the window of rank {} ({} bytes)", rank, file_bytes()));
    windows_[rank] = place_of(rank);
    return {};
  }
  u64 file_bytes() const { return device::round_up(options_.window_bytes, kPage); }

  HeapOptions options_;
  u64 stride_ = 0;
  std::map<u32, mem::SharedMemory> memory_;  // of local ranks
  std::vector<u8*> windows_;
  std::vector<Reservation> ranges_;
};

}  // namespace

std::unique_ptr<Heap> make_shared_heap(const HeapOptions& options) {
  return std::make_unique<SharedHeap>(options);
}

}  // namespace crossdock::symm
