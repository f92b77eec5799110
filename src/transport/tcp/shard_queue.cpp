// See shard_queue.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/shard_queue.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <new>

#include "base/check.hpp"

namespace crossdock::transport::tcp {
namespace {

// Room for the head of one largest frame, or for many small ones.
constexpr std::size_t kHeadBytes = 48 * 1024;
// So that a frame which fits by its content fits with what pads it.
static_assert(kHeadBytes % wire::kDataHeadAlign == 0);
// A batch with less room than this is sent before another frame is cut, so that frames stay large.
constexpr std::size_t kWorthwhileSlices = 128;

std::uint32_t expiry_ms(Deadline deadline) {
  return static_cast<std::uint32_t>(std::max(deadline.remaining_ms(), 1));
}

}  // namespace

struct ShardQueue::State {
  std::uint32_t next_slice = 0;   // where the next frame begins
  std::uint32_t next_offset = 0;  // in that slice
  std::uint32_t frames = 0;       // in flight
  bool waiting = true;            // linked in the queue
  bool gap = false;               // a frame failed: what follows is no prefix any more
  Error* error = nullptr;         // owned; the first one
};

SendBatch::SendBatch() : heads(kHeadBytes) {
  descriptors.reserve(ShardQueue::kMaxFrameSlices);
}

void SendBatch::clear() noexcept {
  pieces.clear();
  heads_used = 0;
  payload_bytes = 0;
}

ShardQueue::ShardQueue(const TcpOptions& options, std::string peer)
    : options_(options), peer_(std::move(peer)), ring_(kMaxFrames) {}

ShardQueue::State& ShardQueue::state(Shard& shard) noexcept {
  static_assert(sizeof(State) <= sizeof(shard.scratch));
  static_assert(alignof(State) <= alignof(std::uint64_t));
  return *std::launder(reinterpret_cast<State*>(shard.scratch));
}

Result<> ShardQueue::push(Shard& shard, bool& idle) {
  const std::lock_guard lock(mutex_);
  if (refusal_) return *refusal_;
  if (waiting_ >= options_.queue_shards)
    return Error{.code = Code::kWouldBlock,
                 .retry = Retry::kLater,
                 .message = fmt::format("{} shards wait for peer '{}'; post again when some are "
                                        "done",
                                        waiting_, peer_)};
  idle = head_ == nullptr && ring_first_ == ring_next_;
  new (shard.scratch) State();
  shard.slices_done = 0;
  shard.next = nullptr;
  (tail_ != nullptr ? tail_->next : head_) = &shard;
  tail_ = &shard;
  ++waiting_;
  queued_bytes_.fetch_add(shard.bytes, std::memory_order_relaxed);
  return {};
}

bool ShardQueue::window_open() const noexcept {
  return ring_next_ - ring_first_ < kMaxFrames &&
         (flight_bytes_ == 0 || flight_bytes_ < options_.window_bytes);
}

void ShardQueue::cut(SendBatch& batch, std::uint64_t max_bytes) {
  const std::lock_guard lock(mutex_);
  while (batch.payload_bytes < max_bytes && batch.pieces.size() + kWorthwhileSlices < kMaxIov &&
         kHeadBytes - batch.heads_used >
             wire::data_head_bytes(kWorthwhileSlices * wire::kDescriptorBytes)) {
    if (!cut_frame(batch)) return;
  }
}

// True when a frame was added. Drops shards at the front that shall not go on.
bool ShardQueue::cut_frame(SendBatch& batch) {
  while (head_ != nullptr && refuses_to_start(*head_))
    drop_front();
  if (head_ == nullptr || !window_open()) return false;
  Shard& shard = *head_;
  State& st = state(shard);
  FlightRecord& record = ring_[ring_next_ % kMaxFrames];
  record = {.shard = &shard,
            .op = shard.op,
            .request_id = ring_next_,
            .first_slice = st.next_slice,
            .first_offset = st.next_offset};
  const State before = st;
  const std::size_t head_piece = batch.pieces.size();
  batch.pieces.add(batch.heads.data() + batch.heads_used, 0, true);
  cut_slices(shard, batch, record);
  if (auto encoded = encode(shard, batch, record, head_piece); !encoded.ok()) {
    batch.pieces.truncate(head_piece);
    st = before;
    fail(shard, std::move(encoded).error());
    return true;  // look again: the shard is dropped next
  }
  ++ring_next_;
  ++st.frames;
  flight_bytes_ += record.bytes;
  if (st.next_slice == shard.slices.size()) drop_front();
  return true;
}

// Takes as many bytes from the shard as fit into one frame; advances the shard.
void ShardQueue::cut_slices(Shard& shard, SendBatch& batch, FlightRecord& record) {
  State& st = state(shard);
  const std::size_t room_in_heads =
      (kHeadBytes - batch.heads_used - wire::kMinDataHeadBytes) / wire::kDescriptorBytes;
  const std::size_t most =
      std::min({kMaxFrameSlices, room_in_heads, kMaxIov - batch.pieces.size()});
  batch.descriptors.clear();
  while (st.next_slice < shard.slices.size() && batch.descriptors.size() < most &&
         record.bytes < options_.frame_bytes) {
    const Slice& slice = shard.slices[st.next_slice];
    const std::uint32_t part =
        std::min(slice.length - st.next_offset, options_.frame_bytes - record.bytes);
    batch.descriptors.push_back({slice.remote + st.next_offset, part});
    if (shard.op == Op::kWrite) {
      prefetch_piece<false>(slice.local + st.next_offset, part);
      batch.pieces.add(slice.local + st.next_offset, part, batch.descriptors.size() == 1);
    }
    record.bytes += part;
    st.next_offset += part;
    if (st.next_offset == slice.length) {
      st.next_offset = 0;
      ++st.next_slice;
    }
  }
  record.slices_end = st.next_slice;
}

Result<> ShardQueue::encode(Shard& shard, SendBatch& batch, FlightRecord& record,
                            std::size_t head_piece) {
  const wire::RequestFrame frame{.request_id = record.request_id,
                                 .expiry_ms = expiry_ms(shard.deadline),
                                 .descriptors = batch.descriptors};
  const std::span<std::byte> out = std::span(batch.heads).subspan(batch.heads_used);
  CROSSDOCK_TRY(size, shard.op == Op::kWrite ? wire::encode_write(frame, out)
                                             : wire::encode_read(frame, out));
  batch.pieces.resize_piece(head_piece, size);
  batch.heads_used += size;
  batch.payload_bytes += record.bytes;
  stream_end_ += size + (shard.op == Op::kWrite ? record.bytes : 0);
  record.stream_end = stream_end_;
  return {};
}

bool ShardQueue::refuses_to_start(Shard& shard) {
  State& st = state(shard);
  if (st.error != nullptr) return true;
  if (shard.slices.empty()) return true;
  if (shard.stop != nullptr && shard.stop->load(std::memory_order_acquire)) {
    fail(shard, cancelled(shard));
  } else if (shard.deadline.passed()) {
    fail(shard, Error{.code = Code::kDeadline,
                      .scope = Scope::kTransfer,
                      .message = fmt::format("the deadline passed with {} of {} slices in place at "
                                             "peer '{}'",
                                             shard.slices_done, shard.slices.size(), peer_)});
  }
  return st.error != nullptr;
}

// The front shard waits no more: all cut, or given up.
void ShardQueue::drop_front() {
  Shard& shard = *head_;
  head_ = shard.next;
  if (head_ == nullptr) tail_ = nullptr;
  shard.next = nullptr;
  --waiting_;
  state(shard).waiting = false;
  finish_if_over(shard);
}

void ShardQueue::finish_if_over(Shard& shard) {
  const State& st = state(shard);
  if (st.waiting || st.frames != 0) return;
  queued_bytes_.fetch_sub(shard.bytes, std::memory_order_relaxed);
  shard.next = nullptr;
  (done_tail_ != nullptr ? done_tail_->next : done_head_) = &shard;
  done_tail_ = &shard;
}

void ShardQueue::fail(Shard& shard, Error error) {
  State& st = state(shard);
  if (st.error == nullptr) st.error = new Error(std::move(error));
}

Error ShardQueue::cancelled(const Shard& shard) const {
  return Error{.code = Code::kCancelled,
               .scope = Scope::kTransfer,
               .message = fmt::format("stopped with {} of {} slices in place", shard.slices_done,
                                      shard.slices.size())};
}

std::optional<FlightRecord> ShardQueue::oldest() const {
  const std::lock_guard lock(mutex_);
  if (ring_first_ == ring_next_) return std::nullopt;
  return ring_[ring_first_ % kMaxFrames];
}

void ShardQueue::settle(std::optional<Error> error) {
  const std::lock_guard lock(mutex_);
  CROSSDOCK_CHECK(ring_first_ != ring_next_, "an answer was settled without a frame in flight");
  const FlightRecord record = ring_[ring_first_ % kMaxFrames];
  ++ring_first_;
  flight_bytes_ -= record.bytes;
  Shard& shard = *record.shard;
  State& st = state(shard);
  --st.frames;
  if (error) {
    st.gap = true;
    fail(shard, *std::move(error));
  } else if (!st.gap) {
    shard.slices_done = record.slices_end;
  }
  finish_if_over(shard);
}

void ShardQueue::spoil(std::uint64_t offset, Error error) {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t id = ring_first_; id != ring_next_; ++id)
    if (FlightRecord& record = ring_[id % kMaxFrames]; offset < record.stream_end)
      return spoil(record, std::move(error));
}

