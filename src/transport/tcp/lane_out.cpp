// See lane_out.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/lane_out.hpp"

#include <algorithm>
#include <cerrno>
#include <fmt/format.h>

#include "base/log.hpp"

namespace crossdock::transport::tcp {
namespace {

// Answers have short heads: a header and at most one message.
constexpr std::size_t kStageBytes = 8 * 1024;
// One turn of a lane, so that the others of its worker are served in between.
constexpr std::uint64_t kSendBudget = 4u << 20;
constexpr int kReceiveBudget = 32;
// Behind the payload of a READ_DATA: its verdict, and the next one's head.
constexpr std::size_t kReadAhead = 2 * wire::kMinDataHeadBytes;
// In flight and no more than this: the answer is worth polling for.
constexpr std::uint64_t kSmallFlightBytes = 16 * 1024;

const char* verb(Op op) {
  return op == Op::kWrite ? "write" : "read";
}

Error lost(std::string message, int error = 0) {
  Error e = error != 0 ? errno_error(error, std::move(message))
                       : make_error(Code::kPeerLost, std::move(message));
  e.code = Code::kPeerLost;
  e.scope = Scope::kPeer;
  e.retry = Retry::kAfterReconnect;
  return e;
}

Error not_mapped(const void* at) {
  Error e = errno_error(EFAULT, fmt::format("the local memory at {} is not mapped any more; keep "
                                            "it mapped until its region is released",
                                            at));
  e.code = Code::kInvalidArgument;
  e.scope = Scope::kTransfer;
  e.retry = Retry::kNo;
  return e;
}

}  // namespace

LaneOut::LaneOut(LaneOutInit init)
    : peer_(std::move(init.peer)),
      lane_(init.lane),
      options_(init.options),
      worker_(init.worker),
      log_(init.log),
      queue_(init.options, peer_),
      fd_(std::move(init.fd)),
      reader_(kStageBytes) {}

Result<std::shared_ptr<LaneOut>> LaneOut::create(LaneOutInit init) {
  tune_lane(init.fd.get(), init.options.socket_buffer);
  std::shared_ptr<LaneOut> lane(new LaneOut(std::move(init)));
  // Held: the worker's first turn must not see the lane without its token.
  const std::lock_guard lock(lane->send_mutex_);
  CROSSDOCK_TRY(token, lane->worker_->add(lane, lane->fd_.get()));
  lane->token_ = token;
  return lane;
}

Result<> LaneOut::post(Shard& shard) {
  const bool small = shard.bytes <= options_.inline_bytes;  // the shard may be over after push()
  bool idle = false;
  CROSSDOCK_CHECK_OK(queue_.push(shard, idle));
  if (small && idle)
    send_inline();
  else
    worker_->kick(token_);
  return {};
}

// Saves the way through the worker's thread for a lone small shard.
void LaneOut::send_inline() {
  bool hand_over = true;
  if (std::unique_lock lock(send_mutex_, std::try_to_lock); lock.owns_lock()) {
    const Sent sent = send(options_.inline_bytes);
    if (sent == Sent::kBroken) broken_.store(true);
    hand_over = sent == Sent::kBroken || sent == Sent::kMore || queue_.has_done();
  }
  if (hand_over || queue_.sendable()) worker_->kick(token_);
}

void LaneOut::cancel() {
  sweep_.store(true);
  worker_->kick(token_);
}

void LaneOut::sever(const Error& why) {
  queue_.refuse(why);
  severed_.store(true);
  worker_->kick(token_);
}

void LaneOut::close() {
  closing_.store(true);
  worker_->kick(token_);
}

Turn LaneOut::on_ready() noexcept {
  if (severed_.load()) {
    shut(true);
  } else if (closing_.load()) {
    shut(false);
    return Turn::kIdle;
  }
  bool more = false;
  if (sweep_.exchange(false)) queue_.sweep();
  if (fd_) more = receive() == Received::kMore;
  if (fd_) {
    Sent sent = Sent::kBroken;
    {
      const std::lock_guard lock(send_mutex_);
      sent = send(kSendBudget);
    }
    if (sent == Sent::kBroken || broken_.load()) {
      // What the peer answered before it went is still to be had; then the socket tells why.
      while (fd_ && receive() == Received::kMore) {
      }
      if (fd_)
        lose(lost(fmt::format("the connection to peer '{}' broke (lane {})", peer_, lane_),
                  send_errno_.load()));
    }
    more = more || sent == Sent::kMore;
  }
  finish_done();
  if (fd_) poll_briefly();
  return more && fd_ ? Turn::kMore : Turn::kIdle;
}

LaneOut::Sent LaneOut::send(std::uint64_t budget) {
  if (!fd_) return Sent::kAll;
  std::uint64_t total = 0;
  for (;;) {
    if (batch_.empty()) {
      if (total >= budget) return Sent::kMore;
      batch_.clear();
      queue_.cut(batch_, std::min<std::uint64_t>(budget, options_.frame_bytes));
      if (batch_.empty()) return Sent::kAll;
    }
    const IoResult io = send_pieces(fd_.get(), batch_.pieces.pieces());
    if (io.status == Io::kWouldBlock) return Sent::kBlocked;
    if (io.status == Io::kFailed && io.error == EFAULT && replace_unmapped()) continue;
    if (io.status != Io::kProgress) {
      send_errno_.store(io.error);
      return Sent::kBroken;
    }
    batch_.pieces.consume(io.bytes);
    total += io.bytes;
    // Pairs with wholly_sent(): an answer to these bytes may already be there.
    stream_sent_.fetch_add(io.bytes, std::memory_order_release);
  }
}

// A frame that has begun must be sent whole, or the lane and everybody on it is lost.
bool LaneOut::replace_unmapped() {
  std::uint64_t offset = stream_sent_.load(std::memory_order_relaxed);
  const std::span<iovec> pieces = batch_.pieces.pieces();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (!mem::is_readable(pieces[i].iov_base, pieces[i].iov_len)) {
      queue_.spoil(offset, not_mapped(pieces[i].iov_base));
      batch_.pieces.substitute(i);
      return true;
    }
    offset += pieces[i].iov_len;
  }
  return false;
}

