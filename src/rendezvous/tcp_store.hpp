// tcp://host:port: the client of a StoreServer. A call takes a connection that is idle, or makes
// one; so calls of many threads do not wait for each other. No thread of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string_view>

#include "rendezvous/store.hpp"

namespace crossdock::rendezvous {

// `address` is host:port. Tries until the deadline while nobody listens there. A connection whose
// other end has not answered the kernel for `silence` (a second at least) is over.
Result<std::shared_ptr<Store>> open_tcp_store(
    std::string_view address, Deadline deadline,
    std::chrono::milliseconds silence = std::chrono::seconds(30));

}  // namespace crossdock::rendezvous
