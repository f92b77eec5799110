// http://host:port/path: the client of an HTTP metadata service (mapping: store_server.hpp). One
// connection a request. A plain service that only knows GET, PUT and DELETE of ?key= serves put,
// get, remove and wait; leases, list and compare_and_put need `crossdock store --http` and are
// refused with kUnsupported otherwise. Waiting asks again, at most every 100 ms. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {

// `rest` is host[:port][/path]. Tries until the deadline while nobody listens there.
Result<std::shared_ptr<Store>> open_http_store(std::string_view rest, Deadline deadline);

}  // namespace crossdock::rendezvous
