// Shareable allocations, reserved ranges, mappings, exports to another process, on the fake; and
// descriptor passing itself.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/vmm.hpp"

#include <array>
#include <cstring>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "cuda/fd_passing.hpp"
#include "support/fake_cuda/fixture.hpp"

namespace crossdock::cuda {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Vmm = crossdock::testing::FakeCudaTest;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::array<int, 2> kTwoGpus = {0, 1};

template <class T>
T* at(DevicePtr address) {
  return reinterpret_cast<T*>(address);
}

TEST_F(Vmm, MapsAtOffsetsAndUnmapsAtTheEnd) {
  const Context ctx = context();
  AddressRange range = AddressRange::reserve(ctx, 8 * kMiB).value();
  {
    const Allocation a = Allocation::create(ctx, 1).value();  // rounded up
    EXPECT_EQ(a.bytes(), 2 * kMiB);
    ASSERT_TRUE(range.map(4 * kMiB, a, kTwoGpus).ok());
  }
  // The mapping keeps the memory although the handle is gone.
  *at<int>(range.address() + 4 * kMiB) = 5;
  EXPECT_EQ(*at<int>(range.address() + 4 * kMiB), 5);
  EXPECT_EQ(fake_->live().allocations, before_.allocations + 1);
  ASSERT_TRUE(range.unmap(4 * kMiB).ok());
  EXPECT_EQ(range.unmap(4 * kMiB).code(), Code::kNotFound);
  EXPECT_EQ(fake_->live().allocations, before_.allocations);
}

TEST_F(Vmm, SameMemoryAtTwoPlacesIsOneMemory) {
  const Context ctx = context();
  AddressRange range = AddressRange::reserve(ctx, 4 * kMiB).value();
  const Allocation a = Allocation::create(ctx, 2 * kMiB).value();
  const auto fd = a.export_fd().value();
  const Allocation b = Allocation::import_fd(ctx, fd.get(), a.bytes()).value();
  ASSERT_TRUE(range.map(0, a, kTwoGpus).ok());
  ASSERT_TRUE(range.map(2 * kMiB, b, kTwoGpus).ok());
  *at<int>(range.address()) = 99;
  EXPECT_EQ(*at<int>(range.address() + 2 * kMiB), 99);
}

TEST_F(Vmm, OverlapsAndOverrunsAreRefused) {
  const Context ctx = context();
  AddressRange range = AddressRange::reserve(ctx, 8 * kMiB).value();
  const Allocation a = Allocation::create(ctx, 4 * kMiB).value();
  ASSERT_TRUE(range.map(2 * kMiB, a, kTwoGpus).ok());
  EXPECT_EQ(range.map(0, a, kTwoGpus).code(), Code::kBusy);
  EXPECT_EQ(range.map(4 * kMiB, a, kTwoGpus).code(), Code::kBusy);
  EXPECT_EQ(range.map(6 * kMiB, a, kTwoGpus).code(), Code::kInvalidArgument);
  EXPECT_EQ(range.map(SIZE_MAX, a, kTwoGpus).code(), Code::kInvalidArgument);
}

TEST_F(Vmm, FailureHalfwayLeavesNothingMapped) {
  const Context ctx = context();
  AddressRange range = AddressRange::reserve(ctx, 2 * kMiB).value();
  const Allocation a = Allocation::create(ctx, 2 * kMiB).value();
  fake_->set_peer_access(1, 0, false);
  const auto result = range.map(0, a, kTwoGpus);
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("to 2 GPU(s)"));
  EXPECT_EQ(fake_->live().mappings, before_.mappings);
  fake_->set_peer_access(1, 0, true);
  EXPECT_TRUE(range.map(0, a, kTwoGpus).ok());
}

