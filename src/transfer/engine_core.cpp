// Birth and end of an engine. What it does in between is in engine_memory.cpp and
// engine_transfer.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/engine_core.hpp"

#include <cerrno>
#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.hpp"
#include "base/socket.hpp"
#include "transfer/call_errors.hpp"
#include "transfer/host_identity.hpp"

namespace crossdock::transfer::detail {
namespace {

constexpr std::size_t kMaxNameBytes = 256;
constexpr auto kLastRails = std::chrono::seconds(2);  // for threads that are about to let them go

// What peers are told to dial. A port that listens everywhere has no address of its own; the first
// interface may be a bridge that ends on this host, so the routes decide.
std::string dialled_address(const base::SocketAddress& listening, const base::Logger& log) {
  if (!listening.is_any()) return listening.to_string();
  Result<base::SocketAddress> way_out = base::outgoing_address(listening.family());
  // [::] takes IPv4 as well.
  if (!way_out.ok() && listening.family() == AF_INET6) way_out = base::outgoing_address(AF_INET);
  if (way_out.ok()) return base::format_host_port(way_out->host(), listening.port());
  const auto here = base::format_host_port("127.0.0.1", listening.port());
  log.write(
      base::LogLevel::kWarn,
      fmt::format("{} listens on every interface and there is no route out, so peers are told "
                  "{}: set `advertise` to what they shall dial",
                  listening.to_string(), here));
  return here;
}

// What the caller says that peers shall dial; an address that none could dial would otherwise be
// found by the peers, one by one.
Result<std::string> advertised_address(const std::string& advertise, std::uint16_t listening_port) {
  const auto wrong = [&](std::string_view why) {
    return invalid_argument(fmt::format(
        "`advertise` must be the host:port that peers dial, not '{}': {}", advertise, why));
  };
  const auto parsed = base::parse_host_port(advertise);
  if (!parsed.ok()) return wrong(parsed.error().message);
  if (parsed->host == "0.0.0.0" || parsed->host == "::")
    return wrong("every peer would dial itself");
  return base::format_host_port(parsed->host, parsed->port == 0 ? listening_port : parsed->port);
}

base::LogSink log_sink(const std::function<void(const LogLine&)>& on_log) {
  if (!on_log) return {};
  return [on_log](const base::LogRecord& record) {
    on_log({.level = base::to_string(record.level),
            .component = record.component,
            .message = record.message});
  };
}

Result<base::Config> load_config(const EngineOptions& options) {
  base::ConfigOverrides overrides(options.config.begin(), options.config.end());
  if (!options.listen.empty()) overrides.emplace_back("control.listen", options.listen);
  return base::Config::load(overrides);
}

}  // namespace

Result<std::shared_ptr<EngineCore>> EngineCore::create(EngineOptions options) {
  CROSSDOCK_TRY(config, load_config(options));
  const std::shared_ptr<EngineCore> core(new EngineCore(std::move(config)), DeleteUnlessForked{});
  if (auto started = core->start(options); !started.ok()) {
    (void)core->shutdown(Deadline::now());
    return std::move(started).error();
  }
  return core;
}

Result<> EngineCore::start(const EngineOptions& options) {
  if (options.name.size() > kMaxNameBytes)
    return invalid_argument(fmt::format("the engine name has {} bytes; at most {} are allowed",
                                        options.name.size(), kMaxNameBytes));
  settings_ = read_settings(config_);
  CROSSDOCK_TRY(log, base::Logger::create(config_.string("log.level"), log_sink(options.on_log)));
  log_ = log.component("transfer");
  for (const auto& warning : config_.warnings())
    log_.write(base::LogLevel::kWarn, warning);
  tracer_ = base::Tracer::of_process(
      {.file = config_.string("trace.file"),
       .events_per_thread = static_cast<std::size_t>(config_.integer("trace.events_per_thread"))});
  warn_of_trace(tracer_->check_writable());  // now, and not at the end of the run it was meant for
  make_counters();
  interrupt_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!interrupt_) return errno_error(errno, "eventfd of the engine");
  CROSSDOCK_TRY(instance, wire::random_id());
  identity_.instance = instance;
  identity_.host = read_host_identity();
  identity_.secret = settings_.secret;
  CROSSDOCK_TRY(loop, base::EventLoop::create("xd-control"));
  loop_ = std::move(loop);
  std::thread::id control;
  loop_->run([&] { control = std::this_thread::get_id(); });
  mailboxes_ = std::make_unique<Mailboxes>(
      MailboxLimits{.messages = settings_.mailbox_messages, .bytes = settings_.mailbox_bytes},
      control);
  transfers_ = std::make_unique<TransferList>(*loop_, settings_.quiesce_grace);
  CROSSDOCK_CHECK_OK(start_transports());
  server_ = std::make_unique<ControlServer>(
      *loop_, identity_, settings_, log.component("control"),
      [this](std::shared_ptr<ControlLink> link, const wire::Hello& hello) {
        on_welcome(std::move(link), hello);
      });
  CROSSDOCK_CHECK_OK(server_->listen());
  if (options.advertise.empty()) {
    address_ = dialled_address(server_->address(), log_);
  } else {
    CROSSDOCK_TRY(advertised, advertised_address(options.advertise, server_->address().port()));
    address_ = std::move(advertised);
  }
  identity_.name = options.name.empty() ? address_ : options.name;
  Result<> listening;
  loop_->run([&] { listening = server_->start(); });
  CROSSDOCK_CHECK_OK(std::move(listening));
  return publish(options.store);
}