// The READ_DATA in progress has no place to go: it is read to its end all the same.
void LaneOut::divert_payload() {
  queue_.spoil_oldest(not_mapped(payload_.pieces().front().iov_base));
  const std::uint64_t left = payload_.bytes();
  payload_.clear();
  trash_.resize(kFiller.size());
  payload_.add_repeated(trash_, left);
}

LaneOut::Received LaneOut::receive() {
  for (int i = 0; i < kReceiveBudget; ++i) {
    if (Result<> handled = handle_staged(); !handled.ok()) {
      lose(lost(fmt::format("peer '{}' broke the protocol on lane {}: {}", peer_, lane_,
                            handled.error().message)));
      return Received::kEnded;
    }
    const IoResult io = payload_.empty() ? reader_.fill(fd_.get())
                                         : reader_.receive(fd_.get(), payload_, kReadAhead);
    if (io.status == Io::kProgress) continue;
    if (io.status == Io::kWouldBlock) return Received::kNothing;
    if (io.status == Io::kFailed && io.error == EFAULT && !payload_.empty()) {
      divert_payload();
      continue;
    }
    lose(io.status == Io::kClosed
             ? lost(fmt::format("peer '{}' closed the connection (lane {})", peer_, lane_))
             : lost(fmt::format("the connection to peer '{}' broke (lane {})", peer_, lane_),
                    io.error));
    return Received::kEnded;
  }
  return Received::kMore;
}

// Everything that is staged, up to a frame that is not all here. An error ends the lane.
Result<> LaneOut::handle_staged() {
  for (;;) {
    while (reader_.unstage(payload_).status == Io::kFailed)
      divert_payload();
    if (!payload_.empty()) return {};
    const wire::Bytes staged = reader_.staged();
    if (staged.size() < wire::kDataHeaderBytes) return {};
    CROSSDOCK_TRY(header, wire::decode_data_header(staged.first(wire::kDataHeaderBytes)));
    if (header.type != wire::DataType::kReadData && header.type != wire::DataType::kAck)
      return make_error(Code::kCorrupt,
                        fmt::format("{} from a target", wire::to_string(header.type)));
    if (staged.size() < header.head_bytes()) return {};
    const wire::Bytes body = staged.subspan(wire::kDataHeaderBytes, header.body_bytes());
    if (header.type == wire::DataType::kAck)
      CROSSDOCK_CHECK_OK(handle_ack(header, body));
    else
      CROSSDOCK_CHECK_OK(handle_read_data(header));
    reader_.consume(header.head_bytes());
  }
}