void ShardQueue::spoil_oldest(Error error) {
  const std::lock_guard lock(mutex_);
  if (ring_first_ != ring_next_) spoil(ring_[ring_first_ % kMaxFrames], std::move(error));
}

void ShardQueue::spoil(FlightRecord& record, Error error) {
  record.spoiled = true;
  state(*record.shard).gap = true;
  fail(*record.shard, std::move(error));
}

void ShardQueue::sweep() {
  const std::lock_guard lock(mutex_);
  Shard* rest = head_;
  head_ = tail_ = nullptr;
  while (rest != nullptr) {
    Shard& shard = *rest;
    rest = shard.next;
    shard.next = nullptr;
    if (!refuses_to_start(shard)) {
      (tail_ != nullptr ? tail_->next : head_) = &shard;
      tail_ = &shard;
      continue;
    }
    --waiting_;
    state(shard).waiting = false;
    finish_if_over(shard);
  }
}

void ShardQueue::refuse(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = why;
}

std::optional<Error> ShardQueue::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

void ShardQueue::close() {
  const std::lock_guard lock(mutex_);
  CROSSDOCK_CHECK(refusal_.has_value(), "a queue was closed without a reason");
  while (head_ != nullptr) {
    fail(*head_, *refusal_);
    drop_front();
  }
  for (; ring_first_ != ring_next_; ++ring_first_) {
    Shard& shard = *ring_[ring_first_ % kMaxFrames].shard;
    shard.in_doubt = true;
    fail(shard, *refusal_);
    --state(shard).frames;
    finish_if_over(shard);
  }
  flight_bytes_ = 0;
}

Shard* ShardQueue::take_done() {
  const std::lock_guard lock(mutex_);
  done_tail_ = nullptr;
  return std::exchange(done_head_, nullptr);
}

std::unique_ptr<Error> ShardQueue::take_error(Shard& shard) {
  return std::unique_ptr<Error>(std::exchange(state(shard).error, nullptr));
}

bool ShardQueue::has_done() const {
  const std::lock_guard lock(mutex_);
  return done_head_ != nullptr;
}

bool ShardQueue::sendable() const {
  const std::lock_guard lock(mutex_);
  return head_ != nullptr && window_open();
}

std::uint64_t ShardQueue::flight_bytes() const {
  const std::lock_guard lock(mutex_);
  return flight_bytes_;
}

std::size_t ShardQueue::flight_frames() const {
  const std::lock_guard lock(mutex_);
  return ring_next_ - ring_first_;
}

}  // namespace crossdock::transport::tcp