TEST_F(Vmm, OutOfMemoryAndAbsurdSizes) {
  fake_->set_device_bytes(0, 4 * kMiB);
  const Context ctx = context();
  EXPECT_EQ(Allocation::create(ctx, 8 * kMiB).code(), Code::kNoMemory);
  EXPECT_EQ(Allocation::create(ctx, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(Allocation::create(ctx, SIZE_MAX).code(), Code::kInvalidArgument);
}

TEST_F(Vmm, FabricHandlesWhereSupported) {
  EXPECT_EQ(Allocation::create(context(), kMiB, {.sharing = Sharing::kFabric}).code(),
            Code::kUnsupported);
  fake_->set_attribute(DeviceAttribute::kHandleTypeFabric, 1);
  const Context ctx = context();
  const Allocation a = Allocation::create(ctx, kMiB, {.sharing = Sharing::kFabric}).value();
  EXPECT_EQ(a.export_fd().code(), Code::kInvalidArgument);
  const FabricHandle handle = a.export_fabric().value();
  EXPECT_TRUE(Allocation::import_fabric(ctx, handle, a.bytes()).ok());
}

TEST_F(Vmm, MachineWithoutVmmIsRefusedWithASentence) {
  fake_->set_attribute(DeviceAttribute::kVirtualMemoryManagement, 0);
  const auto result = AddressRange::reserve(context(), 2 * kMiB);
  EXPECT_EQ(result.code(), Code::kUnsupported);
  EXPECT_THAT(result.error().message, HasSubstr("has no virtual memory management"));
}

TEST_F(Vmm, ImportOfANonAllocationFails) {
  const Context ctx = context();
  const base::UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(Allocation::import_fd(ctx, null.get(), kMiB).code(), Code::kInvalidArgument);
  EXPECT_EQ(Allocation::import_fd(ctx, -1, kMiB).code(), Code::kInvalidArgument);
}

// What the child of CrossesProcesses does: imports, reads, writes.
int child_imports(int socket, const char* library) {
  const auto message = receive_fds(socket, Deadline::in(10s));
  const auto driver = Driver::load({.library = library});
  if (!message.ok() || message->fds.size() != 1 || !driver.ok()) return 2;
  const auto ctx = Context::primary(**driver, 1);
  if (!ctx.ok()) return 3;
  const auto imported = Allocation::import_fd(*ctx, message->fds[0].get(), 2 * kMiB);
  auto range = AddressRange::reserve(*ctx, 2 * kMiB);
  if (!imported.ok() || !range.ok() || !range->map(0, *imported, kTwoGpus).ok()) return 4;
  if (*at<int>(range->address()) != 1234) return 5;
  *at<int>(range->address()) = 4321;
  const std::byte done{1};
  return send_fds(socket, {}, {&done, 1}, Deadline::in(10s)).ok() ? 0 : 6;
}

TEST_F(Vmm, CrossesProcesses) {
  auto sockets = local_socket_pair().value();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(child_imports(sockets.second.get(), CROSSDOCK_FAKE_CUDA));
  sockets.second.reset();
  const Context ctx = context();
  const Allocation a = Allocation::create(ctx, 2 * kMiB).value();
  AddressRange range = AddressRange::reserve(ctx, 2 * kMiB).value();
  ASSERT_TRUE(range.map(0, a, kTwoGpus).ok());
  *at<int>(range.address()) = 1234;
  const auto fd = a.export_fd().value();
  const int raw = fd.get();
  const std::byte hello{1};
  ASSERT_TRUE(send_fds(sockets.first.get(), {&raw, 1}, {&hello, 1}, Deadline::in(10s)).ok());
  const auto reply = receive_fds(sockets.first.get(), Deadline::in(10s));
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(reply.ok());
  EXPECT_EQ(*at<int>(range.address()), 4321);
}

TEST_F(Vmm, ThousandCyclesLeaveNothing) {
  const Context ctx = context();
  for (int i = 0; i < 1000; ++i) {
    const Allocation a = Allocation::create(ctx, 2 * kMiB).value();
    AddressRange range = AddressRange::reserve(ctx, 4 * kMiB).value();
    ASSERT_TRUE(range.map(2 * kMiB, a, kTwoGpus).ok());
    ASSERT_TRUE(a.export_fd().ok());
  }
  EXPECT_EQ(fake_->live().device_bytes, before_.device_bytes);
}

std::string unique_name(const char* what) {
  return std::string("crossdock-test-") + what + "-" + std::to_string(::getpid());
}

TEST(FdPassing, OverAnAbstractName) {
  const auto listener = listen_local(unique_name("name")).value();
  const auto client = connect_local(unique_name("name"), Deadline::in(5s)).value();
  const auto server = accept_local(listener.get(), Deadline::in(5s)).value();
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const base::UniqueFd read_end(pipe_ends[0]);
  const base::UniqueFd write_end(pipe_ends[1]);
  const std::array<int, 2> both = {read_end.get(), write_end.get()};
  const std::array<std::byte, 3> payload = {std::byte{1}, std::byte{2}, std::byte{3}};
  ASSERT_TRUE(send_fds(client.get(), both, payload, Deadline::in(5s)).ok());
  const auto message = receive_fds(server.get(), Deadline::in(5s)).value();
  ASSERT_EQ(message.fds.size(), 2u);
  ASSERT_EQ(message.payload.size(), 3u);
  EXPECT_EQ(message.payload[2], std::byte{3});
  EXPECT_NE(message.fds[1].get(), write_end.get());
  EXPECT_TRUE(::fcntl(message.fds[0].get(), F_GETFD) & FD_CLOEXEC);
  ASSERT_EQ(::write(message.fds[1].get(), "x", 1), 1);
  char got = 0;
  ASSERT_EQ(::read(read_end.get(), &got, 1), 1);
  EXPECT_EQ(got, 'x');
}

TEST(FdPassing, WaitsEndAtTheDeadline) {
  const auto listener = listen_local(unique_name("deadline")).value();
  EXPECT_EQ(accept_local(listener.get(), Deadline::in(10ms)).code(), Code::kDeadline);
  const auto sockets = local_socket_pair().value();
  EXPECT_EQ(receive_fds(sockets.first.get(), Deadline::in(10ms)).code(), Code::kDeadline);
  const std::vector<std::byte> payload(kMaxFdPayloadBytes);
  Result<void> sent;
  for (int i = 0; i < 1000 && sent.ok(); ++i)
    sent = send_fds(sockets.first.get(), {}, payload, Deadline::in(10ms));
  EXPECT_EQ(sent.code(), Code::kDeadline);
}

TEST(FdPassing, ClosedPeerIsLost) {
  auto sockets = local_socket_pair().value();
  sockets.second.reset();
  const std::byte one{1};
  EXPECT_EQ(receive_fds(sockets.first.get(), Deadline::in(5s)).code(), Code::kPeerLost);
  EXPECT_EQ(send_fds(sockets.first.get(), {}, {&one, 1}, Deadline::in(5s)).code(), Code::kPeerLost);
}

TEST(FdPassing, NobodyListensAndNameInUse) {
  EXPECT_EQ(connect_local(unique_name("nobody"), Deadline::in(1s)).code(), Code::kUnreachable);
  const auto first = listen_local(unique_name("twice")).value();
  EXPECT_EQ(listen_local(unique_name("twice")).code(), Code::kBusy);
}

TEST(FdPassing, LimitsAreToldBeforeTheyAreBroken) {
  const auto sockets = local_socket_pair().value();
  const std::vector<int> many(kMaxFdsPerMessage + 1, 0);
  const std::byte one{1};
  EXPECT_EQ(send_fds(sockets.first.get(), many, {&one, 1}, Deadline::in(1s)).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(send_fds(sockets.first.get(), {}, {}, Deadline::in(1s)).code(), Code::kInvalidArgument);
  EXPECT_EQ(listen_local("").code(), Code::kInvalidArgument);
  EXPECT_EQ(listen_local(std::string(101, 'x')).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace crossdock::cuda
