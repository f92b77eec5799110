// An Exchange over a metadata store that is open already. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <crossdock/core/result.hpp>
#include <crossdock/symm/exchange.hpp>

#include "rendezvous/store.hpp"

namespace crossdock::symm {

// `name` is used for one group in the life of the store.
Result<std::shared_ptr<Exchange>> make_store_exchange(std::shared_ptr<rendezvous::Store> store,
                                                      std::string name, Membership membership);

}  // namespace crossdock::symm
