// See transport_fixture.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/transport_fixture.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <fcntl.h>
#include <fstream>
#include <netinet/in.h>
#include <sstream>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

namespace crossdock::testing {
namespace {

constexpr std::byte kGuardByte{0xA7};

// Two connected TCP sockets: {dialling end, accepted end}.
std::pair<base::UniqueFd, base::UniqueFd> tcp_pair() {
  base::UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  auto* const generic = reinterpret_cast<sockaddr*>(&at);
  if (::bind(listener.get(), generic, size) != 0 || ::listen(listener.get(), 1) != 0) return {};
  ::getsockname(listener.get(), generic, &size);
  base::UniqueFd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(out.get(), generic, size) != 0) return {};
  base::UniqueFd in(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  ::fcntl(out.get(), F_SETFL, O_NONBLOCK);
  return {std::move(out), std::move(in)};
}

}  // namespace

transport::HostIdentity own_identity() {
  transport::HostIdentity id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id.boot_id);
  struct stat ns{};
  if (::stat("/proc/self/ns/pid", &ns) == 0) id.pid_namespace = ns.st_ino;
  id.pid = static_cast<std::uint32_t>(::getpid());
  std::ifstream stat_file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(stat_file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string field;
  for (int i = 3; i <= 22; ++i)
    fields >> field;
  id.start_time = std::stoull(field);
  return id;
}

std::byte pattern_at(std::uint64_t position, std::uint64_t seed) {
  const std::uint64_t x = (position / 8 + seed * 0x9E3779B97F4A7C15u) * 0xD1342543DE82EF95u;
  return static_cast<std::byte>((x ^ (x >> 29)) >> (8 * (position % 8)));
}

void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = pattern_at(i, seed);
}

bool matches_pattern(std::span<const std::byte> bytes, std::uint64_t seed, std::uint64_t from) {
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != pattern_at(from + i, seed)) return false;
  return true;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

TestMemory::TestMemory(std::size_t length, bool shared) : size_(length) {
  const std::size_t whole = length + 2 * kGuard;
  std::byte* base = nullptr;
  if (shared) {
    shared_ = mem::SharedMemory::create(whole).value();
    base = shared_.data();
  } else {
    private_ = std::make_unique<std::byte[]>(whole);
    base = private_.get();
  }
  data_ = base + kGuard;
  std::fill_n(base, kGuard, kGuardByte);
  std::fill_n(data_ + size_, kGuard, kGuardByte);
}

mem::Backing TestMemory::backing() const {
  if (private_) return {};
  return {.memfd = shared_.fd(), .offset = kGuard};
}

bool TestMemory::guards_intact() const {
  const auto is_guard = [](std::byte b) { return b == kGuardByte; };
  return std::all_of(data_ - kGuard, data_, is_guard) &&
         std::all_of(data_ + size_, data_ + size_ + kGuard, is_guard);
}

void TestSink::expect(const Shard& shard) {
  const std::lock_guard lock(mutex_);
  outcomes_[&shard] = {};
}

void TestSink::shard_progress(Shard& shard, std::uint64_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    Outcome& outcome = outcomes_[&shard];
    outcome.bytes += bytes;
    EXPECT_EQ(outcome.finished, 0) << "progress after the end";
    EXPECT_LE(outcome.bytes, shard.bytes);
  }
  if (on_progress) on_progress(shard);
}

void TestSink::shard_finished(Shard& shard, const Error* error) noexcept {
  if (on_finished) on_finished(shard);
  const std::lock_guard lock(mutex_);
  Outcome& outcome = outcomes_[&shard];
  EXPECT_EQ(++outcome.finished, 1) << "finished twice";
  outcome.slices_done = shard.slices_done;
  if (error != nullptr) outcome.error = *error;
  if (error == nullptr) {
    EXPECT_EQ(outcome.bytes, shard.bytes) << "progress does not sum up";
    EXPECT_EQ(shard.slices_done, shard.slices.size());
  }
  changed_.notify_all();
}

bool TestSink::wait(const Shard& shard) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(20),
                           [&] { return outcomes_[&shard].finished != 0; });
}

bool TestSink::wait_all() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(20), [&] {
    return std::all_of(outcomes_.begin(), outcomes_.end(),
                       [](const auto& entry) { return entry.second.finished != 0; });
  });
}

TestSink::Outcome TestSink::outcome(const Shard& shard) {
  const std::lock_guard lock(mutex_);
  return outcomes_[&shard];
}

