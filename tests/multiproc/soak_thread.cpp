// See soak_thread.hpp. SPDX-License-Identifier: Apache-2.0
#include "multiproc/soak_thread.hpp"

#include <algorithm>
#include <fmt/format.h>

namespace crossdock::testing::soak {
namespace {

// Of memory between transfers: found anywhere else, somebody touched what was quiet.
constexpr std::byte kOutPoison{0xe1}, kInPoison{0xd2};

}  // namespace

SoakThread::SoakThread(Engine& engine, Directory& directory, const MemberOptions& member,
                       std::size_t index)
    : engine_(engine),
      directory_(directory),
      member_(member),
      index_(index),
      random_(((member.seed * 64 + member.index) * 4096 + member.incarnation) * 16 + index),
      out_(engine.allocate(kAreaBytes).value()),
      in_(engine.allocate(kAreaBytes).value()),
      sent_(kAreaBytes) {
  std::fill_n(bytes_of(out_), kAreaBytes, kOutPoison);
  std::fill_n(bytes_of(in_), kAreaBytes, kInPoison);
}

void SoakThread::start() {
  stop_.store(false);
  thread_ = std::thread([this] {
    while (!stop_.load() && fault_.empty())
      step();
  });
}

void SoakThread::stop() {
  stop_.store(true);
  if (thread_.joinable()) thread_.join();
}

std::size_t SoakThread::draw(std::size_t least, std::size_t most) {
  return least + random_() % (most - least + 1);
}

void SoakThread::fail(const std::string& why) {
  if (fault_.empty())
    fault_ = fmt::format("member {} incarnation {} thread {} transfer {}: {}", member_.index,
                         member_.incarnation, index_, transfers_, why);
}

// What a transfer may end with when peers die, hang and are cut off.
void SoakThread::expect_code(const Error& error, bool cancelled) {
  switch (error.code) {
    case Code::kDeadline:
    case Code::kPeerLost:
    case Code::kUnreachable:
    case Code::kWouldBlock:
      return;
    case Code::kCancelled:
      if (cancelled) return;
      break;
    default:
      break;
  }
  fail("an error that nobody caused: " + error.describe());
}

void SoakThread::step() {
  const std::size_t index = draw(0, kMembers - 1);
  if (reach(index, Deadline::in(1s))) move(targets_[index], draw_ranges());
}

// Opens the member, or its successor, and learns what is in our area there.
bool SoakThread::reach(std::size_t index, Deadline deadline) {
  // Only one of them has a transport to itself.
  if (index == member_.index && index != 0) return false;
  Target& target = targets_[index];
  const std::string name = directory_.get(index);
  if (target.peer && target.peer->alive() && target.name == name) return true;
  target = {};
  auto peer = engine_.open(name, deadline);
  if (!peer.ok()) return expect_code(peer.error(), false), false;
  const auto pool = peer->region("pool", deadline);
  if (!pool.ok()) return expect_code(pool.error(), false), false;
  const std::size_t slot =
      (member_.index * kThreads + index_) * kIncarnations + member_.incarnation % kIncarnations;
  target.name = name;
  target.area = pool->address + slot * kAreaBytes;
  target.shadow.resize(kAreaBytes);
  target.peer.emplace(std::move(*peer));
  if (!fetch(target, 0, kAreaBytes, deadline)) return target = {}, false;
  std::copy_n(bytes_of(in_), kAreaBytes, target.shadow.data());
  std::fill_n(bytes_of(in_), kAreaBytes, kInPoison);
  return true;
}

// Disjoint, in the order of their addresses; small, page-sized and larger than a slice.
std::vector<SoakThread::Range> SoakThread::draw_ranges() {
  constexpr std::size_t kLongest[] = {64, 4096, 100'000};
  const std::size_t longest = kLongest[draw(0, 2)], gap = draw(0, 1) * draw(0, 2 * longest);
  const std::size_t most = draw(1, 48);
  std::vector<Range> ranges;
  std::size_t at = draw(0, kAreaBytes / 2);
  while (ranges.size() < most) {
    const std::size_t length = draw(1, longest);
    if (at + length > kAreaBytes) break;
    ranges.push_back({one_in(3) ? Op::kRead : Op::kWrite, at, length});
    at += length + gap;
  }
  if (ranges.empty()) ranges.push_back({Op::kWrite, kAreaBytes - 1, 1});
  return ranges;
}

TransferOptions SoakThread::draw_options() {
  TransferOptions options;
  options.deadline =
      one_in(8) ? Deadline::in(std::chrono::microseconds(draw(0, 3000))) : Deadline::in(2s);
  if (one_in(8)) options.checksum = true;
  if (one_in(8)) options.notification = transfer::Notification{"soak", "done"};
  if (one_in(8)) options.stall_timeout = 500ms;
  return options;
}

void SoakThread::fill_sources(const std::vector<Range>& ranges) {
  for (const Range& range : ranges)
    if (range.op == Op::kWrite) {
      fill_pattern(bytes_of(out_, range.at), range.length, random_());
      std::copy_n(bytes_of(out_, range.at), range.length, sent_.data() + range.at);
    }
}

std::vector<Request> SoakThread::requests_of(const Target& target,
                                             const std::vector<Range>& ranges) const {
  std::vector<Request> requests;
  for (const auto& [op, at, length] : ranges)
    requests.push_back({op, bytes_of(op == Op::kWrite ? out_ : in_, at), target.area + at, length});
  return requests;
}

void SoakThread::move(Target& target, const std::vector<Range>& ranges) {
  ++transfers_;
  fill_sources(ranges);
  auto transfer = engine_.submit(*target.peer, requests_of(target, ranges), draw_options());
  if (!transfer.ok()) {  // nothing moved
    expect_code(transfer.error(), false);
    for (const Range& range : ranges)
      if (range.op == Op::kWrite) std::fill_n(bytes_of(out_, range.at), range.length, kOutPoison);
    return;
  }
  const bool cancel = one_in(4);
  if (cancel) {
    const auto until = Deadline::in(std::chrono::microseconds(draw(0, 400)));
    while (!until.passed() && !transfer::is_terminal(transfer->status().state))
      std::this_thread::yield();
    transfer->cancel();
  }
  const Result<> result = transfer->wait(Deadline::in(30s));
  if (!transfer::is_terminal(transfer->status().state))
    return fail("it did not end in 30 s: " + result.error().describe());
  if (!result.ok()) expect_code(result.error(), cancel);
  judge(target, ranges, result);
}

// Each byte is that of the area, or of `other`.
void SoakThread::expect_mixture(const Target& target, const Range& range, const std::byte* got,
                                const std::vector<std::byte>& other, const char* what) {
  for (std::size_t i = 0; i < range.length; ++i) {
    const std::byte there = target.shadow[range.at + i];
    if (got[i] == there || (!other.empty() && got[i] == other[range.at + i])) continue;
    return fail(fmt::format("{}: byte {} of {} at offset {} with {} is {:#x}, not {:#x}{}", what, i,
                            range.length, range.at, target.peer->transport(),
                            static_cast<unsigned>(got[i]), static_cast<unsigned>(there),
                            other.empty() ? "" : " nor the other"));
  }
}

void SoakThread::judge(Target& target, const std::vector<Range>& ranges, const Result<>& result) {
  static const std::vector<std::byte> untouched(kAreaBytes, kInPoison);
  for (const Range& range : ranges) {
    if (range.op == Op::kWrite) {
      std::fill_n(bytes_of(out_, range.at), range.length, kOutPoison);
      if (result.ok()) std::copy_n(sent_.data() + range.at, range.length, &target.shadow[range.at]);
      continue;
    }
    expect_mixture(target, range, bytes_of(in_, range.at),
                   result.ok() ? std::vector<std::byte>{} : untouched, "read");
    std::fill_n(bytes_of(in_, range.at), range.length, kInPoison);
  }
  if (!result.ok() || one_in(4)) read_back(target, ranges);
  if (!std::equal(untouched.begin(), untouched.end(), bytes_of(in_)))
    fail("memory that nothing reads into has changed");
}

// What the writes left there; of a peer that does not answer it is not known any more.
void SoakThread::read_back(Target& target, const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    if (range.op != Op::kWrite || !fault_.empty()) continue;
    if (!fetch(target, range.at, range.length, Deadline::in(5s))) {
      target = {};
      return;
    }
    const std::byte* got = bytes_of(in_, range.at);
    expect_mixture(target, range, got, sent_, "written");
    std::copy_n(got, range.length, &target.shadow[range.at]);
    std::fill_n(bytes_of(in_, range.at), range.length, kInPoison);
  }
}

// Into `in_`, tried until the peer is lost or the deadline passes.
bool SoakThread::fetch(Target& target, std::size_t at, std::size_t length, Deadline deadline) {
  const Request request{Op::kRead, bytes_of(in_, at), target.area + at, length};
  while (!deadline.passed() && target.peer->alive()) {
    const auto result =
        engine_.transfer(*target.peer, std::span(&request, 1), {.deadline = deadline});
    if (result.ok()) return true;
    expect_code(result.error(), false);
    std::this_thread::yield();
  }
  std::fill_n(bytes_of(in_, at), length, kInPoison);
  return false;
}

void SoakThread::settle() {
  const auto deadline = Deadline::in(30s);
  const Range whole{Op::kRead, 0, kAreaBytes};
  for (std::size_t index = 0; index < kMembers && fault_.empty(); ++index) {
    if (index == member_.index && index != 0) continue;
    while (!reach(index, deadline) && !deadline.passed() && fault_.empty())
      std::this_thread::yield();
    Target& target = targets_[index];
    if (!target.peer) return fail(fmt::format("member {} is not reached again", index));
    if (!fetch(target, 0, kAreaBytes, deadline))
      return fail(fmt::format("member {} does not give its area", index));
    expect_mixture(target, whole, bytes_of(in_), {}, "at rest");
    std::fill_n(bytes_of(in_), kAreaBytes, kInPoison);
  }
}

void SoakThread::let_go() {
  for (Target& target : targets_)
    target = {};
}

Result<> SoakThread::release() {
  CROSSDOCK_CHECK_OK(out_.release(soon()));
  return in_.release(soon());
}

}  // namespace crossdock::testing::soak
