// See verifier.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/verifier.hpp"

#include <algorithm>
#include <fmt/format.h>

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

constexpr std::size_t kPieceBytes = 1 << 20;  // between looks at whether to go on

// Nothing when the transfer was stopped.
std::optional<std::vector<Part>> make_parts(const TransferCore& transfer) {
  const auto& slices = transfer.slices;
  std::vector<Part> parts;
  for (std::size_t next = 0; next < slices.size();) {
    Part part;
    wire::StreamChecksum digest;
    // A slice is never larger than half of what a request may cover.
    for (std::uint64_t bytes = 0; next < slices.size() && bytes < wire::kMaxDigestBytes / 2 &&
                                  part.ranges.size() < wire::kMaxDigestRanges;
         ++next) {
      const auto& slice = slices[next];
      part.ranges.push_back({slice.remote, slice.length});
      for (std::size_t at = 0; at < slice.length; at += kPieceBytes) {
        if (transfer.stopping()) return std::nullopt;
        digest.update({slice.local + at, std::min(kPieceBytes, slice.length - at)});
      }
      bytes += slice.length;
    }
    part.local = digest.digest();
    parts.push_back(std::move(part));
  }
  return parts;
}

// Collects the answers; the last one ends the transfer.
class Verdict : public std::enable_shared_from_this<Verdict> {
 public:
  Verdict(std::shared_ptr<TransferCore> transfer, std::size_t parts)
      : transfer_(std::move(transfer)), left_(parts) {}

  void on_reply(std::uint64_t local, Result<std::uint64_t> remote) {
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
    if (!parts) return transfer->finish(transfer->stop_reason());
    const auto verdict = std::make_shared<Verdict>(transfer, parts->size());
    for (auto& part : *parts)
      transfer->peer->request_digest(std::move(part.ranges), transfer->id,
                                     [verdict, local = part.local](Result<std::uint64_t> remote) {
                                       verdict->on_reply(local, std::move(remote));
                                     });
    transfer->heed_stop();
  });
  if (!posted && transfer->begin_hashing())
    transfer->finish(make_error(Code::kClosed, "no thread for the checksum, or the engine closes"));
}

Result<std::uint64_t> digest_ranges(const std::vector<wire::DigestRange>& ranges,
                                    const mem::RegionTable& regions,
                                    const std::function<bool()>& stop) {
  wire::StreamChecksum digest;
  mem::Lease lease;
  std::uint64_t left = wire::kMaxDigestBytes;
  for (const auto& range : ranges) {
    if (range.length == 0) continue;
    if (range.length > left)
      return invalid_argument(
          fmt::format("a digest request covers at most {} bytes in all", wire::kMaxDigestBytes));
    left -= range.length;
    if (!lease || !lease.region()->contains(range.addr, range.length)) {
      CROSSDOCK_TRY(held, regions.lease_inbound(range.addr, range.length, Op::kRead));
      lease = std::move(held);
    }
    for (std::uint64_t done = 0; done < range.length; done += kPieceBytes) {
      if (stop()) return make_error(Code::kClosed, "the checksum is no longer wanted");
      digest.update({reinterpret_cast<const std::byte*>(range.addr + done),
                     std::min<std::uint64_t>(kPieceBytes, range.length - done)});
    }
  }
  return digest.digest();
}

}  // namespace crossdock::transfer::detail
