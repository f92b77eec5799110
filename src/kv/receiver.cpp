// KvReceiver: the public handle on ReceiverCore.
// SPDX-License-Identifier: Apache-2.0
#include <crossdock/kv/receiver.hpp>

#include "kv/receiver_core.hpp"

namespace crossdock::kv {
inline namespace v1 {

Result<KvReceiver> KvReceiver::create(transfer::Engine& engine, PagePool pool,
                                      ReceiverOptions options) {
  std::shared_ptr<detail::ReceiverCore> core(
      new detail::ReceiverCore(engine, std::move(pool), std::move(options)),
      base::DeleteUnlessForked{});
  if (auto started = core->start(core); !started.ok()) {
    core->shutdown();
    return std::move(started).error();
  }
  return KvReceiver(std::move(core));
}

KvReceiver::KvReceiver(std::shared_ptr<detail::ReceiverCore> core) : core_(std::move(core)) {}
KvReceiver::KvReceiver(KvReceiver&&) noexcept = default;
KvReceiver& KvReceiver::operator=(KvReceiver&& other) noexcept {
  if (this == &other) return *this;
  if (core_ != nullptr) core_->shutdown();
  core_ = std::move(other.core_);
  return *this;
}
KvReceiver::~KvReceiver() {
  if (core_ != nullptr) core_->shutdown();
}

Result<> KvReceiver::expect(const Expectation& expectation) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->expect(expectation);
}
Result<> KvReceiver::wait(RequestId request, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->wait(request, std::nullopt, deadline);
}
Result<> KvReceiver::wait(RequestId request, std::uint32_t layer, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->wait(request, layer, deadline);
}
void KvReceiver::abort(RequestId request, std::string reason) {
  if (!core_->forked()) core_->abort(request, std::move(reason));
}
ReceiverStats KvReceiver::stats() const {
  return core_->forked() ? ReceiverStats{} : core_->stats();
}
Result<> KvReceiver::close(Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->close(deadline);
}

}  // namespace v1
}  // namespace crossdock::kv
