// See peer_helper.hpp. A command is a word and its arguments, separated by spaces; binary strings
// go as hexadecimal.
// SPDX-License-Identifier: Apache-2.0
#include "support/peer_helper.hpp"

#include <algorithm>
#include <csignal>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <iostream>
#include <list>
#include <map>
#include <sstream>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "mem/shared_memory.hpp"
#include "support/transport_fixture.hpp"
#include "transport/shm/transport.hpp"

namespace crossdock::testing {
namespace {

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "x";  // so that an empty string is a word too
  for (const char c : bytes) {
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

std::string from_hex(std::string_view text) {
  std::string bytes;
  for (std::size_t i = 1; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16));
  return bytes;
}

std::ostream& operator<<(std::ostream& out, const transport::HostIdentity& host) {
  return out << host.boot_id << ' ' << host.pid_namespace << ' ' << host.pid << ' '
             << host.start_time;
}
std::istream& operator>>(std::istream& in, transport::HostIdentity& host) {
  return in >> host.boot_id >> host.pid_namespace >> host.pid >> host.start_time;
}

transport::PeerInfo owner_info() {
  transport::PeerInfo owner;
  owner.name = "owner";
  owner.instance = 1;
  return owner;
}

// What the helper process holds.
struct Helper {
  mem::RegionTable regions;
  transport::TransportContext context;
  std::unique_ptr<Transport> transport;
  std::list<mem::SharedMemory> shared;
  std::map<std::uint64_t, int> memfds;  // by address