Result<> EngineCore::publish(const std::string& store) {
  const auto deadline = Deadline::in(settings_.connect_timeout);
  CROSSDOCK_TRY(publisher, Publisher::create(store, deadline));
  publisher_ = std::move(publisher);
  if (publisher_->peer_to_peer()) return {};
  const SegmentRecord record{address_, identity_.instance};
  CROSSDOCK_CHECK_OK(
      publisher_->publish(identity_.name, record, 3 * settings_.republish, deadline));
  if (!publisher_->leased())
    CROSSDOCK_LOG(log_, kWarn,
                  "store {} holds no leases: if this engine dies without close(), its entry '{}' "
                  "stays until another engine takes the name or somebody removes it",
                  publisher_->describe(), identity_.name);
  loop_->run([this] { republish_later(); });
  return {};
}

void EngineCore::republish_later() {
  loop_->call_at(Deadline::in(settings_.republish), [this] {
    jobs_.post([this] {
      const SegmentRecord record{address_, identity_.instance};
      // close() waits for it.
      const auto patience = std::min(settings_.republish / 2, settings_.connect_timeout);
      const auto again = publisher_->publish(identity_.name, record, 3 * settings_.republish,
                                             Deadline::in(patience));
      if (!again.ok())
        CROSSDOCK_LOG_ONCE(log_, kWarn, "republish", "cannot renew the entry in the store: {}",
                           again.error().message);
    });
    republish_later();
  });
}

Result<> EngineCore::start_transports() {
  const auto context = transport::TransportContext{.config = &config_,
                                                   .log = &log_,
                                                   .metrics = &metrics_,
                                                   .tracer = tracer_.get(),
                                                   .regions = &regions_,
                                                   .instance = identity_.instance,
                                                   .host = identity_.host};
  CROSSDOCK_TRY(transports, transport::make_transports(context));
  transports_ = std::move(transports);
  for (const auto& transport : transports_)
    if (transport->name().find("shm") != std::string_view::npos)
      identity_.features |= kFeatureCopiesItself;
  return {};
}

void EngineCore::warn_of_trace(const Result<>& written) {
  if (!written.ok())
    log_.write(base::LogLevel::kWarn,
               fmt::format("no trace of this engine: {}; correct the setting trace.file or "
                           "CROSSDOCK_TRACE",
                           written.error().message));
}

void EngineCore::make_counters() {
  const auto outcome = [this](const char* label) {
    return metrics_.counter({.name = "crossdock_transfers_total", .help = "Transfers by outcome."},
                            {{"outcome", label}});
  };
  counters_.delivered = outcome("delivered");
  counters_.failed = outcome("failed");
  counters_.cancelled = outcome("cancelled");
  counters_.bytes = metrics_.counter(
      {.name = "crossdock_transfer_bytes_total", .help = "Bytes of delivered transfers."});
  counters_.retries = metrics_.counter({.name = "crossdock_shard_retries_total",
                                        .help = "Shards posted again after a rail failed."});
  counters_.connects = metrics_.counter(
      {.name = "crossdock_peer_connects_total", .help = "Engines that this one connected to."});
  counters_.redials = metrics_.counter(
      {.name = "crossdock_redials_total", .help = "Sets of rails dialled again after a fault."});
  counters_.fallbacks =
      metrics_.counter({.name = "crossdock_fallbacks_total",
                        .help = "Shards that went on by another transport after theirs failed."});
  counters_.regions =
      metrics_.gauge({.name = "crossdock_regions", .help = "Registered memory regions."});
  counters_.latency = metrics_.histogram({.name = "crossdock_transfer_seconds",
                                          .help = "Time from submission to the terminal state.",
                                          .scale = 1e-9});
}

