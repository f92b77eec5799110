// What an expert-parallel group is made for, and the memory it takes. Plain values,
// thread-compatible. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <crossdock/core/export.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::ep {
inline namespace v1 {

// How the rows of a combine travel; the sums are the same bit by bit.
enum class CombineBy : std::uint8_t {
  kPull,    // every rank loads them from where the experts have left them
  kPush,    // some SMs send the rows of other ranks' tokens, the others add up what comes; takes
            // staging as large as the outputs of a slot
  kBySize,  // the faster for the group's tokens, ranks and SMs as far as measured: kPull so far
};

// In which format the rows of a combine travel; they are added up in fp32 in the order of the ranks
// all the same. layout/ep_payload.cuh has the bits, docs/design/ep.md the errors.
enum class Payload : std::uint8_t {
  kBf16,      // as they are
  kFp8,       // e4m3 with an fp32 scale for 128 values: 0.52 of the bytes, errors up to 1 / 16
  kLogFmt10,  // 10 bits on a logarithmic scale of 128 values: 0.64 of the bytes, errors of a
              // percent
};

// How the rows of a dispatch find their places; the same for all ranks in one call.
enum class Path : std::uint8_t {
  kAuto,   // by size: see DispatchOptions::most_tokens
  kSmall,  // few tokens: every source has places of its own at the receiver, so nobody waits for
           // counts of others; one launch, no barrier. Rows of source s begin at s * small_tokens
  kLarge,  // counts first: rows lie one after the other
};

// Options::expand_sms: as many as default_expand_sms() says.
inline constexpr std::uint32_t kAutoSms = ~std::uint32_t{0};

// The same on every rank of the group.
struct Options {
  std::uint32_t experts = 0;     // of all ranks, dealt to them in contiguous ranges
  std::uint32_t top_k = 0;       // choices of a token, 1 to 32
  std::uint32_t max_tokens = 0;  // of one rank in one dispatch
  std::uint32_t hidden = 0;      // values of a token, a multiple of 8; rows of at most 32 KiB
  // The largest row and scales that a dispatch delivers. 0: a row of bf16, and one fp32 scale for
  // 128 values.
  std::uint32_t row_bytes = 0;
  std::uint32_t scale_bytes = 0;
  bool wide_ids = false;  // expert ids of 64 bits; else of 32
  // Dispatches whose output may be held at the same time without being copied. 0: every dispatch is
  // given its output (DispatchOptions), and user_bytes is not 0.
  std::uint32_t slots = 2;
  // A dispatch that finds all slots held receives its rows in one more slot, the transit, and
  // copies them to ordinary memory, which its handle owns. False: it fails with kBusy instead, and
  // the window has no transit.
  bool fall_back = true;
  // Dispatches of at most so many tokens a rank may take the path for few tokens, which has slots
  // of its own, `small_slots` of them, used in turns: a third dispatch fails with kBusy until the
  // handle of the first is dropped. 0: there is no such path; at most 1024, and max_tokens. A group
  // that has no other path needs no other slots: slots = 0, fall_back = false.
  std::uint32_t small_tokens = 0;
  std::uint32_t small_slots = 2;
  // Blocks that send in a small dispatch, at most 32; no more than there are tokens. 0: 16.
  std::uint32_t small_sms = 0;
  // SMs that copy rows of few tokens to the places of their choices in the launch of their dispatch
  // (DispatchOptions::expanded), or in that of its second half; at least one for each rank is
  // taken. 0: copies follow in launches of their own. Needs expert_alignment, and at most 256
  // experts a rank. With mask_late, and of tokens in packets, copies follow all the same.
  std::uint32_t small_expand_sms = 0;
  // At most 8 of the few tokens travel in packets that are valid by themselves instead of by bulk
  // stores and flags, which takes more bytes and fewer waits. Not with mask_late.
  bool small_packets = true;
  // Combines of few tokens may have compressed rows (CombineOptions::payload). Needs small_tokens
  // and hidden % 512 == 0, and room in the window: 0.64 of the expert outputs of the small slots.
  bool compressed = false;
  // Bytes of each rank's window for outputs that the caller provides (Group::user_memory).
  std::uint64_t user_bytes = 0;
  // Blocks, which is SMs, of a dispatch and of a combine, at most 160. 0: as many as fill the wire,
  // default_dispatch_sms(). Ranks may differ: then one number a rank.
  std::uint32_t dispatch_sms = 0;
  std::uint32_t combine_sms = 0;
  std::vector<std::uint32_t> dispatch_sms_of = {};
  std::vector<std::uint32_t> combine_sms_of = {};
  CombineBy combine = CombineBy::kPull;
  // By push: of the SMs of a combine, those that send. 0: in proportion to what is sent and added.
  std::uint32_t combine_send_sms = 0;
  // The longest a kernel waits for a peer before the call fails, naming it.
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
  // Ranks may be masked (Group::mask): one goes on without them. Rows of the large path then have
  // places fixed by source too, max_tokens apart (Received::source_stride), so that nobody's places
  // depend on who is missing.
  bool masks = false;
  // A rank that has not come by then is masked by the kernel itself, and the call goes on without
  // it. False: that is a fault. Needs masks and combine = kPull; costs a combine an atomic.
  bool mask_late = false;
  bool cast = true;  // dispatches that cast bf16 to e4m3 will be made: hidden % 128 == 0
  // Rows by expert (Group::group_rows): each expert's begin at a multiple of it. 0: not wanted.
  std::uint32_t expert_alignment = 0;
  // SMs that copy rows to the places of their choices while others are on their way, besides those
  // of dispatch, where a dispatch is asked for it (DispatchOptions::expanded). Every dispatch of
  // the large path then tells its rows one by one. 0: copies follow the dispatch. kAutoSms:
  // default_expand_sms(), or 0 with more than 256 experts a rank, where a number is refused; on a
  // GPU that does not run so many beside those of dispatch what there is room for, and with less
  // than half of the rule, which is slower, copies follow. At most 160; needs expert_alignment.
  std::uint32_t expand_sms = 0;
  // A dispatch or a combine may start while the kernel before it in its stream still runs
  // (programmatic dependent launch): it prepares itself and waits before it reads anything. Saves
  // part of a launch where calls are short; any kernel may come before.
  bool overlap_launches = false;
  // Handle::rows() and expert_counts() will be asked. Else a dispatch writes nothing to host
  // memory.
  bool host_counts = true;
  bool statistics = true;  // count selections of each expert and waits for each source
};

// SMs that fill NVLink of an H200. An SM stores 49.5 GB/s, copies to its own rank included, and the
// wire takes 345 GB/s when all ranks push; a quarter more, since SMs get uneven shares of it. The
// fewer the ranks, the larger the share that stays: 18 for two ranks, 12 for four, 11 for eight.
CROSSDOCK_API std::uint32_t default_dispatch_sms(std::uint32_t world);
// As many as pulled best on four ranks, 8, with the local share in the same proportion.
CROSSDOCK_API std::uint32_t default_combine_sms(std::uint32_t world);

// To copy rows beside a dispatch of tokens with `top_k` choices: half as many again as keep pace
// with the rows that arrive, at 41 GB/s each; 40 for four ranks and eight choices. The more copies
// a row has, the more: 104, the most, for one rank with eight.
CROSSDOCK_API std::uint32_t default_expand_sms(std::uint32_t world, std::uint32_t top_k);

// Memory of one rank, in bytes.
struct Sizes {
  std::uint32_t capacity = 0;     // rows that can arrive: world * max_tokens
  std::uint64_t rows_bytes = 0;   // of one slot: rows that can arrive, with all that goes with them
  std::uint64_t input_bytes = 0;  // of one slot: expert outputs, the input of combine
  std::uint64_t staging_bytes = 0;  // by push: rows that come to be added up, of one combine
  std::uint64_t control_bytes = 0;
  std::uint64_t transit_bytes = 0;  // rows and inputs of dispatches that find all slots held
  std::uint64_t user_bytes = 0;     // the caller's
  std::uint64_t small_bytes = 0;    // all slots of the path for few tokens: rows and inputs
  std::uint64_t window_bytes =
      0;  // symmetric: control, staging, all slots, small ones, transit and the caller's
  std::uint64_t local_bytes = 0;  // besides the window: state and routing tables
  // Ordinary memory of each dispatch that falls back: made when it is first needed, used again
  // when its handle is gone, freed with the group.
  std::uint64_t copy_bytes = 0;
};

// kInvalidArgument with the rule, the value and the fix where options are wrong.
CROSSDOCK_API Result<Sizes> sizes(const Options& options, std::uint32_t world);

}  // namespace v1
}  // namespace crossdock::ep
