// One request from a prefill to a decode engine, layer by layer. Both live in this process to keep
// the example short; in a server each is a process of its own and knows the other by its name.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstring>

#include <crossdock/kv/receiver.hpp>
#include <crossdock/kv/sender.hpp>

using namespace crossdock;
using namespace std::chrono_literals;

static Result<> hand_over() {
  CROSSDOCK_TRY(shape, kv::parse_model_shape("layers=4,heads=8,dim=128"));
  CROSSDOCK_TRY(layout, kv::PageLayout::create(shape, {.num_pages = 64}));

  CROSSDOCK_TRY(prefill, transfer::Engine::create());
  CROSSDOCK_TRY(prefill_pool, kv::PagePool::create(prefill, layout));
  CROSSDOCK_TRY(sender, kv::KvSender::create(prefill, prefill_pool));
  CROSSDOCK_TRY(decode, transfer::Engine::create());
  CROSSDOCK_TRY(decode_pool, kv::PagePool::create(decode, layout));
  CROSSDOCK_TRY(receiver, kv::KvReceiver::create(decode, decode_pool));

  const kv::RequestId request = 1;
  CROSSDOCK_TRY(to, decode_pool.admit({.request = request, .num_pages = 32}));
  CROSSDOCK_CHECK_OK(receiver.expect(
      {.request = request, .senders = {prefill.name()}, .deadline = Deadline::in(10s)}));

  CROSSDOCK_TRY(from, prefill_pool.admit({.request = request, .num_pages = 32}));
  for (std::uint32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (const kv::PageId page : from.pages)  // "compute": K and V of a page lie side by side
      std::memset(prefill_pool.base() + layout.cell_offset(layer, page, 0),
                  static_cast<int>(layer + 1), 2 * layout.cell_bytes());
    CROSSDOCK_CHECK_OK(sender.push(request, layer));
  }
  CROSSDOCK_CHECK_OK(sender.finish(request));

  CROSSDOCK_CHECK_OK(receiver.wait(request, Deadline::in(10s)));
  for (std::uint32_t layer = 0; layer < shape.num_layers; ++layer)
    std::printf(
        "layer %u is at decode: its first byte is %d\n", layer,
        std::to_integer<int>(decode_pool.base()[layout.cell_offset(layer, to.pages.front(), 0)]));
  CROSSDOCK_CHECK_OK(decode_pool.release(request));
  return prefill_pool.release(request);
}

int main() {
  const auto result = hand_over();
  if (result.ok()) return 0;
  std::fprintf(stderr, "%s\n", result.error().describe().c_str());
  return 1;
}
