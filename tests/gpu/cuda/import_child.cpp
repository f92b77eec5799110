// See import_child.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/import_child.hpp"

#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/fd_passing.hpp"
#include "cuda/memory.hpp"
#include "cuda/vmm.hpp"
#include "gpu/gpu_fixture.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;

Error fail(const char* step) {
  return make_error(Code::kInternal, std::string("child: ") + step);
}

Result<cuda::Allocation> import_from(const cuda::Context& context, const cuda::FdMessage& message) {
  std::size_t bytes = 0;
  const std::size_t left = message.payload.size() - sizeof bytes;
  std::memcpy(&bytes, message.payload.data(), sizeof bytes);
  if (message.fds.size() == 1 && left == 0)
    return cuda::Allocation::import_fd(context, message.fds[0].get(), bytes);
  cuda::FabricHandle fabric{};
  if (!message.fds.empty() || left != sizeof fabric) return fail("unexpected message");
  std::memcpy(&fabric, message.payload.data() + sizeof bytes, sizeof fabric);
  return cuda::Allocation::import_fabric(context, fabric, bytes);
}

Result<void> import_and_answer(const std::string& socket_name) {
  const auto deadline = Deadline::in(60s);
  CROSSDOCK_TRY(socket, cuda::connect_local(socket_name, deadline));
  CROSSDOCK_TRY(message, cuda::receive_fds(socket.get(), deadline));
  if (message.payload.size() < sizeof(std::size_t)) return fail("unexpected message");
  CROSSDOCK_TRY(driver, load_gpu_driver());
  CROSSDOCK_TRY(count, cuda::device_count(*driver));
  // The last GPU: with several GPUs the memory is reached over NVLink.
  CROSSDOCK_TRY(context, cuda::Context::primary(*driver, count - 1));
  CROSSDOCK_TRY(allocation, import_from(context, message));
  const std::size_t bytes = allocation.bytes();
  CROSSDOCK_TRY(range, cuda::AddressRange::reserve(context, bytes));
  const int device = context.ordinal();
  CROSSDOCK_CHECK_OK(range.map(0, allocation, {&device, 1}));
  CROSSDOCK_TRY(stream, cuda::Stream::create(context));
  std::vector<std::uint32_t> host(bytes / 4);
  CROSSDOCK_CHECK_OK(
      cuda::copy_async(cuda::device_ptr(host.data()), range.address(), bytes, stream));
  CROSSDOCK_CHECK_OK(stream.synchronize(deadline));
  for (const auto word : host)
    if (word != 0x11111111) return fail("the parent's pattern did not arrive");
  CROSSDOCK_CHECK_OK(cuda::fill_words_async(range.address(), 0x22222222, bytes / 4, stream));
  CROSSDOCK_CHECK_OK(stream.synchronize(deadline));
  std::printf("child: imported %zu bytes on GPU %d, read and wrote them\n", bytes, device);
  const std::byte done{1};
  return cuda::send_fds(socket.get(), {}, {&done, 1}, deadline);
}

}  // namespace

std::vector<std::byte> import_payload(std::size_t bytes, const cuda::FabricHandle* fabric) {
  std::vector<std::byte> payload(sizeof bytes + (fabric == nullptr ? 0 : sizeof *fabric));
  std::memcpy(payload.data(), &bytes, sizeof bytes);
  if (fabric != nullptr) std::memcpy(payload.data() + sizeof bytes, fabric, sizeof *fabric);
  return payload;
}

int import_child(const std::string& socket_name) {
  const auto result = import_and_answer(socket_name);
  if (result.ok()) return 0;
  std::fprintf(stderr, "%s\n", result.error().describe().c_str());
  return 1;
}

}  // namespace crossdock::testing
