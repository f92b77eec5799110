// See verifier.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/verifier.hpp"

#include <algorithm>
#include <cerrno>
#include <fmt/format.h>

#include "mem/user_memory.hpp"
#include "transfer/engine_core.hpp"
#include "transfer/peer_core.hpp"
#include "wire/checksum.hpp"

namespace crossdock::transfer::detail {
namespace {

// What one request to the peer covers, with the local digest of the same bytes.
struct Part {
  std::vector<wire::DigestRange> ranges;
  std::uint64_t local = 0;
};

// Copied and hashed while it is in the cache, between looks at whether to go on.
constexpr std::size_t kPieceBytes = 256 << 10;

// Hashes memory whose owner may have unmapped it: never read directly, as that would end the
// process. Holds no lock; used by one thread.
class MemoryHasher {
 public:
  MemoryHasher(EngineCore& engine, std::function<bool()> stop)
      : engine_(engine),
        stop_(std::move(stop)),
        stage_(std::make_unique_for_overwrite<std::byte[]>(kPieceBytes)) {}

  // kInvalidArgument when part of it is gone, kClosed soon after `stop()` turned true.
  Result<> add(const std::byte* at, std::uint64_t length) {
    while (length != 0) {
      if (stop_()) return make_error(Code::kClosed, "the checksum is no longer wanted");
      const std::span piece(stage_.get(), std::min<std::uint64_t>(kPieceBytes, length));
      if (const mem::Moved loaded = mem::load_bytes(piece, at); loaded.error != 0)
        return not_readable(at + loaded.bytes, loaded.error);
      digest_.update(piece);
      engine_.count_hashed(piece.size());
      at += piece.size(), length -= piece.size();
    }
    return {};
  }
  // Of everything added since the last call.
  std::uint64_t take() {
    const std::uint64_t all = digest_.digest();
    digest_.reset();
    return all;
  }

 private:
  static Error not_readable(const void* at, int error) {
    if (error != EFAULT)
      return errno_error(error, fmt::format("read the memory at {} for its checksum", at));
    Error gone =
        invalid_argument(fmt::format("checksum of the memory at {}: {}", at, mem::kNotMapped));
    gone.scope = Scope::kTransfer;
    gone.native = {Native::Domain::kErrno, EFAULT};
    return gone;
  }

  EngineCore& engine_;
  const std::function<bool()> stop_;
  const std::unique_ptr<std::byte[]> stage_;
  wire::StreamChecksum digest_;
};

Result<std::vector<Part>> make_parts(const TransferCore& transfer) {
  const auto& slices = transfer.slices;
  MemoryHasher hasher(*transfer.engine, [&] { return transfer.stopping(); });
  std::vector<Part> parts;
  for (std::size_t next = 0; next < slices.size();) {
    Part part;
    // A slice is never larger than half of what a request may cover.
    for (std::uint64_t bytes = 0; next < slices.size() && bytes < wire::kMaxDigestBytes / 2 &&
                                  part.ranges.size() < wire::kMaxDigestRanges;
         ++next) {
      const auto& slice = slices[next];
      part.ranges.push_back({slice.remote, slice.length});
      CROSSDOCK_CHECK_OK(hasher.add(slice.local, slice.length));
      bytes += slice.length;
    }
    part.local = hasher.take();
    parts.push_back(std::move(part));
  }
  return parts;
}

// Collects the answers; the last one ends the transfer.
class Verdict : public std::enable_shared_from_this<Verdict> {
 public:
  Verdict(std::shared_ptr<TransferCore> transfer, std::size_t parts)
      : transfer_(std::move(transfer)), left_(parts) {}

  void on_reply(std::uint64_t local, const Result<std::uint64_t>& remote) {
    {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = judge(local, remote);
    }
    if (left_.fetch_sub(1) != 1) return;
    if (error_) return transfer_->finish(error_);
    transfer_->after_checksum();
  }

 private:
  std::optional<Error> judge(std::uint64_t local, const Result<std::uint64_t>& remote) const {
    if (!remote.ok()) return remote.error();
    if (*remote == local) return std::nullopt;
    return Error{.code = Code::kCorrupt,
                 .scope = Scope::kTransfer,
                 .retry = Retry::kLater,
                 .message = fmt::format("transfer {} to peer '{}': source and destination differ "
                                        "(XXH3-64 {:016x} here, {:016x} there)",
                                        transfer_->id, transfer_->peer->name(), local, *remote)};
  }

  const std::shared_ptr<TransferCore> transfer_;
  std::atomic<std::size_t> left_;
  std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace

void verify_transfer(const std::shared_ptr<TransferCore>& transfer) {
  const bool posted = transfer->engine->hasher().post([transfer] {
    if (!transfer->begin_hashing()) return;
    auto parts = make_parts(*transfer);
    if (!parts.ok())
      return transfer->finish(transfer->stopping() ? transfer->stop_reason() : parts.error());
    const auto verdict = std::make_shared<Verdict>(transfer, parts->size());
    transfer->await_digests();
    for (auto& part : *parts)
      transfer->peer->request_digest(
          std::move(part.ranges), transfer->id,
          [verdict, local = part.local](const Result<std::uint64_t>& remote) {
            verdict->on_reply(local, remote);
          });
    transfer->heed_stop();
  });
  if (!posted && transfer->begin_hashing())
    transfer->finish(make_error(Code::kClosed, "no thread for the checksum, or the engine closes"));
}

Result<std::uint64_t> digest_ranges(const std::vector<wire::DigestRange>& ranges,
                                    EngineCore& engine, const std::function<bool()>& stop) {
  MemoryHasher hasher(engine, stop);
  mem::Lease lease;
  std::uint64_t left = wire::kMaxDigestBytes;
  for (const auto& range : ranges) {
    if (range.length == 0) continue;
    if (range.length > left)
      return invalid_argument(
          fmt::format("a digest request covers at most {} bytes in all", wire::kMaxDigestBytes));
    left -= range.length;
    if (!lease || !lease.region()->contains(range.addr, range.length)) {
      CROSSDOCK_TRY(held, engine.regions().lease_inbound(range.addr, range.length, Op::kRead));
      lease = std::move(held);
    }
    CROSSDOCK_CHECK_OK(hasher.add(reinterpret_cast<const std::byte*>(range.addr), range.length));
  }
  return hasher.take();
}

}  // namespace crossdock::transfer::detail
