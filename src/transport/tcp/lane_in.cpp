// See lane_in.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/lane_in.hpp"

#include <algorithm>
#include <cerrno>
#include <fmt/format.h>

#include "base/log.hpp"

namespace crossdock::transport::tcp {
namespace {

constexpr std::size_t kStageBytes = wire::kMaxDataHeadBytes + 16 * 1024;
constexpr std::size_t kMaxAnswerBytes = wire::kMaxAckBytes;
// Answers wait for company until this much was applied, or until there is nothing more to read.
constexpr std::uint64_t kAnswerAfterBytes = 256 * 1024;
// One turn of a lane, so that the others of its worker are served in between.
constexpr int kStepBudget = 64;
// How far back a range looks for a lease that covers it.
constexpr std::size_t kLeasesToTry = 8;

}  // namespace

LaneIn::LaneIn(LaneInInit init)
    : peer_name_(std::move(init.lane.peer_name)),
      session_(init.lane.session),
      lane_(init.lane.lane),
      options_(init.options),
      worker_(init.worker),
      regions_(init.regions),
      log_(init.log),
      fd_(std::move(init.lane.fd)),
      reader_(kStageBytes),
      descriptors_(kMaxIov) {
  leases_.reserve(64);
}

Result<std::shared_ptr<LaneIn>> LaneIn::create(LaneInInit init) {
  tune_lane(init.lane.fd.get(), init.options.socket_buffer);
  std::shared_ptr<LaneIn> lane(new LaneIn(std::move(init)));
  const std::lock_guard lock(lane->mutex_);  // the first turn must not see it without its token
  CROSSDOCK_TRY(token, lane->worker_->add(lane, lane->fd_.get()));
  lane->token_ = token;
  return lane;
}

void LaneIn::sever() {
  const std::lock_guard lock(mutex_);
  shut(true);
}

Turn LaneIn::on_ready() noexcept {
  const std::lock_guard lock(mutex_);
  if (!fd_) return Turn::kIdle;
  for (int i = 0; i < kStepBudget; ++i) {
    const Step done = step();
    if (done == Step::kGo) continue;
    return Turn::kIdle;
  }
  return Turn::kMore;
}

LaneIn::Step LaneIn::step() {
  switch (phase_) {
    case Phase::kHead:
      return read_head();
    case Phase::kWrite:
      return receive_payload();
    case Phase::kDrain:
      return drain_payload();
    case Phase::kRead:
      return send_payload();
  }
  return Step::kEnd;
}

LaneIn::Step LaneIn::read_head() {
  // A new frame needs room for its answer.
  if (answers_.size() - answers_end_ < kMaxAnswerBytes)
    if (const Step sent = flush(); sent != Step::kGo) return sent;
  const wire::Bytes staged = reader_.staged();
  if (staged.size() < wire::kDataHeaderBytes) return fill();
  const auto header = wire::decode_data_header(staged.first(wire::kDataHeaderBytes));
  if (!header.ok()) return end(header.error().message);
  if (header->type != wire::DataType::kWrite && header->type != wire::DataType::kRead)
    return end(fmt::format("{} from an initiator", wire::to_string(header->type)));
  head_bytes_ = header->head_bytes();
  if (staged.size() < head_bytes_) return fill();
  if (descriptors_.size() < header->count) descriptors_.resize(header->count);
  const auto body = staged.subspan(wire::kDataHeaderBytes, header->body_bytes());
  if (const auto ok = wire::decode_descriptors(*header, body, descriptors_); !ok.ok())
    return end(ok.error().message);
  reader_.consume(head_bytes_);
  return begin(*header);
}

// Receives into the stage. Before it waits, everything that was applied is answered; when the
// socket was emptied by the call before, that is now.
LaneIn::Step LaneIn::fill() {
  if (drained_ && flush() == Step::kEnd) return Step::kEnd;
  const IoResult io = reader_.fill(fd_.get());
  drained_ = !reader_.full();
  if (io.status == Io::kProgress) return Step::kGo;
  if (io.status == Io::kWouldBlock) {
    const Step sent = flush();
    return sent == Step::kEnd ? sent : Step::kWait;
  }
  shut(io.status == Io::kFailed);
  return Step::kEnd;
}

LaneIn::Step LaneIn::begin(const wire::DataHeader& header) {
  header_ = header;
  expires_ = header.expiry_ms == 0 ? Deadline::in(std::chrono::hours(24 * 365))
                                   : Deadline::in(std::chrono::milliseconds(header.expiry_ms));
  const bool write = header.type == wire::DataType::kWrite;
  Result<> leased = lease_all(write ? transfer::Op::kWrite : transfer::Op::kRead);
  if (leased.ok() && header.has_checksum)
    leased = make_error(Code::kUnsupported, "data lanes take no checksums per frame");
  if (!leased.ok()) {
    leases_.clear();
    refusal_ = leased.code();
    refusal_text_ = leased.error().message;
    to_drain_ = header.trailing_bytes();
    phase_ = Phase::kDrain;
    return Step::kGo;
  }
  payload_.clear();
  if (!write && !ranges_readable()) return answer(Code::kInvalidArgument, mem::kNotMapped);
  if (!write)
    if (const Step begun = begin_read(); begun != Step::kGo) return begun;
  for (std::size_t i = 0; i < header.count; ++i) {
    // The ranges are leased: they lie in memory of this process.
    auto* at = reinterpret_cast<std::byte*>(descriptors_[i].addr);
    write ? prefetch_piece<true>(at, descriptors_[i].length)
          : prefetch_piece<false>(at, descriptors_[i].length);
    payload_.add(at, descriptors_[i].length, i == 0);
  }
  phase_ = write ? Phase::kWrite : Phase::kRead;
  return write ? Step::kGo : add_verdict(Code::kOk, {});
}

LaneIn::Step LaneIn::begin_read() {
  const auto size = wire::encode_read_data(
      {.request_id = header_.request_id, .payload_bytes = header_.payload_bytes},
      std::span(answers_).subspan(answers_end_));
  if (!size.ok()) return end(size.error().message);
  answers_end_ += *size;
  payload_.add(answers_.data() + answers_begin_, answers_end_ - answers_begin_, true);
  return Step::kGo;
}

LaneIn::Step LaneIn::add_verdict(Code status, std::string_view message) {
  const auto size =
      wire::encode_ack({.request_id = header_.request_id,
                        .status = status,
                        .bytes_applied = status == Code::kOk ? header_.payload_bytes : 0,
                        .message = message},
                       verdict_);
  if (!size.ok()) return end(size.error().message);
  verdict_bytes_ = *size;
  payload_.add(verdict_.data(), verdict_bytes_, true);
  return Step::kGo;
}

// All ranges of the frame or none. Neighbouring ranges mostly share a region and so a lease.
Result<> LaneIn::lease_all(transfer::Op op) {
  for (std::size_t i = 0; i < header_.count; ++i) {
    const wire::Descriptor& d = descriptors_[i];
    const std::size_t tried = std::min(leases_.size(), kLeasesToTry);
    const bool covered = std::any_of(leases_.rbegin(), leases_.rbegin() + tried, [&](auto& lease) {
      return lease.region()->contains(d.addr, d.length);
    });
    if (covered) continue;
    CROSSDOCK_TRY(lease, regions_->lease_inbound(d.addr, d.length, op));
    leases_.push_back(std::move(lease));
  }
  return {};
}

LaneIn::Step LaneIn::receive_payload() {
  if (connection_over(fd_.get())) return shut(false), Step::kEnd;
  if (expires_.passed())
    return refuse_rest(Code::kDeadline,
                       fmt::format("the request expired with {} of {} bytes to come",
                                   payload_.bytes(), header_.payload_bytes));
  const IoResult io = reader_.staged().empty() ? reader_.receive(fd_.get(), payload_, head_bytes_)
                                               : reader_.unstage(payload_);
  if (io.status == Io::kWouldBlock) {
    const Step sent = flush();
    return sent == Step::kEnd ? sent : Step::kWait;
  }
  if (io.status == Io::kFailed && io.error == EFAULT)
    return refuse_rest(Code::kInvalidArgument, std::string(mem::kNotMapped));
  if (io.status != Io::kProgress) return shut(io.status == Io::kFailed), Step::kEnd;
  if (!payload_.empty()) return Step::kGo;
  return answer(Code::kOk, {});
}

LaneIn::Step LaneIn::refuse_rest(Code status, std::string message) {
  leases_.clear();
  refusal_ = status;
  refusal_text_ = std::move(message);
  to_drain_ = payload_.bytes();
  phase_ = Phase::kDrain;
  return Step::kGo;
}

LaneIn::Step LaneIn::drain_payload() {
  const std::size_t part = std::min<std::uint64_t>(to_drain_, reader_.staged().size());
  reader_.consume(part);
  to_drain_ -= part;
  if (to_drain_ != 0) return fill();
  return answer(refusal_, refusal_text_);
}

// Sends what waits in `answers_`, the last of it the head of this READ_DATA, payload and verdict.
LaneIn::Step LaneIn::send_payload() {
  if (head_unsent() && expires_.passed())
    return refuse_read(Code::kDeadline, "the request expired before its first byte could be sent");
  const IoResult io = send_pieces(fd_.get(), payload_.pieces());
  if (io.status == Io::kWouldBlock) return Step::kWait;
  if (io.status == Io::kFailed && io.error == EFAULT) {
    // From now on these regions are looked at before a byte of them is promised.
    for (const auto& lease : leases_)
      lease.region()->torn.store(true);
    return head_unsent() ? refuse_read(Code::kInvalidArgument, mem::kNotMapped) : spoil_read();
  }
  if (io.status != Io::kProgress) return shut(true), Step::kEnd;
  payload_.consume(io.bytes);
  if (!payload_.empty()) return Step::kGo;
  answers_begin_ = answers_end_ = 0;
  unanswered_bytes_ = 0;
  leases_.clear();
  phase_ = Phase::kHead;
  return Step::kGo;
}

bool LaneIn::head_unsent() const {
  return payload_.bytes() >=
         wire::kMinDataHeadBytes + std::uint64_t{header_.payload_bytes} + verdict_bytes_;
}

// The answers before it, of which some may have left, go on their way.
LaneIn::Step LaneIn::refuse_read(Code status, std::string_view message) {
  const std::uint64_t unsent_answers =
      payload_.bytes() - header_.payload_bytes - wire::kMinDataHeadBytes - verdict_bytes_;
  answers_end_ -= wire::kMinDataHeadBytes;
  answers_begin_ = answers_end_ - unsent_answers;
  payload_.clear();
  return answer(status, message);
}

// What has begun is completed, or the lane and everybody on it is lost: the verdict tells that the
// bytes count for nothing.
LaneIn::Step LaneIn::spoil_read() {
  const std::uint64_t left = payload_.bytes() - verdict_bytes_;
  const std::uint64_t data_left = std::min<std::uint64_t>(left, header_.payload_bytes);
  const std::uint64_t head_left = left - data_left;
  payload_.clear();
  if (head_left != 0) payload_.add(answers_.data() + answers_end_ - head_left, head_left, true);
  payload_.add_filler(data_left);
  return add_verdict(Code::kInvalidArgument, mem::kNotMapped);
}

bool LaneIn::ranges_readable() const {
  const bool torn = std::any_of(leases_.begin(), leases_.end(),
                                [](const auto& lease) { return lease.region()->torn.load(); });
  if (!torn) return true;
  return std::all_of(descriptors_.begin(), descriptors_.begin() + header_.count,
                     [](const wire::Descriptor& d) {
                       return mem::is_readable(reinterpret_cast<const void*>(d.addr), d.length);
                     });
}

// The frame in progress is over. Its answer may wait for others.
LaneIn::Step LaneIn::answer(Code status, std::string_view message) {
  leases_.clear();
  const auto size =
      wire::encode_ack({.request_id = header_.request_id,
                        .status = status,
                        .bytes_applied = status == Code::kOk ? header_.payload_bytes : 0,
                        .message = message},
                       std::span(answers_).subspan(answers_end_));
  if (!size.ok()) return end(size.error().message);
  answers_end_ += *size;
  unanswered_bytes_ += header_.payload_bytes;
  phase_ = Phase::kHead;
  if (unanswered_bytes_ < kAnswerAfterBytes) return Step::kGo;
  return flush() == Step::kEnd ? Step::kEnd : Step::kGo;
}

// Sends the answers that wait. kWait: the socket takes no more now.
LaneIn::Step LaneIn::flush() {
  while (answers_begin_ != answers_end_) {
    iovec piece{answers_.data() + answers_begin_, answers_end_ - answers_begin_};
    const IoResult io = send_pieces(fd_.get(), {&piece, 1});
    if (io.status == Io::kWouldBlock) return Step::kWait;
    if (io.status != Io::kProgress) return shut(true), Step::kEnd;
    answers_begin_ += io.bytes;
  }
  answers_begin_ = answers_end_ = 0;
  unanswered_bytes_ = 0;
  return Step::kGo;
}

// The peer broke the protocol: this lane ends, the others go on.
LaneIn::Step LaneIn::end(std::string_view why) {
  if (log_ != nullptr)
    CROSSDOCK_LOG_ONCE(*log_, kWarn, "tcp bad frame " + peer_name_,
                       "lane {} of peer '{}' ended: {}", lane_, peer_name_, why);
  shut(true);
  return Step::kEnd;
}

void LaneIn::shut(bool reset) {
  if (!fd_) return;
  if (reset)
    abort_connection(fd_);
  else
    fd_.reset();
  leases_.clear();
  payload_.clear();
  worker_->remove(token_);
  over_.store(true);
}

}  // namespace crossdock::transport::tcp
