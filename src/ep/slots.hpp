// Slots of a rank: the record of one dispatch and the memory that goes with it. Window slots have
// rows and inputs in the window, small ones too, for few tokens; copies have them in ordinary
// memory, for dispatches that find all window slots held; bare ones have neither, for outputs that
// the caller provides. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "ep/window.hpp"
#include "symm/memory.hpp"

namespace crossdock::ep {

// Numbers of the dispatches of a rank, by which a handle and what is told about it find each other.
// They begin again after 2^32 of them, and 0 is none's.
class Tickets {
 public:
  explicit Tickets(u32 last = 0) : last_(last) {}
  u32 next() {
    if (++last_ == 0) ++last_;
    return last_;
  }

 private:
  u32 last_;
};

enum class SlotKind { kWindow, kSmall, kCopy, kBare };

// The memory of a slot besides the window: offsets in one allocation. Window slots and bare ones
// end at `local_bytes`.
struct SlotLayout {
  u64 routes = 0;
  u64 source_ends = 0;
  u64 sent_ends = 0;
  u64 expert_counts = 0;
  u64 offsets = 0;  // of the grouping; the rest if it is wanted at all
  u64 aligned = 0;
  u64 places = 0;
  u64 positions = 0;
  u64 place_weights = 0;
  u64 pieces = 0;
  u64 local_bytes = 0;
  u64 rows = 0;
  u64 input = 0;
  u64 copy_bytes = 0;
};
SlotLayout slot_layout(const Options& options, const Window& window, u32 rank);
SlotLayout small_slot_layout(const Options& options, const Window& window);
// Of a slot with so many rows.
u64 most_places(const Options& options, const Window& window, u32 capacity);
// Blocks that make the lists of so many rows: fewer than any GPU has multiprocessors.
inline constexpr u32 kMostListPieces = 64;
u32 list_pieces(const Options& options, const Window& window, u32 capacity);

class Slot {
 public:
  Slot(SlotKind of_kind, const SlotLayout& layout, symm::LocalMemory memory)
      : kind(of_kind), layout_(layout), memory_(std::move(memory)) {}

  [[nodiscard]] device::EpRoute* routes() const { return at<device::EpRoute>(layout_.routes); }
  [[nodiscard]] u32* source_ends() const { return at<u32>(layout_.source_ends); }
  [[nodiscard]] u32* sent_ends() const { return at<u32>(layout_.sent_ends); }
  [[nodiscard]] u32* expert_counts() const { return at<u32>(layout_.expert_counts); }
  [[nodiscard]] u32* offsets() const { return at<u32>(layout_.offsets); }
  [[nodiscard]] u32* aligned() const { return at<u32>(layout_.aligned); }
  [[nodiscard]] device::i32* places() const { return at<device::i32>(layout_.places); }
  [[nodiscard]] u32* positions() const { return at<u32>(layout_.positions); }
  [[nodiscard]] u32* pieces() const { return at<u32>(layout_.pieces); }
  [[nodiscard]] float* place_weights() const { return at<float>(layout_.place_weights); }
  // Of a copy.
  [[nodiscard]] u8* rows() const { return at<u8>(layout_.rows); }
  [[nodiscard]] u8* input() const { return at<u8>(layout_.input); }

  SlotKind kind;
  bool held = false;
  bool sent = false;        // a dispatch_send() waits for its dispatch_receive()
  bool uncombined = false;  // its dispatch has not been combined yet, and may be
  bool captured = false;    // a graph writes to it in every replay: for captures alone
  // {ticket, count} words for the host, in memory that both see: rows, then experts.
  u64* host_words = nullptr;
  u64* device_words = nullptr;

 private:
  template <class T>
  [[nodiscard]] T* at(u64 offset) const {
    return reinterpret_cast<T*>(memory_.as<u8>() + offset);
  }
  SlotLayout layout_;
  symm::LocalMemory memory_;
};

}  // namespace crossdock::ep
