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
  for (std::size_t first = 0; first < slices.size(); first += wire::kMaxDigestRanges) {
    const std::size_t end = std::min<std::size_t>(slices.size(), first + wire::kMaxDigestRanges);
    Part part;
    wire::StreamChecksum digest;
    for (std::size_t i = first; i < end; ++i) {
      part.ranges.push_back({slices[i].remote, slices[i].length});
      for (std::size_t at = 0; at < slices[i].length; at += kPieceBytes) {
        if (transfer.stopping()) return std::nullopt;
        digest.update({slices[i].local + at, std::min(kPieceBytes, slices[i].length - at)});
      }
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
                                    const mem::RegionTable& regions) {
  wire::StreamChecksum digest;
  mem::Lease lease;
  for (const auto& range : ranges) {
    if (range.length == 0) continue;
    if (!lease || !lease.region()->contains(range.addr, range.length)) {
      CROSSDOCK_TRY(held, regions.lease_inbound(range.addr, range.length, Op::kRead));
      lease = std::move(held);
    }
    digest.update({reinterpret_cast<const std::byte*>(range.addr), range.length});
  }
  return digest.digest();
}

}  // namespace crossdock::transfer::detail
