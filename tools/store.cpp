// `crossdock store`: serves a metadata store until SIGINT or SIGTERM. The entries live in memory;
// the server's own thread does the work, the main thread waits for the signal.
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <pthread.h>

#include "base/address.hpp"
#include "cli.hpp"
#include "commands.hpp"
#include "rendezvous/store_server.hpp"

namespace crossdock::tools {
namespace {

using rendezvous::HttpStoreServer;
using rendezvous::StoreServer;
using rendezvous::StoreServerOptions;

constexpr std::uint16_t kDefaultPort = 7070;

struct StoreOptions {
  std::string listen = "127.0.0.1:7070";
  bool http = false;
  bool tcp = false;
};

// Precondition: SIGINT and SIGTERM are blocked, so that the server's thread never takes them.
template <class Server>
int serve(const StoreServerOptions& options, const sigset_t& signals) {
  const auto server = Server::create(options, Deadline::in(std::chrono::seconds(10)));
  if (server.code() == Code::kBusy) {
    Error error = server.error();
    error.message += "; name another port with --listen host:port, port 0 takes any free one";
    return report(error);
  }
  if (!server.ok()) return report(server.error());
  fmt::print("serving {}\n", (*server)->url());
  fmt::print("for engines and ranks here: store={}\n", (*server)->url());
  std::fflush(stdout);
  int which = 0;
  ::sigwait(&signals, &which);
  fmt::print("stopped by signal {}\n", which);
  return kDone;
}

int store(const StoreOptions& options) {
  const auto address = base::parse_host_port(options.listen, kDefaultPort);
  if (!address.ok()) return report(address.error());
  StoreServerOptions server;
  server.address = *address;
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return options.http ? serve<HttpStoreServer>(server, signals)
                      : serve<StoreServer>(server, signals);
}

}  // namespace

void add_store(CLI::App& app) {
  auto options = std::make_shared<StoreOptions>();
  CLI::App* sub = app.add_subcommand("store", "Serve a metadata store for engines and ranks");
  sub->add_option("--listen", options->listen, "Address to bind, as host[:port]; port 0: any free")
      ->capture_default_str();
  auto* tcp = sub->add_flag("--tcp", options->tcp, "Speak the binary protocol of tcp:// (default)");
  sub->add_flag("--http", options->http, "Speak HTTP: GET, PUT, DELETE with ?key=")->excludes(tcp);
  sub->callback(run(options, store));
}

}  // namespace crossdock::tools
