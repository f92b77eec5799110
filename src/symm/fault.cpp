// Texts of faults. See fault.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/fault.hpp"

#include <chrono>
#include <fmt/format.h>
#include <optional>
#include <string>
#include <utility>

#include <crossdock/layout/grouped_gemm.cuh>

namespace crossdock::symm {
namespace {

using device::FaultRecord;
using device::Phase;

std::string milliseconds(device::u64 ns) {
  return fmt::format("{:.3f} ms", static_cast<double>(ns) / 1e6);
}

std::string waited_for(const FaultRecord& record) {
  if (record.phase == Phase::kGridSync) return "for its own blocks";
  if (record.peer == device::kNoPeer) return "for work of its own block";
  return fmt::format("for rank {}", record.peer);
}

// A caller's mistake is one call's, and coming back does not mend it.
Error error(Code code, std::string message) {
  const bool mistake = code == Code::kInvalidArgument;
  return Error{.code = code,
               .scope = mistake ? Scope::kCall : Scope::kPeer,
               .retry = mistake ? Retry::kNo : Retry::kAfterReconnect,
               .message = std::move(message) +
                          "; nothing was delivered, and every launch of the "
                          "group returns at once until its ranks reset() it"};
}

// What a call says of its rows on the GPU.
Error wrong_rows(const FaultRecord& r) {
  const char* kernel = device::kernel_name(r.kernel);
  if (r.phase == Phase::kExpertRows &&
      static_cast<device::u32>(r.expected) == device::kGemmMisplaced)
    return error(
        Code::kInvalidArgument,
        fmt::format("{}: on rank {} the rows of expert {} begin at {}; with e4m3 they begin at "
                    "multiples of {}, which are 16 bytes of scales: align the offsets",
                    kernel, r.rank, r.expected >> 32, r.seen, device::kGemmScaledBegin));
  if (r.phase == Phase::kExpertRows)
    return error(
        Code::kInvalidArgument,
        fmt::format("{}: on rank {} the rows of expert {} end at {}, but there is room up to {}: "
                    "check the counts and offsets that the call was given",
                    kernel, r.rank, r.expected >> 32, r.seen, r.expected & 0xffffffffu));
  return error(Code::kInvalidArgument,
               fmt::format("{}: on rank {} place {} of the list names row {}, which the input does "
                           "not have; -1 names none",
                           kernel, r.rank, r.expected, static_cast<device::i64>(r.seen)));
}

// What kernels find out without waiting, and waits whose rule is not "the peer is late".
std::optional<Error> known_cause(const FaultRecord& r) {
  const char* kernel = device::kernel_name(r.kernel);
  switch (r.phase) {
    case Phase::kRouting:
      return error(Code::kInvalidArgument,
                   fmt::format("{}: token {} of rank {} chooses expert {}, which is not one of the "
                               "group's experts; -1 masks a choice",
                               kernel, r.expected, r.rank, static_cast<device::i64>(r.seen)));
    case Phase::kPeerRouting:
      return error(Code::kPeerLost,
                   fmt::format("{}: rank {} was told by rank {} that rank {} has failed; the error "
                               "of rank {} says why",
                               kernel, r.rank, r.seen, r.peer, r.peer));
    case Phase::kSlotFree:
      return error(
          Code::kPeerLost,
          fmt::format("{}: rank {} waited {} for rank {} to read what the slot held "
                      "before: it has come to {}, and {} is needed",
                      kernel, r.rank, milliseconds(r.waited_ns), r.peer, r.seen, r.expected));
    case Phase::kReuse:
      return error(
          Code::kInvalidArgument,
          fmt::format(
              "{}: the rows of rank {} end at row {} of rank {}, with the routing that rank "
              "{} reuses or counts they would at {}: all ranks give the handle of the same "
              "earlier dispatch, or none does",
              kernel, r.peer, r.seen, r.rank, r.rank, r.expected));
    case Phase::kShape:
      return error(
          Code::kInvalidArgument,
          fmt::format("{}: rank {} has rows of {} bytes and rank {} of {}, or their scales differ: "
                      "all ranks give the same row_bytes, scale_bytes, scales_by_column, cast and "
                      "cast_ue8m0 (of an expert layer with expand_sms: LayerInput::format, also "
                      "without tokens), and in a combine the same payload",
                      kernel, r.rank, r.expected, r.peer, r.seen));
    case Phase::kRoom:
      return error(
          Code::kInvalidArgument,
          fmt::format("{}: rank {} has {} choices to place, with the padding, and room for "
                      "{}: give it more places, or rows_per_expert",
                      kernel, r.rank, r.seen, r.expected));
    case Phase::kExpertRows:
    case Phase::kListedRow:
      return wrong_rows(r);
    default:
      return std::nullopt;
  }
}

}  // namespace

Result<> read_fault(const FaultRecord& record) {
  if (__atomic_load_n(&record.state, __ATOMIC_ACQUIRE) == FaultRecord::kEmpty) return {};
  if (auto known = known_cause(record)) return *std::move(known);
  const bool peer = record.peer != device::kNoPeer;
  return Error{
      .code = peer ? Code::kPeerLost : Code::kDeadline,
      .scope = Scope::kPeer,
      .retry = Retry::kAfterReconnect,
      .message = fmt::format(
          "rank {}: kernel {} (block {}) waited {} {} in phase '{}': expected {}, saw {}; every "
          "launch of the group returns at once until its ranks reset() it",
          record.rank, device::kernel_name(record.kernel), record.block,
          milliseconds(record.waited_ns), waited_for(record), device::phase_name(record.phase),
          record.expected, record.seen)};
}

}  // namespace crossdock::symm