// The frame that this header answers: always the oldest in flight.
Result<FlightRecord> LaneOut::answered(const wire::DataHeader& header) {
  const std::optional<FlightRecord> record = queue_.oldest();
  if (!record || record->request_id != header.request_id || !wholly_sent(*record))
    return make_error(Code::kCorrupt,
                      fmt::format("{} for request {}, which is not the next to be answered",
                                  wire::to_string(header.type), header.request_id));
  return *record;
}

bool LaneOut::wholly_sent(const FlightRecord& record) {
  if (record.stream_end <= stream_sent_.load(std::memory_order_acquire)) return true;
  // The thread inside post() may have handed the last byte to the kernel and not said so yet.
  const std::lock_guard lock(send_mutex_);
  return record.stream_end <= stream_sent_.load(std::memory_order_relaxed);
}

Result<> LaneOut::handle_ack(const wire::DataHeader& header, wire::Bytes body) {
  CROSSDOCK_TRY(message, wire::decode_ack_message(header, body));
  CROSSDOCK_TRY(record, answered(header));
  const bool data_came = std::exchange(reading_, false);
  if (header.status != Code::kOk) {
    queue_.settle(
        Error{.code = header.status,
              .scope = Scope::kTransfer,
              .message = fmt::format("peer '{}' refused to {}: {}", peer_,
                                     record.op == Op::kWrite ? "be written" : "be read", message)});
    return {};
  }
  if (data_came != (record.op == Op::kRead) || header.payload_bytes != record.bytes)
    return make_error(Code::kCorrupt, fmt::format("ACK of {} bytes for a {} of {} with{} data",
                                                  header.payload_bytes, verb(record.op),
                                                  record.bytes, data_came ? "" : "out"));
  deliver(record);
  return {};
}

// The payload that follows goes straight to the slices of the frame; whether it counts is said
// after it.
Result<> LaneOut::handle_read_data(const wire::DataHeader& header) {
  CROSSDOCK_TRY(record, answered(header));
  if (record.op != Op::kRead || header.payload_bytes != record.bytes || reading_)
    return make_error(Code::kCorrupt,
                      fmt::format("READ_DATA of {} bytes for a {} of {}", header.payload_bytes,
                                  verb(record.op), record.bytes));
  payload_.clear();
  std::uint32_t left = record.bytes;
  std::uint32_t offset = record.first_offset;
  for (std::size_t i = record.first_slice; left != 0; ++i) {
    const Slice& slice = record.shard->slices[i];
    const std::uint32_t part = std::min(slice.length - offset, left);
    prefetch_piece<true>(slice.local + offset, part);
    payload_.add(slice.local + offset, part);
    left -= part;
    offset = 0;
  }
  reading_ = true;
  return {};
}

// The oldest frame is in place. Progress comes first: once settled, the shard may be over.
void LaneOut::deliver(const FlightRecord& record) {
  if (!record.spoiled) record.shard->sink->shard_progress(*record.shard, record.bytes);
  queue_.settle(std::nullopt);
}

void LaneOut::lose(Error why) {
  if (log_ != nullptr && queue_.queued_bytes() != 0)
    CROSSDOCK_LOG_ONCE(*log_, kWarn, "tcp lane lost " + peer_, "{}", why.message);
  queue_.refuse(why);
  shut(true);
}

void LaneOut::shut(bool reset) {
  {
    const std::lock_guard lock(send_mutex_);
    if (reset)
      abort_connection(fd_);
    else
      fd_.reset();
    batch_.clear();
    worker_->remove(token_);
  }
  payload_.clear();
  reading_ = false;
  queue_.refuse(make_error(Code::kClosed, fmt::format("the endpoint of '{}' is closed", peer_)));
  queue_.close();
}

void LaneOut::finish_done() {
  for (Shard* shard = queue_.take_done(); shard != nullptr;) {
    Shard& over = *shard;
    shard = over.next;
    const std::unique_ptr<Error> error = ShardQueue::take_error(over);
    over.sink->shard_finished(over, error.get());
  }
}

// A small request is answered within microseconds; sleeping would cost more than that.
void LaneOut::poll_briefly() noexcept {
  if (options_.spin.count() == 0) return;
  const std::uint64_t bytes = queue_.flight_bytes();
  if (bytes != 0 && bytes <= kSmallFlightBytes) worker_->spin_for(options_.spin);
}

}  // namespace crossdock::transport::tcp