  std::string make_region(std::istream& in);
  void write_forever(std::istream& in);
};

std::string Helper::make_region(std::istream& in) {
  std::size_t length = 0;
  bool is_shared = false;
  in >> length >> is_shared;
  mem::NewRegion range{.address = nullptr, .length = length};
  if (is_shared) {
    mem::SharedMemory& memory = shared.emplace_back(mem::SharedMemory::create(length).value());
    range.address = memory.data();
    range.backing.memfd = memory.fd();
  } else {
    range.address =
        ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  const auto record = regions.add(std::span(&range, 1), {}).value()[0];
  memfds[record->address] = range.backing.memfd;
  std::ostringstream out;
  out << record->id << ' ' << record->address << ' ' << to_hex(transport->export_region(*record));
  return out.str();
}

void Helper::write_forever(std::istream& in) {
  transport::PeerInfo owner = owner_info();
  std::string address;
  std::string key;
  transport::RemoteRegion region;
  in >> owner.host >> address >> region.address >> region.length >> key;
  owner.address = from_hex(address);
  region.id = 1;
  region.keys = {{"shm", from_hex(key)}};
  const auto endpoint = transport->connect(owner, 0, Deadline::in(std::chrono::seconds(5))).value();
  region.attached[0] = endpoint->attach(region).value();
  std::vector<std::byte> local(region.length, std::byte{0x5A});
  for (;;) {
    TestSink sink;
    TestShard shard(Op::kWrite, sink);
    shard.add(local.data(), region.address, local.size(), region);
    if (!endpoint->post(shard.ready()).ok() || !sink.wait(shard.shard)) return;
  }
}

std::string reach_as_nobody(std::istream& in, const transport::TransportContext& context) {
  transport::PeerInfo owner = owner_info();
  std::string address;
  in >> owner.host >> address;
  owner.address = from_hex(address);
  if (::setresgid(65534, 65534, 65534) != 0 || ::setresuid(65534, 65534, 65534) != 0)
    return "cannot become nobody";
  const auto transport = transport::make_shm(context, {}).value();
  const auto reached = transport->reaches(owner);
  return reached.ok() ? "reached" : reached.error().describe();
}

std::string serve(Helper& helper, const std::string& line) {
  std::istringstream in(line);
  std::string word;
  in >> word;
  if (word == "region") return helper.make_region(in);
  if (word == "write-forever") return helper.write_forever(in), "ended";
  if (word == "reach-as-nobody") return reach_as_nobody(in, helper.context);
  std::uint64_t address = 0;
  std::size_t length = 0;
  std::uint64_t seed = 0;
  in >> address >> length >> seed;
  auto* const data = reinterpret_cast<std::byte*>(address);
  if (word == "fill") fill_pattern({data, length}, seed);
  if (word == "matches") return matches_pattern({data, length}, seed) ? "yes" : "no";
  if (word == "unmap-half") ::munmap(data + length / 2, length / 2);
  if (word == "close-memfd") {
    const base::UniqueFd other(::open("/dev/null", O_RDWR | O_CLOEXEC));
    ::dup2(other.get(), helper.memfds[address]);
  }
  return "done";
}

}  // namespace

int peer_helper_main() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Helper helper;
  helper.context.host = own_identity();
  helper.context.instance = 2;
  helper.context.regions = &helper.regions;
  helper.transport = transport::make_shm(helper.context, {}).value();
  std::cout << helper.context.host << ' ' << to_hex(helper.transport->local_address()) << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << serve(helper, line) << std::endl;
  return 0;
}

PeerProcessHelper::PeerProcessHelper() {
  int to[2];
  int from[2];
  if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0) std::abort();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(to[0], 0);
    ::dup2(from[1], 1);
    ::execl("/proc/self/exe", "peer", "--peer-helper", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  to_.reset(to[1]);
  from_.reset(from[0]);
  info_.name = "peer";
  info_.instance = static_cast<std::uint64_t>(pid_) << 8;
  std::istringstream in(ask(""));
  std::string address;
  in >> info_.host >> address;
  info_.address = from_hex(address);
  EXPECT_EQ(info_.host.pid, static_cast<std::uint32_t>(pid_));
}

PeerProcessHelper::~PeerProcessHelper() {
  kill();
}

// An empty line asks nothing and only waits for an answer.
std::string PeerProcessHelper::ask(const std::string& line) {
  if (!line.empty()) {
    const std::string whole = line + "\n";
    EXPECT_EQ(::write(to_.get(), whole.data(), whole.size()), static_cast<ssize_t>(whole.size()));
  }
  std::string answer;
  char c = 0;
  while (::read(from_.get(), &c, 1) == 1 && c != '\n')
    answer += c;
  return answer;
}

std::unique_ptr<transport::RemoteRegion> PeerProcessHelper::make_region(std::size_t length,
                                                                        bool shared) {
  std::istringstream in(ask("region " + std::to_string(length) + (shared ? " 1" : " 0")));
  auto region = std::make_unique<transport::RemoteRegion>();
  std::string key;
  in >> region->id >> region->address >> key;
  region->length = length;
  region->keys = {{"shm", from_hex(key)}};
  EXPECT_EQ(region->keys[0].second.empty(), !shared);
  return region;
}

namespace {
std::string on_region(std::string_view word, const transport::RemoteRegion& region,
                      std::uint64_t seed = 0) {
  std::ostringstream out;
  out << word << ' ' << region.address << ' ' << region.length << ' ' << seed;
  return out.str();
}
}  // namespace

void PeerProcessHelper::fill_region(const transport::RemoteRegion& region, std::uint64_t seed) {
  EXPECT_EQ(ask(on_region("fill", region, seed)), "done");
}
bool PeerProcessHelper::region_matches(const transport::RemoteRegion& region, std::uint64_t seed) {
  return ask(on_region("matches", region, seed)) == "yes";
}
void PeerProcessHelper::unmap_second_half(const transport::RemoteRegion& region) {
  EXPECT_EQ(ask(on_region("unmap-half", region)), "done");
}
void PeerProcessHelper::close_memfd(const transport::RemoteRegion& region) {
  EXPECT_EQ(ask(on_region("close-memfd", region)), "done");
}

void PeerProcessHelper::write_forever(const transport::HostIdentity& owner,
                                      const std::string& address, const mem::RegionRecord& region,
                                      const std::string& key) {
  std::ostringstream line;
  line << "write-forever " << owner << ' ' << to_hex(address) << ' ' << region.address << ' '
       << region.length << ' ' << to_hex(key) << '\n';
  EXPECT_EQ(::write(to_.get(), line.str().data(), line.str().size()),
            static_cast<ssize_t>(line.str().size()));
}

std::string PeerProcessHelper::reach_as_nobody(const transport::HostIdentity& owner,
                                               const std::string& address) {
  std::ostringstream line;
  line << "reach-as-nobody " << owner << ' ' << to_hex(address);
  return ask(line.str());
}

void PeerProcessHelper::kill() {
  if (std::exchange(reaped_, true)) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}
void PeerProcessHelper::stop() {
  ::kill(pid_, SIGSTOP);
}
void PeerProcessHelper::wait_until_stopped() {
  int status = 0;
  EXPECT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
  EXPECT_TRUE(WIFSTOPPED(status));
}
void PeerProcessHelper::resume() {
  ::kill(pid_, SIGCONT);
}

}  // namespace crossdock::testing