Result<> EngineCore::usable() const {
  if (closed_.load(std::memory_order_acquire))
    return Error{.code = Code::kClosed, .scope = Scope::kEngine, .message = "the engine is closed"};
  if (forked()) return forked_error();
  return {};
}

Result<> EngineCore::may_wait(std::string_view call) const {
  if (!loop_->on_loop_thread()) return {};
  return control_thread_error(call);
}

// Two kinds of connection come through the control port.
void EngineCore::on_welcome(std::shared_ptr<ControlLink> link, const wire::Hello& hello) {
  if (hello.purpose == wire::Purpose::kData) return on_data_lane(link, hello);
  // Whoever came now would not be asked to let go of what it learns.
  if (closed_.load()) return refuse(*link, "it is being closed");
  const auto token = wire::random_id();
  if (!token.ok()) return link->close(token.error());
  sessions_.add(std::make_shared<InboundSession>(*this, std::move(link), hello, *token));
}

void EngineCore::on_data_lane(const std::shared_ptr<ControlLink>& link, const wire::Hello& hello) {
  const auto session = sessions_.by_token(hello.token);
  // A lane of a session that ended, or of the engine that had this port before us.
  if (!session) return refuse(*link, "it has no such session");
  for (const auto& transport : transports_)
    transport->retire_lane(hello.token, hello.rail);
  if (const auto sent = link->send(welcome(hello.token)); !sent.ok())
    return link->close(sent.error());
  auto fd = link->detach();
  if (!fd.ok()) return link->close(fd.error());
  for (const auto& transport : transports_) {
    if (!transport->takes_lanes()) continue;
    const auto taken = transport->accept({.fd = std::move(*fd),
                                          .peer_name = session->peer_name(),
                                          .session = session->data_token(),
                                          .lane = hello.rail});
    if (!taken.ok())
      CROSSDOCK_LOG(log_, kWarn, "refused a data lane of '{}': {}", session->peer_name(),
                    taken.error().message);
    return;
  }
}

void EngineCore::refuse(ControlLink& link, const std::string& why) const {
  const wire::Refused refused{
      .code = Code::kPeerLost,
      .message = fmt::format("this is instance {:016x}; {}", identity_.instance, why)};
  (void)link.send(refused);
  link.close(make_error(refused.code, refused.message));
}

Result<> EngineCore::stop_transfers(Deadline deadline) {
  const Error why{
      .code = Code::kClosed, .scope = Scope::kEngine, .message = "the engine was closed"};
  for (const auto& transfer : transfers_->all())
    transfer->request_stop(why);
  const auto grace =
      std::min<std::chrono::nanoseconds>(settings_.quiesce_grace, deadline.remaining());
  if (transfers_->wait_empty(Deadline::in(grace))) return {};
  for (const auto& transfer : transfers_->all())
    transfer->sever_rails(why);
  // Nobody is dialled any more, so that only time can prove that nothing of them arrives.
  if (transfers_->wait_empty(Deadline::in(settings_.quiesce_grace + std::chrono::seconds(2))))
    return {};
  return make_error(Code::kInternal, "transfers did not end after their rails were cut");
}

// After it no call is inside that uses what is taken apart next, and none gets in.
Result<> EngineCore::close_entry(Deadline deadline) {
  gate_.close();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(interrupt_.get(), &one, sizeof one);
  std::vector<std::weak_ptr<PeerCore>> connecting;
  {
    const std::lock_guard lock(mutex_);
    connecting.swap(connecting_);
  }
  for (const auto& weak : connecting)
    if (const auto peer = weak.lock()) peer->interrupt(usable().error());
  // What is inside waits for nobody now; but mapping much memory takes its time.
  if (gate_.wait_idle(std::max(deadline, Deadline::in(settings_.connect_timeout)))) return {};
  return Error{.code = Code::kBusy,
               .scope = Scope::kEngine,
               .retry = Retry::kLater,
               .message = "calls of other threads are still inside the engine; close it again"};
}

