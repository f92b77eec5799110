// The public handles: thin doors to the cores behind them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include <crossdock/transfer/engine.hpp>

#include "transfer/call_errors.hpp"
#include "transfer/engine_core.hpp"

namespace crossdock::transfer {
inline namespace v1 {

// --- Region ---

void* Region::address() const noexcept {
  return reinterpret_cast<void*>(core_->record->address);
}

std::size_t Region::length() const noexcept {
  return core_->record->length;
}

Result<> Region::release(Deadline deadline) {
  if (core_->released.load()) return {};
  CROSSDOCK_CHECK_OK(core_->engine->usable());
  CROSSDOCK_CHECK_OK(core_->engine->may_wait("Region::release()"));
  CROSSDOCK_CHECK_OK(core_->engine->release(*core_->record, deadline));
  core_->released.store(true);
  return {};
}

// --- Transfer ---

std::uint64_t Transfer::id() const noexcept {
  return core_->id;
}

Status Transfer::status() const {
  if (core_->engine->forked()) return {};
  return core_->status();
}

Result<> Transfer::wait(Deadline deadline) {
  if (core_->engine->forked()) return detail::forked_error();
  if (!core_->terminal() && !deadline.passed())
    CROSSDOCK_CHECK_OK(core_->engine->may_wait("Transfer::wait()"));
  return core_->wait(deadline);
}

void Transfer::cancel() {
  if (core_->engine->forked()) return;
  // A closing engine stops it anyway, and takes its rails apart.
  const base::Gate::Pass pass(core_->engine->gate());
  if (!pass) return;
  core_->request_stop(Error{.code = Code::kCancelled,
                            .scope = Scope::kTransfer,
                            .message = fmt::format("transfer {} was cancelled", core_->id)});
}

// --- Peer ---

const std::string& Peer::name() const noexcept {
  return core_->name();
}

std::uint64_t Peer::instance() const noexcept {
  return core_->instance();
}

bool Peer::alive() const noexcept {
  return core_->alive();
}

std::string Peer::transport() const {
  return core_->forked() ? std::string() : core_->transport_name();
}

namespace {

RemoteRegion public_region(const transport::RemoteRegion& region) {
  return {region.address, region.length, region.access, region.label};
}

}  // namespace

std::vector<RemoteRegion> Peer::regions() const {
  std::vector<RemoteRegion> regions;
  if (core_->forked()) return regions;
  const auto known = core_->regions().snapshot();
  for (const auto& region : *known)
    regions.push_back(public_region(*region));
  return regions;
}

Result<RemoteRegion> Peer::region(std::string_view label, Deadline deadline) const {
  if (core_->forked()) return detail::forked_error();
  const auto gone = [&] { return !core_->alive(); };
  auto found = core_->regions().wait_for(label, Deadline::now(), gone);
  if (!found && !gone() && !deadline.passed()) {
    CROSSDOCK_CHECK_OK(core_->engine().may_wait("Peer::region()"));
    found = core_->regions().wait_for(label, deadline, gone);
  }
  if (found) return public_region(*found);
  if (!core_->alive()) return core_->lost_error();
  return make_error(Code::kDeadline,
                    fmt::format("peer '{}' has announced no region '{}'", core_->name(), label));
}

// --- Mailbox ---

Result<Message> Mailbox::receive(Deadline deadline) {
  return core_->receive(deadline);
}

std::optional<Message> Mailbox::try_receive() {
  return core_->try_receive();
}

Result<Subscription> Mailbox::on_message(std::function<void(Message)> fn) {
  if (!fn) return invalid_argument("Mailbox::on_message needs a function; null was passed");
  CROSSDOCK_TRY(token, core_->set_handler(std::move(fn)));
  return Subscription(core_, token);
}

// --- Subscription ---

Subscription& Subscription::operator=(Subscription&& other) noexcept {
  if (this == &other) return *this;
  end();
  core_ = std::move(other.core_);
  token_ = other.token_;
  return *this;
}

void Subscription::end() noexcept {
  if (const auto core = std::move(core_)) core->clear_handler(token_);
}

// --- Engine ---

Result<Engine> Engine::create(EngineOptions options) {
  CROSSDOCK_TRY(core, detail::EngineCore::create(std::move(options)));
  return Engine(std::move(core));
}

Engine& Engine::operator=(Engine&& other) noexcept {
  if (this != &other) {
    if (core_) (void)core_->shutdown(Deadline::now());
    core_ = std::move(other.core_);
  }
  return *this;
}

Engine::~Engine() {
  if (core_) (void)core_->shutdown(Deadline::now());
}

const std::string& Engine::name() const noexcept {
  return core_->identity().name;
}

const std::string& Engine::address() const noexcept {
  return core_->address();
}

std::uint64_t Engine::instance() const noexcept {
  return core_->identity().instance;
}

Result<Region> Engine::register_memory(void* address, std::size_t length, RegionOptions options) {
  const MemoryRange range{address, length};
  CROSSDOCK_TRY(regions, register_memory(std::span(&range, 1), std::move(options)));
  return std::move(regions.front());
}

Result<std::vector<Region>> Engine::register_memory(std::span<const MemoryRange> ranges,
                                                    RegionOptions options) {
  std::vector<mem::NewRegion> fresh;
  fresh.reserve(ranges.size());
  for (const auto& range : ranges)
    fresh.push_back({range.address, range.length});
  CROSSDOCK_TRY(cores, core_->add_regions(fresh, options));
  std::vector<Region> regions;
  regions.reserve(cores.size());
  for (auto& core : cores)
    regions.push_back(Region(std::move(core)));
  return regions;
}

Result<Region> Engine::allocate(std::size_t length, RegionOptions options) {
  CROSSDOCK_CHECK_OK(core_->usable());
  CROSSDOCK_TRY(shared, core_->maps_memory());
  CROSSDOCK_TRY(memory,
                mem::SharedMemory::create(length, {.name = "crossdock-region", .shared = shared}));
  const mem::NewRegion fresh{memory.data(), length, {.memfd = memory.fd(), .offset = 0}};
  CROSSDOCK_TRY(cores, core_->add_regions(std::span(&fresh, 1), options));
  cores.front()->memory = std::move(memory);
  return Region(std::move(cores.front()));
}

Result<Peer> Engine::open(std::string_view name, Deadline deadline) {
  CROSSDOCK_TRY(peer, core_->open(name, deadline));
  return Peer(std::move(peer));
}

Result<Transfer> Engine::submit(const Peer& peer, std::span<const Request> batch,
                                TransferOptions options) {
  CROSSDOCK_TRY(transfer, core_->submit(peer.core_, batch, std::move(options)));
  return Transfer(std::move(transfer));
}

Result<> Engine::transfer(const Peer& peer, std::span<const Request> batch,
                          TransferOptions options) {
  CROSSDOCK_CHECK_OK(core_->may_wait("Engine::transfer() or notify()"));
  CROSSDOCK_TRY(transfer, core_->submit(peer.core_, batch, std::move(options)));
  // The transfer ends by its own deadline; what is added is the time it takes to quiesce.
  auto ended = transfer->wait(core_->quiesced_by(transfer->deadline));
  if (ended.ok() || transfer->terminal()) return ended;
  Error error = std::move(ended).error();
  error.message += "; it uses its buffers until Engine::pending() lists it no more";
  return error;
}

Result<> Engine::notify(const Peer& peer, Notification notification, Deadline deadline) {
  return transfer(peer, {}, {.deadline = deadline, .notification = std::move(notification)});
}

Result<Mailbox> Engine::mailbox(std::string_view name) {
  CROSSDOCK_CHECK_OK(core_->usable());
  if (name.empty() || name.size() > 64)
    return invalid_argument(
        fmt::format("a mailbox name has 1 to 64 bytes; this one has {}", name.size()));
  return Mailbox(core_->mailboxes().get(std::string(name)));
}

Result<Subscription> Engine::watch_peers(std::function<void(Message)> fn) {
  CROSSDOCK_CHECK_OK(core_->usable());
  if (!fn) return invalid_argument("Engine::watch_peers needs a function; null was passed");
  auto watcher = core_->mailboxes().watch();
  CROSSDOCK_TRY(token, watcher->set_handler(std::move(fn)));
  return Subscription(std::move(watcher), token);
}

Result<> Engine::fence(const Peer& peer, Deadline deadline) {
  return fence_instance(peer.instance(), deadline);
}

Result<> Engine::fence_instance(std::uint64_t instance, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  CROSSDOCK_CHECK_OK(core_->may_wait("Engine::fence()"));
  return core_->sessions().fence_instance(instance, deadline);
}

Result<> Engine::fence(std::string_view engine_name, Deadline deadline) {
  CROSSDOCK_CHECK_OK(core_->usable());
  CROSSDOCK_CHECK_OK(core_->may_wait("Engine::fence()"));
  return core_->sessions().fence_name(std::string(engine_name), deadline);
}

bool Engine::opened_by(std::uint64_t instance) const {
  bool known = false;
  const bool ran = core_->usable().ok() &&
                   core_->loop().run([&] { known = core_->sessions().knows_instance(instance); });
  return ran ? known : !core_->let_go();
}

std::vector<PendingTransfer> Engine::pending() const {
  std::vector<PendingTransfer> pending;
  if (core_->forked()) return pending;
  for (const auto& transfer : core_->transfers().all())
    pending.push_back({transfer->id, transfer->peer->name(), transfer->first_op, transfer->status(),
                       transfer->deadline, transfer->options.user_data});
  return pending;
}

std::string Engine::metrics() const {
  return core_->forked() ? std::string() : core_->metrics().prometheus();
}

Result<> Engine::close(Deadline deadline) {
  return core_->shutdown(deadline);
}

}  // namespace v1

namespace detail {

RegionCore::~RegionCore() {
  if (!released.load()) engine->release_unattended(std::move(memory), record);
}

}  // namespace detail
}  // namespace crossdock::transfer
