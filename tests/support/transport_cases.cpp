// See transport_cases.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "support/transport_cases.hpp"

#include "transport/faulty/transport.hpp"
#include "transport/loopback/transport.hpp"
#include "transport/shm/transport.hpp"
#include "transport/tcp/transport.hpp"

namespace crossdock::testing {
namespace {

std::unique_ptr<Transport> shm_by(const transport::TransportContext& context,
                                  transport::shm::CopyMode copy) {
  return transport::make_shm(context, {.copy = copy}).value();
}

}  // namespace

std::vector<TransportCase> transport_cases() {
  using transport::TransportContext;
  std::vector<TransportCase> cases;
  cases.push_back({.name = "loopback",
                   .make =
                       [](const TransportContext& context) {
                         return transport::make_loopback(context, transport::LoopbackOptions{});
                       },
                   .same_engine = true});
  cases.push_back({.name = "shm_map",
                   .make =
                       [](const TransportContext& context) {
                         return shm_by(context, transport::shm::CopyMode::kMap);
                       },
                   .shared_memory = true});
  cases.push_back({.name = "shm_vm", .make = [](const TransportContext& context) {
                     return shm_by(context, transport::shm::CopyMode::kVm);
                   }});
  // A short queue, so that the tests can fill it.
  cases.push_back({.name = "tcp", .make = [](const TransportContext& context) {
                     transport::tcp::TcpOptions options;
                     options.queue_shards = 64;
                     return std::make_unique<transport::tcp::TcpTransport>(context, options);
                   }});
  // Delays and another order are legal: every promise of the contract must hold under them.
  cases.push_back(
      {.name = "faulty_shm",
       .make =
           [](const TransportContext& context) {
             return transport::make_faulty(
                        shm_by(context, transport::shm::CopyMode::kMap),
                        {.seed = 7, .delay_max = std::chrono::milliseconds(1), .reorder = 4})
                 .value();
           },
       .shared_memory = true});
  return cases;
}

}  // namespace crossdock::testing
