// A user's program: includes installed headers only and moves bytes between two engines.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstring>

#include <crossdock/core/version.hpp>
#include <crossdock/transfer/engine.hpp>

namespace {

using namespace crossdock;
using std::chrono::seconds;

Result<> move_a_page() {
  CROSSDOCK_TRY(sender, transfer::Engine::create());
  CROSSDOCK_TRY(receiver, transfer::Engine::create());
  CROSSDOCK_TRY(source, sender.allocate(65536));
  CROSSDOCK_TRY(target, receiver.allocate(65536, {.label = "page"}));
  std::memset(source.address(), 0x5a, source.length());
  CROSSDOCK_TRY(peer, sender.open(receiver.name(), Deadline::in(seconds(10))));
  CROSSDOCK_TRY(page, peer.region("page", Deadline::in(seconds(10))));
  const transfer::Request write{.op = transfer::Op::kWrite,
                                .local = source.address(),
                                .remote = page.address,
                                .length = source.length()};
  CROSSDOCK_CHECK_OK(sender.transfer(peer, {&write, 1}, {.deadline = Deadline::in(seconds(10))}));
  if (std::memcmp(source.address(), target.address(), source.length()) != 0)
    return make_error(Code::kCorrupt, "the page differs");
  CROSSDOCK_CHECK_OK(sender.close(Deadline::in(seconds(10))));
  return receiver.close(Deadline::in(seconds(10)));
}

}  // namespace

int main() {
  const auto moved = move_a_page();
  if (!moved.ok()) {
    std::printf("%s\n", moved.error().describe().c_str());
    return 1;
  }
  std::printf("crossdock %s moved a page\n", kVersion.data());
  return 0;
}