void TestShard::add(std::byte* local, std::uint64_t remote, std::size_t length,
                    const transport::RemoteRegion& region, std::uint32_t slice_bytes) {
  while (length != 0) {
    const auto n = static_cast<std::uint32_t>(std::min<std::size_t>(length, slice_bytes));
    slices.push_back({.local = local, .remote = remote, .region = &region, .length = n});
    local += n, remote += n, length -= n;
  }
}

Shard& TestShard::ready() {
  shard.slices = slices;
  shard.bytes = 0;
  for (const Slice& slice : slices)
    shard.bytes += slice.length;
  sink_.expect(shard);
  return shard;
}

TestSide::TestSide(const TransportCase& c, std::uint64_t instance_id, std::string side_name)
    : name(std::move(side_name)), instance(instance_id) {
  context.regions = &regions;
  context.instance = instance;
  context.host = own_identity();
  transport = c.make(context);
}

TransportFixture::TransportFixture()
    : initiator_(std::make_unique<TestSide>(GetParam(), 0x1111, "initiator")) {
  if (!GetParam().same_engine) target_ = std::make_unique<TestSide>(GetParam(), 0x2222, "target");
}

TransportFixture::~TransportFixture() = default;

transport::PeerInfo TransportFixture::peer_info() {
  TestSide& peer = target();
  return {.name = peer.name,
          .instance = peer.instance,
          .host = own_identity(),
          .address = peer.transport->local_address(),
          .dial = [this](std::uint16_t lane, Deadline deadline) { return dial(lane, deadline); }};
}

Result<base::UniqueFd> TransportFixture::dial(std::uint16_t lane, Deadline) {
  auto [out, in] = tcp_pair();
  if (!out || !in) return errno_error(errno, "connect a TCP pair");
  transport::InboundLane inbound{.fd = std::move(in),
                                 .peer_name = initiator_->name,
                                 .session = initiator_->instance,
                                 .lane = lane};
  CROSSDOCK_CHECK_OK(target().transport->accept(std::move(inbound)));
  return std::move(out);
}

std::unique_ptr<Endpoint> TransportFixture::connect(std::uint32_t rail) {
  const auto info = peer_info();
  const auto reached = initiator_->transport->reaches(info);
  EXPECT_TRUE(reached.ok()) << (reached.ok() ? "" : reached.error().describe());
  auto endpoint = initiator_->transport->connect(info, rail, Deadline::in(std::chrono::seconds(5)));
  EXPECT_TRUE(endpoint.ok()) << (endpoint.ok() ? "" : endpoint.error().describe());
  return endpoint.ok() ? std::move(*endpoint) : nullptr;
}

transport::RemoteRegion& TransportFixture::expose(const TestMemory& memory, Endpoint& endpoint,
                                                  transfer::Access access) {
  TestSide& peer = target();
  const mem::NewRegion range{memory.data(), memory.size(), memory.backing()};
  const auto record =
      peer.regions.add(std::span(&range, 1), {.access = access, .label = {}}).value()[0];
  auto remote = std::make_unique<transport::RemoteRegion>();
  remote->id = record->id;
  remote->address = record->address;
  remote->length = record->length;
  remote->access = record->access;
  // Keys go by the bare name: the fault injector adds nothing to them.
  const std::string_view kind = peer.transport->name();
  remote->keys = {
      {std::string(kind.substr(kind.rfind('+') + 1)), peer.transport->export_region(*record)}};
  const auto attached = endpoint.attach(*remote);
  EXPECT_TRUE(attached.ok()) << (attached.ok() ? "" : attached.error().describe());
  if (attached.ok()) remote->attached[initiator_->context.slot] = *attached;
  return *remotes_.emplace_back(std::move(remote));
}

transport::RemoteRegion& TransportFixture::reexpose(Endpoint& endpoint) {
  transport::RemoteRegion& remote = *remotes_.back();
  const auto attached = endpoint.attach(remote);
  EXPECT_TRUE(attached.ok()) << (attached.ok() ? "" : attached.error().describe());
  if (attached.ok()) remote.attached[initiator_->context.slot] = *attached;
  return remote;
}

Result<> post_patiently(Endpoint& endpoint, Shard& shard) {
  const Deadline end = Deadline::in(std::chrono::seconds(20));
  for (;;) {
    auto posted = endpoint.post(shard);
    if (posted.code() != Code::kWouldBlock || end.passed()) return posted;
    std::this_thread::yield();
  }
}

}  // namespace crossdock::testing
