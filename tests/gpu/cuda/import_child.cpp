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

Result<void> fail(const char* step) {
  return make_error(Code::kInternal, std::string("child: ") + step);
}

Result<void> import_and_answer(const std::string& socket_name) {
  const auto deadline = Deadline::in(60s);
  CROSSDOCK_TRY(socket, cuda::connect_local(socket_name, deadline));
  CROSSDOCK_TRY(message, cuda::receive_fds(socket.get(), deadline));
  std::size_t bytes = 0;
  if (message.fds.size() != 1 || message.payload.size() != sizeof bytes)
    return fail("unexpected message");
  std::memcpy(&bytes, message.payload.data(), sizeof bytes);
  CROSSDOCK_TRY(driver, load_gpu_driver());
  CROSSDOCK_TRY(count, cuda::device_count(*driver));
  // The last GPU: with several GPUs the memory is reached over NVLink.
  CROSSDOCK_TRY(context, cuda::Context::primary(*driver, count - 1));
  CROSSDOCK_TRY(allocation, cuda::Allocation::import_fd(context, message.fds[0].get(), bytes));
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

int import_child(const std::string& socket_name) {
  const auto result = import_and_answer(socket_name);
  if (result.ok()) return 0;
  std::fprintf(stderr, "%s\n", result.error().describe().c_str());
  return 1;
}

}  // namespace crossdock::testing
