// PieceList: the scatter/gather list of what is being sent or received, with the part that is done
// cut off from the front; and LaneReader, which receives straight into such a list and keeps what
// came behind it. Both hold no lock and are used by one thread at a time; neither owns the memory
// that it points to.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "mem/user_memory.hpp"
#include "transport/tcp/socket_io.hpp"

namespace crossdock::transport::tcp {

// Starts to load the first lines of a piece that will be copied soon. Pages lie scattered: without
// this every one of them costs a miss of the TLB and of all caches before the processor's own
// prefetching catches on (bench/micro/tcp_bench: see docs/design/tcp.md).
template <bool kForWriting>
inline void prefetch_piece(const void* data, std::size_t length) noexcept {
  constexpr std::size_t kLine = 64, kLines = 16;
  const auto* at = static_cast<const std::byte*>(data);
  for (std::size_t i = 0; i < kLines && i * kLine < length; ++i)
    __builtin_prefetch(at + i * kLine, kForWriting ? 1 : 0, 3);
}

// Goes out in the place of memory that is gone.
inline constexpr std::array<std::byte, 16 * 1024> kFiller{};

class PieceList {
 public:
  // A full list may take one more in front and one behind: the heads of what comes next.
  explicit PieceList(std::size_t capacity = kMaxIov) { pieces_.reserve(capacity + 2); }

  void clear() noexcept {
    pieces_.clear();
    first_ = 0;
    bytes_ = 0;
  }
  // Joins the piece with the one before when they touch, unless `separate`.
  void add(void* data, std::size_t length, bool separate = false) {
    bytes_ += length;
    if (!separate && first_ < pieces_.size() && end_of(pieces_.back()) == data) {
      pieces_.back().iov_len += length;
      return;
    }
    pieces_.push_back({data, length});
  }
  // The same memory over and over until that makes `length` bytes.
  void add_repeated(std::span<std::byte> memory, std::uint64_t length) {
    for (; length != 0; length -= std::min<std::uint64_t>(length, memory.size()))
      add(memory.data(), std::min<std::uint64_t>(length, memory.size()), true);
  }
  void add_filler(std::uint64_t length) {
    add_repeated({const_cast<std::byte*>(kFiller.data()), kFiller.size()}, length);
  }
  // Takes back everything from piece number `size` on (as size() said before adding it).
  void truncate(std::size_t size) noexcept {
    while (this->size() > size) {
      bytes_ -= pieces_.back().iov_len;
      pieces_.pop_back();
    }
  }
  // Sets the length of piece `index`, counted from the front.
  void resize_piece(std::size_t index, std::size_t length) noexcept {
    iovec& piece = pieces_[first_ + index];
    bytes_ = bytes_ - piece.iov_len + length;
    piece.iov_len = length;
  }
  // Puts filler in the place of piece `index`.
  void substitute(std::size_t index) {
    const auto at = static_cast<std::ptrdiff_t>(first_ + index);
    std::size_t left = pieces_[first_ + index].iov_len;
    pieces_.erase(pieces_.begin() + at);
    std::vector<iovec> parts;
    for (; left != 0; left -= parts.back().iov_len)
      parts.push_back({const_cast<std::byte*>(kFiller.data()), std::min(left, kFiller.size())});
    pieces_.insert(pieces_.begin() + at, parts.begin(), parts.end());
  }
  // `n` bytes from the front are done.
  void consume(std::size_t n) noexcept {
    bytes_ -= n;
    while (n != 0) {
      iovec& piece = pieces_[first_];
      const std::size_t part = std::min(n, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
      piece.iov_len -= part;
      n -= part;
      if (piece.iov_len == 0) ++first_;
    }
  }
  [[nodiscard]] std::span<iovec> pieces() noexcept { return std::span(pieces_).subspan(first_); }
  [[nodiscard]] std::size_t size() const noexcept { return pieces_.size() - first_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] bool empty() const noexcept { return bytes_ == 0; }

 private:
  static void* end_of(const iovec& piece) noexcept {
    return static_cast<std::byte*>(piece.iov_base) + piece.iov_len;
  }

  std::vector<iovec> pieces_;
  std::size_t first_ = 0;
  std::uint64_t bytes_ = 0;
};

class LaneReader {
 public:
  explicit LaneReader(std::size_t capacity) : buffer_(capacity) {}

  // Received, not yet consumed: the head of a frame, and perhaps what follows.
  [[nodiscard]] std::span<const std::byte> staged() const noexcept {
    return std::span(buffer_).subspan(begin_, end_ - begin_);
  }
  void consume(std::size_t n) noexcept {
    begin_ += n;
    if (begin_ == end_) begin_ = end_ = 0;
  }
  [[nodiscard]] bool full() const noexcept { return end_ == buffer_.size(); }
  // Receives more into the stage.
  IoResult fill(int fd) noexcept {
    compact();
    iovec piece{buffer_.data() + end_, buffer_.size() - end_};
    const IoResult result = receive_pieces(fd, {&piece, 1});
    end_ += result.bytes;
    return result;
  }
  // Copies what is staged into `into`. kFailed when not all of it could be placed: EFAULT where
  // memory is not mapped.
  IoResult unstage(PieceList& into) noexcept {
    const std::size_t part = std::min<std::uint64_t>(into.bytes(), end_ - begin_);
    if (part == 0) return {Io::kProgress, 0, 0};
    const mem::Moved stored = mem::store_bytes(into.pieces(), staged().first(part));
    consume(stored.bytes);
    into.consume(stored.bytes);
    return {stored.error == 0 ? Io::kProgress : Io::kFailed, stored.bytes, stored.error};
  }
  // Receives straight into `into`, and up to `ahead` bytes that follow it into the stage, so that
  // the head of the next frame costs no call of its own. Precondition: nothing is staged.
  IoResult receive(int fd, PieceList& into, std::size_t ahead) {
    const std::uint64_t wanted = into.bytes();
    const std::size_t size = into.size();
    ahead = size < kMaxIov ? std::min(ahead, buffer_.size()) : 0;
    if (ahead != 0) into.add(buffer_.data(), ahead, true);
    IoResult result = receive_pieces(fd, into.pieces());
    if (ahead != 0) into.truncate(size);
    if (result.status != Io::kProgress) return result;
    const std::size_t direct = std::min<std::uint64_t>(result.bytes, wanted);
    into.consume(direct);
    end_ = result.bytes - direct;
    return result;
  }

 private:
  void compact() noexcept {
    if (begin_ == 0) return;
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }

  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace crossdock::transport::tcp