// Who is to be asked is looked at on the loop, where peers are welcomed as well: one that is not
// there then never comes.
Result<> EngineCore::make_peers_let_go(Deadline deadline) {
  const auto revocation = sessions_.revoke({});
  if (revocation->wait(deadline)) return {};
  sessions_.cut_lanes(*revocation);
  if (revocation->wait(Deadline::now())) return {};
  return Error{.code = Code::kBusy,
               .scope = Scope::kPeer,
               .message = fmt::format("closed, but {} did not confirm that they stopped using "
                                      "this engine's memory; keep it mapped",
                                      revocation->holders())};
}

void EngineCore::stop_peers(const Error& why, bool quiesced) {
  std::map<std::string, std::weak_ptr<PeerCore>> peers;
  {
    const std::lock_guard lock(mutex_);
    peers.swap(peers_);
  }
  for (const auto& [name, weak] : peers)
    if (const auto peer = weak.lock()) peer->shut(why, quiesced);
  // Rails that nobody holds any more are destroyed by the loop, before this returns.
  loop_->run([] {});
}

// What is left when the threads that could end a transfer are gone: transfers that waited for one
// of them. A transfer with a shard on a rail is not ended, whatever it costs: its rail, and what
// that needs, stays.
void EngineCore::end_threads(const Error& why, bool let_go) {
  loop_->run([&] {
    if (server_) server_->stop();
    sessions_.close_all(why, let_go);
  });
  loop_->run([] {});  // rails that the sessions' end released
  // Or that somebody is about to: a thread that has just ended a transfer, or dropped a peer. The
  // loop destroys them.
  if (transfers_->size() == 0) (void)rail_count_->wait_none(Deadline::in(kLastRails));
  mailboxes_->close();
  loop_->stop_and_join();
  bool stuck = false;
  for (const auto& transfer : transfers_->all())
    if (transfer->at_rest())
      transfer->finish(why);
    else
      stuck = true;
  orphans_.abandon();
  if (!stuck && rail_count_->wait_none(Deadline::in(kLastRails))) return transports_.clear();
  log_.write(base::LogLevel::kError,
             "rails are in use after they were cut; the engine is left in memory");
  new std::shared_ptr<EngineCore>(weak_from_this().lock());
}

Result<> EngineCore::shutdown(Deadline deadline) {
  if (forked()) return usable();  // a child owns no threads
  if (gate_.entered_here() || (loop_ && loop_->on_loop_thread()))
    return invalid_argument(
        "an engine must not be closed or destroyed by one of its own callbacks: it joins the "
        "threads they run on");
  CROSSDOCK_TRY(claim, closing_.take(identity_.name, deadline, "closing engine"));
  if (outcome_) return *outcome_;
  closed_.store(true);
  if (!loop_ || !transfers_) return *(outcome_ = Result<>());
  CROSSDOCK_CHECK_OK(close_entry(deadline));
  const Error why{
      .code = Code::kClosed, .scope = Scope::kEngine, .message = "the engine was closed"};
  Result<> outcome = stop_transfers(deadline);
  const bool quiesced = outcome.ok();
  if (auto let_go = make_peers_let_go(deadline); !let_go.ok()) {
    if (outcome.ok()) outcome = std::move(let_go);
  } else {
    let_go_.store(true);
  }
  jobs_.stop();  // before the withdrawal: a renewal under way would undo it
  dials_.stop();
  hasher_.stop();
  if (publisher_ && !publisher_->peer_to_peer())
    (void)publisher_->withdraw(identity_.name, {address_, identity_.instance},
                               earlier(deadline, Deadline::in(std::chrono::seconds(1))));
  stop_peers(why, quiesced);
  end_threads(why, let_go_.load());
  if (tracer_) warn_of_trace(tracer_->flush());
  return *(outcome_ = std::move(outcome));
}

EngineCore::~EngineCore() {
  (void)shutdown(Deadline::now());
  if (!let_go_.load())
    for (auto& memory : kept_)
      memory.disown();
}

}  // namespace crossdock::transfer::detail
