// See transport.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/transport.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "transport/tcp/endpoint.hpp"

namespace crossdock::transport {

std::unique_ptr<Transport> make_tcp(const TransportContext& context) {
  return std::make_unique<tcp::TcpTransport>(context, tcp::read_options(context.config));
}

namespace tcp {

TcpTransport::TcpTransport(const TransportContext& context, const TcpOptions& options)
    : context_(context),
      options_(options),
      log_(context.log != nullptr ? context.log->component("transport.tcp") : base::Logger()),
      workers_(std::max(options.threads, 1u)) {}

TcpTransport::~TcpTransport() {
  for (const auto& lane : inbound_)
    lane->sever();
  workers_.stop();
}

Result<> TcpTransport::reaches(const PeerInfo& peer) {
  if (peer.dial) return {};
  return make_error(Code::kUnreachable,
                    fmt::format("peer '{}' cannot be dialled for data lanes", peer.name));
}

Result<std::unique_ptr<Endpoint>> TcpTransport::connect(const PeerInfo& peer, std::uint32_t rail,
                                                        Deadline deadline) {
  CROSSDOCK_CHECK_OK(reaches(peer));
  if (rail >= options_.lanes)
    return invalid_argument(
        fmt::format("rail {} of peer '{}' must be below transport.tcp.lanes = {}", rail, peer.name,
                    options_.lanes));
  CROSSDOCK_TRY(worker, workers_.next());
  CROSSDOCK_TRY(fd, peer.dial(static_cast<std::uint16_t>(rail), deadline));
  CROSSDOCK_TRY(lane, LaneOut::create({.fd = std::move(fd),
                                       .peer = peer.name,
                                       .lane = rail,
                                       .options = options_,
                                       .worker = worker,
                                       .log = &log_}));
  return std::unique_ptr<Endpoint>(std::make_unique<TcpEndpoint>(std::move(lane)));
}

Result<> TcpTransport::accept(InboundLane lane) {
  CROSSDOCK_TRY(worker, workers_.next());
  CROSSDOCK_TRY(inbound, LaneIn::create({.lane = std::move(lane),
                                         .options = options_,
                                         .worker = worker,
                                         .regions = context_.regions,
                                         .log = &log_}));
  const std::lock_guard lock(mutex_);
  std::erase_if(inbound_, [](const auto& old) { return old->over(); });
  inbound_.push_back(std::move(inbound));
  return {};
}

template <class Which>
void TcpTransport::sever_those(Which&& which) {
  std::vector<std::shared_ptr<LaneIn>> gone;
  {
    const std::lock_guard lock(mutex_);
    const auto keep = std::stable_partition(inbound_.begin(), inbound_.end(),
                                            [&](const auto& lane) { return !which(*lane); });
    gone.assign(std::make_move_iterator(keep), std::make_move_iterator(inbound_.end()));
    inbound_.erase(keep, inbound_.end());
  }
  // Each waits for the turn that its lane is in; after the last one the memory is untouched.
  for (const auto& lane : gone)
    lane->sever();
}

bool TcpTransport::sever_inbound(std::uint64_t session) {
  sever_those([&](const LaneIn& lane) { return lane.session() == session; });
  return true;
}

void TcpTransport::retire_lane(std::uint64_t session, std::uint16_t lane) {
  sever_those([&](const LaneIn& old) { return old.session() == session && old.lane() == lane; });
}

}  // namespace tcp
}  // namespace crossdock::transport
