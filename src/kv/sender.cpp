// KvSender: the public handle on SenderCore.
// SPDX-License-Identifier: Apache-2.0
#include <crossdock/kv/sender.hpp>

#include "kv/sender_core.hpp"

namespace crossdock::kv {
inline namespace v1 {

Result<KvSender> KvSender::create(transfer::Engine& engine, PagePool pool, SenderOptions options) {
  std::shared_ptr<detail::SenderCore> core(
      new detail::SenderCore(engine, std::move(pool), std::move(options)),
      base::DeleteUnlessForked{});
  if (auto started = core->start(); !started.ok()) {
    core->shutdown();
    return std::move(started).error();
  }
  return KvSender(std::move(core));
}

KvSender::KvSender(std::shared_ptr<detail::SenderCore> core) : core_(std::move(core)) {}
KvSender::KvSender(KvSender&&) noexcept = default;
KvSender& KvSender::operator=(KvSender&& other) noexcept {
  if (this == &other) return *this;
  if (core_ != nullptr) core_->shutdown();
  core_ = std::move(other.core_);
  return *this;
}
KvSender::~KvSender() {
  if (core_ != nullptr) core_->shutdown();
}

Result<> KvSender::push(RequestId request, std::uint32_t layer) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->push(request, layer, std::nullopt);
}
Result<> KvSender::push(RequestId request, std::uint32_t layer, std::uint32_t first_page,
                        std::uint32_t num_pages) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->push(request, layer, std::pair{first_page, num_pages});
}
Result<> KvSender::finish(RequestId request) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->finish(request);
}
Result<> KvSender::wait(RequestId request, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->wait(request, deadline);
}
void KvSender::abort(RequestId request, std::string reason) {
  if (!core_->forked()) core_->abort(request, std::move(reason));
}
SenderStats KvSender::stats() const {
  return core_->forked() ? SenderStats{} : core_->stats();
}
Result<> KvSender::close(Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  return core_->close(deadline);
}

}  // namespace v1
}  // namespace crossdock::kv
