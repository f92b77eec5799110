// The servers behind tcp:// and http:// stores. Each owns one thread and keeps its entries in
// memory; a restarted server is empty. Methods are thread-safe.
//
// HTTP mapping (any path): GET ?key=K -> 200 with the value, or 404; PUT ?key=K[&ttl_ms=N] with the
// value as body; DELETE ?key=K; GET ?prefix=P -> the keys, percent-encoded, one a line. Revisions
// are ETags: `If-None-Match: *` puts only a new key, `If-Match: "R"` only over revision R; 412
// otherwise. Every response carries `X-Crossdock-Store: 1`. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <crossdock/core/result.hpp>

#include "base/address.hpp"
#include "rendezvous/connection_server.hpp"
#include "rendezvous/key_table.hpp"

namespace crossdock::rendezvous {

struct StoreServerOptions {
  base::HostPort address = {"127.0.0.1", 0};
  ServerLimits limits = {};
  KeyTable::Limits table = {};
};

class StoreServer {
 public:
  static Result<std::unique_ptr<StoreServer>> create(const StoreServerOptions& options,
                                                     Deadline deadline);
  ~StoreServer();
  [[nodiscard]] const base::SocketAddress& address() const;
  [[nodiscard]] std::string url() const;  // what clients open
  [[nodiscard]] std::size_t num_connections();

 private:
  class Impl;
  explicit StoreServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class HttpStoreServer {
 public:
  static Result<std::unique_ptr<HttpStoreServer>> create(const StoreServerOptions& options,
                                                         Deadline deadline);
  ~HttpStoreServer();
  [[nodiscard]] const base::SocketAddress& address() const;
  [[nodiscard]] std::string url() const;
  [[nodiscard]] std::size_t num_connections();

 private:
  class Impl;
  explicit HttpStoreServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crossdock::rendezvous
